"""Methods that ignore similarity. They keep every row, or one child per parent: the best child, or a random one.

A group is the w = N / k adjacent children of one parent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.ties import argbest
from ..options import Checked, Option
from ..rng import gumbel, mix, uniform
from ..types import Choice

if TYPE_CHECKING:
    from ..decode.view import PoolView


def by_group(values: Tensor, k: int) -> Tensor:
    """Reshape values [P, N] to [P, k, w]."""
    prompts, size = values.shape
    if k < 1 or size % k:
        raise D5P4Error(f"a pool of {size} rows does not split into k = {k} groups of equal size; k must divide {size}")
    return values.reshape(prompts, k, size // k)


def keep_best(pool: PoolView, values: Tensor, tie: Tensor) -> Choice:
    """Choose the item with the largest value in each group, given values and ties [P, k, w]."""
    groups = torch.arange(tie.shape[1], device=tie.device)
    return pool.keep(argbest(values, tie) + groups * tie.shape[2])


@dataclass(frozen=True)
class Identity:
    """Selects nothing: all rows 0 .. N-1 become parents, and each row has one child."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.stay()


@dataclass(frozen=True)
class GreedyBeam:
    """Picks the item with the largest quality Q in each group. The time is O(N)."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return keep_best(pool, by_group(pool.quality, k), by_group(pool.tie, k))


@dataclass(frozen=True)
class Random:
    """Picks the item with the largest random number in each group, in O(N). Key and tie hash give the random number."""

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        tie = by_group(pool.tie, k)
        return keep_best(pool, uniform(mix(key.view(-1, 1, 1), tie), 0), tie)


@dataclass(frozen=True)
class Categorical(Checked):
    """Draws one item of each group from softmax(Q / tau), as the argmax of Q / tau + Gumbel noise, in O(N).

    tau is `score_temperature`; tau = 0 is greedy beam search. The noise of an item is keyed by the item's tie hash.
    """

    score_temperature: Annotated[float, Option("Temperature of the draw; 0 takes the best candidate.", least=0)] = 1.0

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        if self.score_temperature == 0:
            return GreedyBeam()(pool, k, key)
        quality, tie = by_group(pool.quality, k).nan_to_num(nan=-math.inf), by_group(pool.tie, k)
        best = quality.amax(-1, keepdim=True)  # subtracted before the division, which could overflow otherwise
        noise = gumbel(uniform(mix(key.view(-1, 1, 1), tie), 0))
        return keep_best(pool, (quality - best) / self.score_temperature + noise, tie)
