"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, and the search of the method
turns what the model says about them into the next pool.

A call (`Loop`) decodes P prompts, and others may join it before any step. All random numbers are keyed (see `rng`), so
the answers do not depend on which prompts share the call. A prompt leaves the call when it is finished. Most callers
use `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..options import Settings
from ..result import Result
from ..types import Callback, Choice, Model
from .answers import merged, prompts_to_drop, snapshot
from .batch import Arrivals, Batch, divided
from .pool import Call
from .ranks import ALONE, Ranks
from .replay import recorded
from .view import ForwardView


def decode(model: Model, prompts: Arrivals, settings: Settings, **options: Any) -> Result:
    """Return k answers for each of P prompts. `options` are those of a `Loop`."""
    loop = Loop(model, settings, **options)
    loop.join(prompts, kept=True)
    while loop.batch is not None:
        loop.step()
    return merged(loop.results, model.pad_id)


class Loop:
    """A decode call, which prompts may join before any step. Each prompt leaves when it is finished."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        *,
        scorer: Callable[..., Any] | None = None,
        callback: Callback | None = None,
        deliver: Callable[[Result, list[int]], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """deliver: a function that is called when prompts are finished, with their result and their names.
        ranks: the processes that divide the forwards. All make the same calls, and all get the results.
        """
        self.call, self.search = Call.make(model, settings, scorer), settings.spec.search(settings)
        self.callback, self.deliver, self.ranks = callback, deliver, ranks
        self.take = recorded(self.search, self.call, ranks.size)
        self.batch: Batch | None = None  # the prompts that are still decoded
        self.results: list[tuple[list[int | None], Result]] = []  # of the prompts whose results are kept

    @torch.no_grad()  # not `inference_mode`, because its tensors cannot be used in training
    def join(self, new: Arrivals, kept: bool = False) -> None:
        """Let prompts join, with other names than those that are decoded. This method waits for the device.

        kept: whether `results` gets their results. Only the first prompts can have this.
        """
        batch = self._unfinished(Batch.start(self.call, self.search, self.ranks, new, kept))
        if batch is not None:
            self.batch = batch if self.batch is None else self.batch.join(batch)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step of all prompts, and let those leave that are finished."""
        batch = None if self.batch is None else self._after_step(self.batch)
        self.batch = None if batch is None else self._unfinished(batch)

    @torch.no_grad()
    def drop(self, names: Collection[int]) -> None:
        """Let prompts leave that are not finished. They get no answers, and are not delivered."""
        self.batch = None if self.batch is None else self._without(self.batch, names)

    def _after_step(self, batch: Batch) -> Batch | None:
        """Take a step. Prompts at their last step take it apart from the others, and leave."""
        view, going = batch.run(), None
        last = [one.last for one in view.now.by_prompt]
        for part, seen in zip(divided(batch, last), divided(view, last), strict=True):
            if part is not None and seen is not None:
                part, choice = part.follow(self.take, seen)
                dropped = self._tell(seen, choice, part)
                going = self._unfinished(part) if seen.last else self._without(part, dropped)
        return going

    def _tell(self, view: ForwardView, choice: Choice, batch: Batch) -> list[int]:
        """Call the callback, and return the names of the prompts to drop."""
        if self.callback is None:
            return []
        self.call.checks.read()
        dropped: list[int] = self.ranks.agree_on(prompts_to_drop(self.callback(snapshot(view, choice, batch.pool))))
        return dropped

    def _unfinished(self, batch: Batch) -> Batch | None:
        """Wait for the device. Finished prompts leave. The others are returned, and have their next step."""
        batch = batch.settle()
        return self._leave(batch, [turn.next is None for turn in batch.turns], finished=True)

    def _without(self, batch: Batch, names: Collection[int]) -> Batch | None:
        return self._leave(batch, [turn.name in names for turn in batch.turns], finished=False)

    def _leave(self, batch: Batch, flags: Sequence[bool], finished: bool) -> Batch | None:
        """Keep and deliver the result of prompts that leave, and return the others. Dropped prompts, which are not
        finished, have no answers."""
        gone, others = divided(batch, flags)
        if gone is not None:
            result, places = gone.result(finished), [turn.place for turn in gone.turns]
            if finished and self.deliver is not None:
                whole = merged([(range(len(places)), result)], self.call.model.pad_id)
                self.deliver(whole, [turn.name for turn in gone.turns])
            if any(place is not None for place in places):
                self.results.append((places, result))
        return others
