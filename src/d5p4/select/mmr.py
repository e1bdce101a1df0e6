"""Diverse beam search as maximal marginal relevance under the partition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import D5P4Error
from ..ops.mmr import mmr
from ..types import Choice, PoolView
from .groups import by_group


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
        by_group(pool.tie, k)
        return pool.keep(mmr(pool.quality, pool.similarity, pool.tie, k, self.alpha, self.form, self.starts))
