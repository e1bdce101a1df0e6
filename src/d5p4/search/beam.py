"""`Beam` selects rows, then draws their children. The selectors in this file ignore similarity.
They keep every row, or one child per parent: the best child, or a random one.

A group is the w = N / k adjacent children of one parent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from ..decode.pool import Pool
from ..decode.schedule import Step, Steps
from ..decode.view import PoolView
from ..errors import D5P4Error
from ..ops.ties import argbest
from ..options import Checked, Option
from ..rng import gumbel, mix, uniform
from ..types import Choice, Kept, Selector
from .base import Search

if TYPE_CHECKING:
    from ..decode.answers import Final
    from ..decode.view import ForwardView

SELECTED = "selected"  # the name in `Pool.memory` of whether a prompt's rows are children of selected parents


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


class Beam(Search):
    """At every step, selects rows and draws their children. Outside of the selection window, a prompt keeps all its
    rows. `Beam(select)` calls a selector; a subclass is itself the selector, which may also choose the answers."""

    select: ClassVar[Any] = None
    constrains = True
    score_kind: ClassVar[str | None] = "the method's own number"

    def __init__(self, select: Selector) -> None:
        vars(self).update(select=select, timeless=getattr(select, "timeless", False))

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.stay() if self.select is None else self.select(pool, k, key)

    def __init_subclass__(cls) -> None:
        cls.finishes = cls.finish is not Beam.finish

    def selecting(self, step: Step, name: int) -> bool:
        """Return whether the prompt with this name selects parents at this step."""
        return step.last or step.within(self.call.settings.select_window)

    def phase(self, step: Step, name: int) -> Any:
        return self.selecting(step, name), *super().phase(step, name)

    def step(self, view: ForwardView, now: Steps) -> tuple[Pool, Choice]:
        selecting = self.selecting(now.by_prompt[0], now.names[0])
        choice = view.choose(self, now.last and not self.finishes) if selecting else view.stay()
        selected = torch.full_like(view.pool.key, selecting, dtype=torch.bool)
        following = self.offspring(view, now, choice)
        return replace(following, memory=view.state | {SELECTED: selected}), choice

    def offspring(self, view: ForwardView, now: Steps, choice: Choice) -> Pool:
        """Return the pool of the children of the chosen parents."""
        return self.children(view.pool, view.hidden, now, choice)

    def finish(self, final: Final, k: int) -> Kept:
        """Return one row of every group. If the rows are not children of selected parents, parents are selected now."""
        rows = torch.arange(k, device=final.tie.device).expand(len(final.tie), k) * (final.size // k)
        selected = final.pool.memory.get(SELECTED, torch.zeros_like(final.tie[:, 0], dtype=torch.bool))
        if final.size > k and not bool(selected.all()):
            rows = torch.where(selected[:, None], rows, final.choose(self, last=True).parents)
        return Kept(rows)


@dataclass(frozen=True)
class Identity(Beam):
    """Selects nothing: all rows 0 .. N-1 become parents, and each row has one child."""

    timeless = True


@dataclass(frozen=True)
class GreedyBeam:
    """Picks the item with the largest quality Q in each group. The time is O(N)."""

    timeless = True

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return keep_best(pool, by_group(pool.quality, k), by_group(pool.tie, k))


@dataclass(frozen=True)
class Random:
    """Picks the item with the largest random number in each group, in O(N). Key and tie hash give the random number."""

    timeless = True

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        tie = by_group(pool.tie, k)
        return keep_best(pool, uniform(mix(key.view(-1, 1, 1), tie), 0), tie)


@dataclass(frozen=True)
class Categorical(Checked):
    """Draws one item of each group from softmax(Q / tau), as the argmax of Q / tau + Gumbel noise, in O(N).

    tau is `score_temperature`; tau = 0 is greedy beam search. The noise of an item is keyed by the item's tie hash.
    """

    timeless: ClassVar[bool] = True
    score_temperature: Annotated[float, Option("Temperature of the draw; 0 takes the best candidate.", least=0)] = 1.0

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        if self.score_temperature == 0:
            return GreedyBeam()(pool, k, key)
        quality, tie = by_group(pool.quality, k).nan_to_num(nan=-math.inf), by_group(pool.tie, k)
        best = quality.amax(-1, keepdim=True)  # subtracted before the division, which could overflow otherwise
        noise = gumbel(uniform(mix(key.view(-1, 1, 1), tie), 0))
        return keep_best(pool, (quality - best) / self.score_temperature + noise, tie)
