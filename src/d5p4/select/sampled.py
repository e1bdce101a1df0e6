"""Sampling under the partition: one item per group with chance proportional to det(L_S)^(1/temperature)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..kernel import build, check_beta, check_kind
from ..ops.partition_map import condition, solve
from ..ops.problem import Problem, prepare
from ..ops.ties import argbest
from ..rng import gumbel, mix, uniform
from ..types import Choice, PoolView
from .draw import draw_index
from .exact import transversals
from .groups import by_group

_CHUNK = 1 << 22  # set members looked at together


@dataclass(frozen=True)
class PartitionSample:
    """P(S) proportional to det(L_S)^(1/temperature) over sets with one item per group.

    Up to `limit` sets are enumerated and the draw is exact, O(w^k k^3). Beyond that a Markov chain starts from the
    most likely set and redraws one group after the other given the rest, O(k^3 + k^2 w) a move. `moves` is their
    number, 20 k unless given: each redraw forgets its group's item completely, so 20 sweeps leave only what the groups
    remember through each other. Where every set is singular the most likely set itself is returned.
    """

    beta: float
    kernel: Literal["additive", "multiplicative"] = "additive"
    temperature: float = 1.0
    limit: int = 20_000
    moves: int | None = None

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_kind(self.kernel)
        if self.kernel == "multiplicative" and self.beta == 0:
            raise D5P4Error("the multiplicative kernel divides by beta, got beta = 0")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise D5P4Error(f"temperature must be a finite number > 0, got {self.temperature}")
        if self.limit < 0:
            raise D5P4Error(f"limit must be >= 0, got {self.limit}")
        if self.moves is not None and self.moves < 1:
            raise D5P4Error(f"moves must be >= 1, got {self.moves}")

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        width = by_group(pool.tie, k).shape[-1]
        kernel, log_gain = build(self.kernel, pool.quality, pool.similarity, self.beta)
        problem = prepare(kernel, k, log_gain, pool.quality, pool.tie)
        if width**k <= self.limit:
            sets = self._enumerate(problem, key)
        else:
            sets = self._walk(problem, key, 20 * k if self.moves is None else self.moves)
        return pool.keep(problem.restore(sets))

    def _enumerate(self, problem: Problem, key: Tensor) -> Tensor:
        """[P, k]: Gumbel-max over all sets, the noise keyed by the members' ties in any order."""
        sets = transversals(problem.k, problem.kernel.shape[-1] // problem.k, key.device)
        step = max(1, _CHUNK // sets.numel())
        drawn = []
        for p in range(0, key.shape[0], step):
            part = problem.part(p, p + step)
            zeros, logs = part.score(sets.expand(part.tie.shape[0], -1, -1))
            members = mix(part.tie)[:, sets].sum(-1)  # [P, w^k]
            noise = gumbel(uniform(mix(key[p : p + step].unsqueeze(-1), members), 0)).to(logs.dtype)
            weight = torch.where(zeros == 0, logs / self.temperature + noise, -torch.inf)
            pick = sets[argbest(weight, members)]
            singular = (zeros > 0).all(-1)
            if singular.any():
                pick[singular] = solve(part)[singular]
            drawn.append(pick)
        return torch.cat(drawn) if drawn else torch.zeros(0, problem.k, dtype=torch.int64, device=key.device)

    def _walk(self, problem: Problem, key: Tensor, moves: int) -> Tensor:
        """[P, k]: heat-bath moves, group after group in canonical order, which leave the target distribution in place.

        Item i of group a is drawn with chance proportional to the determinant with it in slot a,
        (r_i A_aa + Y_ai^2)^(1/temperature) in the letters of `ops.partition_map`.
        """
        sets = solve(problem)
        zeros, _ = problem.score(sets.unsqueeze(1))
        prompts = torch.arange(sets.shape[0], device=sets.device)
        width = problem.kernel.shape[-1] // problem.k
        diagonal = problem.kernel.diagonal(dim1=-2, dim2=-1)
        for move in range(moves):
            slot = move % problem.k
            here = slice(slot * width, (slot + 1) * width)
            inverse, cross, solved = condition(problem.kernel, prompts, sets, here)
            residual = (diagonal[:, here] - (cross * solved).sum(1)).clamp_min(0)
            ratio = residual * inverse[:, slot, slot].unsqueeze(-1) + solved[:, slot] ** 2
            weight = (ratio.log() + problem.log_gain[:, here]) / self.temperature
            weight = (weight - weight.amax(-1, keepdim=True)).exp()
            drawn = draw_index(weight, uniform(key.unsqueeze(-1), move).to(weight.dtype)).squeeze(-1)
            moved = sets.clone()
            moved[:, slot] = drawn + slot * width
            sets = torch.where(zeros == 0, moved, sets)
        return sets
