"""Greedy beam search under the partition: the best child of every parent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ops.ties import argbest
from ..types import Choice, PoolView
from .groups import by_group, to_parents


@dataclass(frozen=True)
class GreedyBeam:
    """argmax of Q in each group, O(N)."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        quality = by_group(pool.quality, k)
        return pool.keep(to_parents(argbest(quality, by_group(pool.tie, k)), quality.shape[-1]))
