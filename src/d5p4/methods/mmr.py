"""Diverse beam search as maximal marginal relevance under the partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from ..ops.mmr import mmr
from ..options import Option
from ..types import Choice, PoolView
from .common import Checked, by_group


@dataclass(frozen=True)
class MMR(Checked):
    """Picks one item per group. A pick is the item i with the largest Q_i - alpha * (similarity of i to the picks Y).

    The similarity to Y is the mean (1/|Y|) sum of S_ji over Y, which is the inner product of i with the mean of the
    picks, or the largest S_ji. Of all starts (first picks), the set with the largest sum is kept. On the Gram matrix
    this takes O(k N) per start, whatever the size of the features. starts: "n" (every item), "k" (the best item of each
    group), "one" (the best item of all).
    """

    alpha: Annotated[float, Option("Weight of the similarity to the answers chosen so far.", least=0)] = 20.0
    form: Annotated[Literal["mean", "max"], Option("Mean or largest similarity.")] = "mean"
    starts: Annotated[Literal["one", "k", "n"], Option("How many first picks are tried.")] = "n"

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        by_group(pool.tie, k)
        return pool.keep(mmr(pool.quality, pool.similarity, pool.tie, k, self.alpha, self.form, self.starts))
