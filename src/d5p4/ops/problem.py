"""Maximise log det(L_S) + sum of log_gain over S, over sets S of k items, one from each group: what is better?

The better of two sets has (1) fewer zero pivots, (2) the larger sum of log pivot + log gain over the pivots that are
not zero, (3) the larger sum of quality, (4) the smaller tie numbers, compared in ascending order. The first difference
decides, and values within TOLERANCE of each other count as equal. The pivots are those of a Cholesky factorisation of
L_S that takes the largest pivot times gain first, so the pivots do not depend on the order of the items.

Greedy elimination is the recurrence behind both greedy MAP inference and the value of a set. The rows c_t form an
incremental Cholesky factor, one row per pick t. The pivot of item i is d_i = L_ii - sum_t c_ti^2, the variance of i
that the picks so far leave unexplained. Picking item j adds a row with the entries c_i = (L_ji - sum_t c_tj c_ti) /
sqrt(d_j). log det(L_S) is the sum of the log pivots that the items of S had when they were picked (Chen et al., 2018).
A start is one greedy run. Starts differ in their first pick. Each takes O(k^2 N).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import wide
from .ties import TOLERANCE, argbest, canonical_order

_BITS = 62  # of a set, in one number
_WORST = -1e30  # the least quality. It fits into float32 and is above minus infinity, which marks taken items
_CHUNK = 1 << 22  # a temporary tensor has at most this many numbers, to limit memory


class Elimination(NamedTuple):
    """The result of `eliminate` for B problems with s starts each."""

    picks: Tensor  # [B, s, k] items in the order they were picked
    zeros: Tensor  # [B, s] the number of picks whose pivot was zero
    logs: Tensor  # [B, s] the sum of log pivot + log gain over picks whose pivot was not zero


def zero_pivot(dtype: torch.dtype) -> float:
    """Return the largest pivot that still counts as zero in kernels with 1 as the largest diagonal entry."""
    return 1e-10 if dtype == torch.float64 else 1e-6


def eliminate(
    kernel: Tensor, log_gain: Tensor, quality: Tensor, tie: Tensor, group: Tensor, k: int, first: Tensor | None = None
) -> Elimination:
    """Pick k items, at most one per group, by the largest pivot times gain, or by quality if all pivots are zero.

    kernel [B, N, N] is symmetric, and its largest diagonal entry is at most 1. log_gain, quality and tie [B, N] are
    finite. group [N] is the group of each item. first [B, s], if given, is the first pick of each start. Whether a
    pivot is zero depends on the kernel alone, so that a small gain never makes a set look singular.
    """
    problems, size = log_gain.shape
    starts = 1 if first is None else first.shape[1]
    floor = zero_pivot(kernel.dtype)
    residual = kernel.diagonal(dim1=-2, dim2=-1).unsqueeze(1).repeat(1, starts, 1)
    rows = kernel.new_zeros(problems, starts, k, size)
    free = torch.ones(problems, starts, size, dtype=torch.bool, device=kernel.device)
    zeros = torch.zeros(problems, starts, dtype=torch.int64, device=kernel.device)
    logs = kernel.new_zeros(problems, starts)
    picks = []
    problem = torch.arange(problems, device=kernel.device).unsqueeze(-1)
    gain, worth, tie = log_gain.unsqueeze(1), quality.unsqueeze(1), tie.unsqueeze(1)
    for t in range(k):
        weight = torch.where(free & (residual > floor), residual.log() + gain, -torch.inf)
        if t == 0 and first is not None:
            pick = first
        else:
            regular = weight.amax(-1, keepdim=True) > -torch.inf
            pick = argbest(torch.where(regular, weight, torch.where(free, worth, -torch.inf)), tie)
        at = pick.unsqueeze(-1)
        chosen = weight.gather(-1, at)
        positive = chosen > -torch.inf
        zeros += ~positive.squeeze(-1)
        logs += torch.where(positive, chosen, 0.0).squeeze(-1)
        past = rows[:, :, :t]
        explained = past.gather(-1, at.unsqueeze(2).expand(-1, -1, t, 1)).transpose(-1, -2) @ past
        row = (kernel[problem, pick] - explained.squeeze(2)) / residual.gather(-1, at).sqrt()
        row = torch.where(positive, row, 0.0)
        rows[:, :, t] = row
        residual = residual - row * row
        free &= group != group[pick].unsqueeze(-1)
        picks.append(pick)
    return Elimination(torch.stack(picks, -1), zeros, logs)


@dataclass(frozen=True)
class Problem:
    """P problems over N items in canonical order. All numbers are finite. Each kernel's largest diagonal entry is 1."""

    kernel: Tensor  # [P, N, N]
    log_gain: Tensor  # [P, N]
    quality: Tensor  # [P, N]
    tie: Tensor  # [P, N]
    order: Tensor  # [P, N] the caller's index of each item
    k: int
    groups: int  # number of groups: k if one item per group is chosen, N if any k items may be chosen

    @property
    def group(self) -> Tensor:
        """The group of each item, [N]."""
        size = self.kernel.shape[-1]
        return torch.arange(size, device=self.kernel.device) // (size // self.groups)

    def part(self, start: int, stop: int) -> Problem:
        """Return the problems of the prompts start to stop - 1."""
        names = ("kernel", "log_gain", "quality", "tie", "order")
        return replace(self, **{name: getattr(self, name)[start:stop] for name in names})

    def score(self, sets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of zero pivots [P, M] and the log value [P, M] of sets [P, M, k]. O(k^3) per set."""
        prompts, count, k = sets.shape
        flat, step = sets.reshape(prompts * count, k), _CHUNK // (k * k) + 1
        prompt = torch.arange(prompts, device=sets.device).repeat_interleave(count).unsqueeze(-1)
        own_group = torch.arange(k, device=sets.device)
        results = []
        for at, p in zip(flat.split(step), prompt.split(step), strict=True):
            inside = self.kernel[p.unsqueeze(-1), at.unsqueeze(-1), at.unsqueeze(-2)]
            own = self.log_gain[p, at], self.quality[p, at], self.tie[p, at]
            results.append(eliminate(inside, *own, own_group, k))
        zeros, logs = (torch.cat([getattr(one, name) for one in results]) for name in ("zeros", "logs"))
        return zeros.view(prompts, count), logs.view(prompts, count)

    def best(self, sets: Tensor) -> Tensor:
        """Return the best set [P, k] of each prompt among sets [P, M, k]."""
        return best_set(sets, *self.score(sets), self.quality, self.tie)

    def restore(self, sets: Tensor) -> Tensor:
        """Translate sets [P, k] from the canonical order into the caller's indices, ascending."""
        return self.order.gather(-1, sets).sort(-1).values


def best_set(sets: Tensor, zeros: Tensor, logs: Tensor, quality: Tensor, tie: Tensor) -> Tensor:
    """Return the best set [P, k] of each prompt among sets [P, M, k], given the zero pivots and the log value [P, M] of
    every set, and the quality and tie [P, N] of the items.

    To compare ties, a set is written as one long number, whose highest bit belongs to the item with the smallest tie.
    """
    prompt = torch.arange(len(sets), device=sets.device).view(-1, 1, 1)
    close = zeros == zeros.amin(-1, keepdim=True)
    for value in (logs, quality[prompt, sets].sum(-1)):
        value = torch.where(close, value, -torch.inf)
        close &= value >= value.amax(-1, keepdim=True) - TOLERANCE
    rank = tie.argsort(stable=True).argsort()[prompt, sets]
    part, bit = rank // _BITS, 1 << (_BITS - 1 - rank % _BITS)
    for number in range(tie.shape[-1] // _BITS + 1):
        word = torch.where(close, torch.where(part == number, bit, 0).sum(-1), -1)
        close &= word == word.amax(-1, keepdim=True)
    return sets[prompt.view(-1), close.to(torch.uint8).argmax(-1)]


def bounded(quality: Tensor) -> Tensor:
    """Return the quality without infinities, and with the worst quality for NaN."""
    return quality.nan_to_num(nan=_WORST, posinf=-_WORST, neginf=_WORST).clamp(_WORST, -_WORST)


def check(
    kernel: Tensor, k: int, log_gain: Tensor | None, quality: Tensor | None, tie: Tensor | None, partition: bool
) -> None:
    """Raise an error that names the argument of `prepare` that is wrong."""
    if kernel.ndim != 3 or kernel.shape[1] != kernel.shape[2]:
        raise ValueError(f"kernel must be [P, N, N] (give kernel[None] for one problem), got {list(kernel.shape)}")
    prompts, size, _ = kernel.shape
    for name, values in (("log_gain", log_gain), ("quality", quality), ("tie", tie)):
        if values is not None and values.shape != (prompts, size):
            raise ValueError(f"{name} must be [P, N] = [{prompts}, {size}], got {list(values.shape)}")
    if not 1 <= k <= size:
        raise ValueError(f"cannot choose k = {k} of N = {size} items")
    if partition and size % k:
        raise ValueError(f"N = {size} items do not split into k = {k} groups of equal size")


def prepare(
    kernel: Tensor,
    k: int,
    log_gain: Tensor | None = None,
    quality: Tensor | None = None,
    tie: Tensor | None = None,
    *,
    partition: bool = True,
) -> Problem:
    """Symmetrise and scale the kernel [P, N, N], and put the items into canonical order. log_gain, quality and tie are
    [P, N]. Without a quality, it is the log of the kernel's diagonal; without a tie, it is the item's index.

    A prompt whose kernel or gain is not finite gets a kernel of zeros: quality decides. NaN is the worst quality.
    """
    check(kernel, k, log_gain, quality, tie, partition)
    prompts, size, _ = kernel.shape
    groups = k if partition else size
    dtype = wide(kernel.device)
    kernel = kernel.detach().to(dtype)
    kernel = (kernel + kernel.transpose(-1, -2)) / 2
    diagonal = kernel.diagonal(dim1=-2, dim2=-1)
    gain = torch.zeros_like(diagonal) if log_gain is None else log_gain.detach().to(dtype)
    worth = bounded(diagonal.log() if quality is None else quality.detach().to(dtype))
    if tie is None:
        tie = torch.arange(size, device=kernel.device).expand(prompts, size)

    kernel = kernel / diagonal.amax(-1).view(-1, 1, 1)
    gain = gain - gain.amax(-1, keepdim=True)
    sound = kernel.isfinite().all(-1).all(-1) & gain.isfinite().all(-1) & (diagonal.amax(-1) > 0)
    kernel = torch.where(sound.view(-1, 1, 1), kernel, 0.0)
    gain = torch.where(sound.view(-1, 1), gain, 0.0)

    order = canonical_order(tie, groups)
    kernel = kernel.gather(1, order.unsqueeze(-1).expand_as(kernel)).gather(2, order.unsqueeze(1).expand_as(kernel))
    gain, worth, tie = (values.gather(-1, order) for values in (gain, worth, tie))
    return Problem(kernel, gain, worth, tie, order, k, groups)
