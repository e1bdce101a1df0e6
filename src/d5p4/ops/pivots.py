"""Greedy elimination: the recurrence behind both greedy MAP inference and the value of a set.

The rows c_t form an incremental Cholesky factor, one row per pick t. The pivot of item i is d_i = L_ii - sum_t c_ti^2,
the variance of i that the picks so far leave unexplained. Picking item j adds a row with the entries
c_i = (L_ji - sum_t c_tj c_ti) / sqrt(d_j). log det(L_S) is the sum of the log pivots that the items of S had when they
were picked (Chen et al., 2018). A start is one greedy run. Starts differ in their first pick. Each takes O(k^2 N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .ties import argbest


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
