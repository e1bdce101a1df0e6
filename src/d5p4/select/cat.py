"""Tempered categorical selection: a draw from softmax(Q / tau) in each group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..errors import D5P4Error
from ..ops.ties import argbest
from ..rng import gumbel, mix, uniform
from ..types import Choice, PoolView
from .beam import GreedyBeam
from .groups import by_group, to_parents


@dataclass(frozen=True)
class Categorical:
    """argmax of Q / tau + Gumbel noise in each group, O(N); tau = 0 is greedy beam search.

    An item's noise is keyed by its tie hash, so it follows the item wherever it stands in the pool.
    """

    score_temperature: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.score_temperature) and self.score_temperature >= 0):
            raise D5P4Error(f"score_temperature must be a finite number >= 0, got {self.score_temperature}")

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        if self.score_temperature == 0:
            return GreedyBeam()(pool, k, key)
        quality, tie = by_group(pool.quality, k), by_group(pool.tie, k)
        quality = quality.nan_to_num(nan=-math.inf)
        best = quality.amax(-1, keepdim=True)  # taken off first, so that a small temperature cannot overflow
        noise = gumbel(uniform(mix(key.view(-1, 1, 1), tie), 0))
        return pool.keep(to_parents(argbest((quality - best) / self.score_temperature + noise, tie), quality.shape[-1]))
