"""Diverse beam search by maximal marginal relevance (MMR), with one item per group.

Items are picked one after another. The next pick is the item i with the largest Q_i - alpha * (similarity of i to the
earlier picks Y), from a group without a pick. The similarity of i to Y is the mean of S_ji over j in Y, or the largest
S_ji. The search starts from every item and returns the set whose values have the largest sum. The time is O(k N) per
start, because S is given.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from ..decode.view import PoolView
from ..ops.ties import argbest
from ..options import Checked, Option
from ..types import Choice
from .beam import by_group

_WORST = -1e30  # the least quality; it is finite, so that items of taken groups (minus infinity) are worse


@dataclass(frozen=True)
class MMR(Checked):
    """Picks one item per group. Every item is tried as the first pick."""

    timeless: ClassVar[bool] = True
    alpha: Annotated[float, Option("Weight of the similarity to the answers chosen so far.", least=0)] = 20.0
    form: Annotated[Literal["mean", "max"], Option("Mean or largest similarity.")] = "mean"

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        by_group(pool.tie, k)
        return pool.keep(mmr(pool.quality, pool.similarity, pool.tie, k, self.alpha, self.form))


def mmr(quality: Tensor, similarity: Tensor, tie: Tensor, k: int, alpha: float, form: str = "mean") -> Tensor:
    """Return the chosen items [P, k], ascending, for quality and tie [P, N] and similarity [P, N, N].

    NaN is the worst quality. If any similarity of a pool is not finite, quality alone decides in this pool.
    """
    quality = quality.nan_to_num(nan=_WORST).clamp(_WORST, -_WORST)
    similarity = similarity.to(quality.dtype)
    sound = similarity.isfinite().all(-1).all(-1)
    similarity = torch.where(sound.view(-1, 1, 1), similarity, 0.0)
    item = torch.arange(quality.shape[1], device=quality.device)
    group, prompt = item // (len(item) // k), torch.arange(len(quality), device=quality.device).unsqueeze(-1)
    free, near, total = group != group.unsqueeze(-1), similarity, quality  # [P, N starts, N] and [P, N starts]
    picks = [item.expand_as(quality)]
    for taken in range(1, k):
        penalty = near / taken if form == "mean" else near
        value = torch.where(free, quality.unsqueeze(1) - alpha * penalty, -torch.inf)
        pick = argbest(value, tie.unsqueeze(1))
        total = total + value.gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        free = free & (group != group[pick].unsqueeze(-1))
        row = similarity[prompt, pick]
        near = near + row if form == "mean" else torch.maximum(near, row)
        picks.append(pick)
    winner = argbest(total, tie.gather(-1, picks[0]))
    return torch.stack(picks, -1)[prompt.squeeze(-1), winner].sort(-1).values
