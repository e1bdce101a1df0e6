"""Random selection: one child of every parent, all equally likely."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ops.ties import argbest
from ..rng import mix, uniform
from ..types import Choice, PoolView
from .groups import by_group, to_parents


@dataclass(frozen=True)
class Random:
    """argmax of a uniform keyed by the item's tie hash in each group, O(N)."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        tie = by_group(pool.tie, k)
        return pool.keep(to_parents(argbest(uniform(mix(key.view(-1, 1, 1), tie), 0), tie), tie.shape[-1]))
