"""Diverse beam search as maximal marginal relevance under the partition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.ties import argbest
from ..types import Choice, PoolView
from .groups import by_group, to_parents

_WORST = -1e30  # finite, so that a taken item (minus infinity) is worse still


@dataclass(frozen=True)
class MMR:
    """Pick i of a free group by the largest Q_i - alpha * similarity to the picks; of all starts keep the largest sum.

    The similarity to the picks Y is the mean (1/|Y|) sum of S_ji over Y, which is the inner product of i with the mean
    of the picks, or the largest S_ji. On the Gram matrix this takes O(k N) a start, whatever the features' size.
    starts: "n" (every item), "k" (the best of each group), "one" (the best of all).
    """

    alpha: float = 1.0
    form: Literal["mean", "max"] = "mean"
    starts: Literal["one", "k", "n"] = "n"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise D5P4Error(f"alpha must be a finite number >= 0, got {self.alpha}")
        if self.form not in ("mean", "max"):
            raise D5P4Error(f'form must be "mean" or "max", got {self.form!r}')
        if self.starts not in ("one", "k", "n"):
            raise D5P4Error(f'starts must be "one", "k" or "n", got {self.starts!r}')

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        width = by_group(pool.tie, k).shape[-1]
        quality = pool.quality.nan_to_num(nan=_WORST).clamp(_WORST, -_WORST)
        similarity = pool.similarity.to(quality.dtype)
        sound = similarity.isfinite().all(-1).all(-1)
        similarity = torch.where(sound.view(-1, 1, 1), similarity, 0.0)

        pick = self._first_picks(quality, pool.tie, k, width)  # [P, s]
        prompt = torch.arange(pick.shape[0], device=pick.device).unsqueeze(-1)
        group = torch.arange(pool.size, device=pick.device) // width
        tie = pool.tie.unsqueeze(1)
        free = group != group[pick].unsqueeze(-1)  # [P, s, N]
        near = similarity[prompt, pick]
        total = quality.gather(-1, pick)
        picks = [pick]
        for taken in range(1, k):
            penalty = near / taken if self.form == "mean" else near
            value = torch.where(free, quality.unsqueeze(1) - self.alpha * penalty, -torch.inf)
            pick = argbest(value, tie)
            total = total + value.gather(-1, pick.unsqueeze(-1)).squeeze(-1)
            free = free & (group != group[pick].unsqueeze(-1))
            row = similarity[prompt, pick]
            near = near + row if self.form == "mean" else torch.maximum(near, row)
            picks.append(pick)
        winner = argbest(total, pool.tie.gather(-1, picks[0]))
        return pool.keep(torch.stack(picks, -1)[prompt.squeeze(-1), winner].sort(-1).values)

    def _first_picks(self, quality: Tensor, tie: Tensor, k: int, width: int) -> Tensor:
        """[P, s]"""
        if self.starts == "n":
            return torch.arange(quality.shape[-1], device=quality.device).expand_as(quality)
        if self.starts == "k":
            return to_parents(argbest(by_group(quality, k), by_group(tie, k)), width)
        return argbest(quality, tie).unsqueeze(-1)
