"""Diverse beam search: maximal marginal relevance (MMR) with one item per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from torch import Tensor

from ..ops.mmr import mmr
from ..options import Checked, Option
from ..types import Choice
from .beam import by_group

if TYPE_CHECKING:
    from ..decode.view import PoolView


@dataclass(frozen=True)
class MMR(Checked):
    """Picks one item per group, each time the item i with the largest Q_i - alpha * (similarity of i to the picks Y).

    form: the similarity of i to Y is the mean of S_ji over j in Y ("mean") or the largest S_ji ("max"). The search runs
    once from each start (first pick) and keeps the set whose picks have the largest sum of these values. The time is
    O(k N) per start, because S is given. starts: "n" (every item), "k" (the best item of each group), "one" (the best
    item of all).
    """

    alpha: Annotated[float, Option("Weight of the similarity to the answers chosen so far.", least=0)] = 20.0
    form: Annotated[Literal["mean", "max"], Option("Mean or largest similarity.")] = "mean"
    starts: Annotated[Literal["one", "k", "n"], Option("How many first picks are tried.")] = "n"

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        by_group(pool.tie, k)
        return pool.keep(mmr(pool.quality, pool.similarity, pool.tie, k, self.alpha, self.form, self.starts))
