"""Greedy beam search under the partition: the best child of every parent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from d5p4.ops.ties import argbest
from d5p4.select.groups import by_group, to_parents
from d5p4.types import Choice, PoolView


@dataclass(frozen=True)
class GreedyBeam:
    """argmax of Q in each group, O(N)."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        quality = by_group(pool.quality, k)
        return pool.keep(to_parents(argbest(quality, by_group(pool.tie, k)), quality.shape[-1]))
