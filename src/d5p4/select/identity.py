"""No selection: every row goes on by itself (independent samples, best-of-n)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..types import Choice, PoolView


@dataclass(frozen=True)
class Identity:
    """parents = 0 .. N-1, one child each."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.stay()
