"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, and the search of the method
turns what the model says about them into the next pool.

A call (`Loop`) decodes P prompts, and others may join it before any step. All random numbers are keyed (see `rng`), so
the answers do not depend on which prompts share the call. A prompt leaves the call when it is finished. Most callers
use `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..options import Settings
from ..result import Result
from ..types import Callback, Choice, Model
from .answers import Final, Ledger, add_answers, empty_result, merged, prompts_to_drop, snapshot
from .constrained import settle
from .pool import Call, Pool
from .ranks import ALONE, Ranks
from .replay import recorded
from .rows import Rows
from .schedule import Facts, Policy, Step, Steps, sent
from .texts import Prompts
from .view import SPENT, ForwardView

if TYPE_CHECKING:
    from ..search.base import Search


Taken = Callable[[ForwardView, Steps], tuple[Pool, Choice]]


@dataclass(frozen=True)
class Arrivals:
    """P prompts that begin together.

    rows: their tokens and windows.
    schedules: one policy per prompt.
    seed, key: [P] int64. The two together select the random stream of each prompt.
    names: [P]. Callbacks and error messages call the prompts by these numbers.
    references: one per prompt, for the scorer of best-of-n.
    """

    rows: Prompts
    schedules: Sequence[Policy]
    seed: Tensor
    key: Tensor
    names: Tensor
    references: Sequence[Any] | None = None


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
        self.call = Call.make(model, settings, scorer)
        self.callback, self.deliver, self.ranks = callback, deliver, ranks
        self.search = settings.spec.search(settings)
        self.taken: Taken | None = None  # the step of the search, maybe recorded
        self.batch: Batch | None = None  # the prompts that are still decoded
        self.results: list[tuple[list[int | None], Result]] = []  # of the prompts whose results are kept

    @torch.no_grad()  # not `inference_mode`, because its tensors cannot be used in training
    def join(self, new: Arrivals, kept: bool = False) -> None:
        """Let prompts join, with other names than those that are decoded. This method waits for the device.

        kept: whether `results` gets their results. Only the first prompts can have this.
        """
        call, names, count = self.call, new.names.tolist(), len(new.key)
        references = [None] * count if new.references is None else new.references
        pool = self.search.start(call, new.schedules, Pool.start(call, new.rows, new.names, new.seed, new.key))
        self.taken = self.taken or recorded(self.search, self.ranks.size)
        turns = [
            Turn(policy, name, place if kept else None, reference)
            for place, (policy, name, reference) in enumerate(zip(new.schedules, names, references, strict=True))
        ]
        batch = Batch(pool, Rows(call, new.rows, self.ranks), Ledger(count, new.key.device), turns)
        self.batch = batch if self.batch is None else self.batch.join(batch, call)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step of all prompts that are not finished."""
        batch = None if self.batch is None else self.leave(self.batch)
        self.batch = None if batch is None else self.go_on(batch)

    @torch.no_grad()
    def drop(self, names: Collection[int]) -> None:
        """Let prompts leave that are not finished. They get no answers, and are not delivered."""
        if self.batch is not None and names:
            self.batch = self.without(self.batch, names)

    def leave(self, batch: Batch) -> Batch | None:
        """Wait for the device: do all conditions hold, and which prompts are finished? Finished prompts leave."""
        checks, early = self.call.checks, self.call.early
        batch.rows.distinguish(batch.pool)  # first, so that the device does this while the host still waits
        facts = checks.read(batch.pool.facts(self.call) if early else None)
        if self.call.matchers is not None:
            batch.pool, changed = settle(batch.pool, self.search)
            facts = checks.read(batch.pool.facts(self.call)) if changed else facts
        if facts is not None:
            settled = self.search.settle(batch, facts)
            facts = facts if settled is batch.pool else checks.read(settled.facts(self.call))
            batch.know(settled, facts)
        for turn in batch.turns:
            turn.next = turn.policy.next(turn.age, turn.facts)
        ended = [turn.next is None for turn in batch.turns]
        if any(ended):
            self.close(batch.keep(ended), finished=True)
        return None if all(ended) else batch.keep([not end for end in ended])

    def go_on(self, batch: Batch) -> Batch | None:
        """Take a step of every prompt. Prompts at their last step take it apart from others, and leave."""
        now = batch.steps([turn.next for turn in batch.turns if turn.next is not None])
        # Run the distinct rows through the body, and apply guidance to the states.
        view = ForwardView(self.call, batch.pool, batch.rows.run(batch.pool, now), now, batch.rows.prompts)
        last = [one.last for one in now.by_prompt]
        if all(last) or not any(last):
            return self.search_on(batch, view)
        stay, gone = ([place for place, end in enumerate(last) if end == flag] for flag in (False, True))
        self.search_on(batch.keep(last), view.part(gone))
        return self.search_on(batch.keep([not end for end in last]), view.part(stay))

    def search_on(self, batch: Batch, view: ForwardView) -> Batch | None:
        """Let the search make the next pool: it selects rows and draws their children, or enumerates and prunes them.
        Record the parents and how many rows ran, and call the callback."""
        following, choice = batch.rows.agree(together(self.search, self.taken or self.search.step, view))
        batch.ledger.record(view, choice, following.source)
        batch.advance(replace(following, undecided=self.call.open(following.tokens, following)))
        dropped: list[int] = []
        if self.callback is not None:
            self.call.checks.read()
            dropped = self.ranks.agree_on(prompts_to_drop(self.callback(snapshot(view, choice, following))))
        return self.leave(batch) if view.last else self.without(batch, dropped)

    def without(self, batch: Batch, names: Collection[int]) -> Batch | None:
        """Let prompts leave that are not finished."""
        drop = [turn.name in names for turn in batch.turns]
        if any(drop):
            self.close(batch.keep(drop), finished=False)
        return None if all(drop) else batch.keep([not flag for flag in drop])

    def close(self, batch: Batch, finished: bool) -> None:
        """Keep and deliver the result of prompts that leave. Dropped prompts, which are not finished, have no
        answers."""
        call, search, rows = self.call, self.search, batch.rows
        costs = batch.ledger.costs + batch.pool.memory.get(SPENT, 0)
        result = empty_result(rows.prompts, call.settings, call.model, search.extras(call.settings), costs)
        if finished:
            final = batch.final(call)
            kept = rows.agree(search.finish(final, call.settings.groups))
            add_answers(result, batch.ledger, final, kept, search.score_kind)
            call.checks.read()  # computing the scores of the result has added conditions to `checks`
        if finished and self.deliver is not None:
            everyone = range(len(batch.turns))
            self.deliver(merged([(everyone, result)], call.model.pad_id), [turn.name for turn in batch.turns])
        places = [turn.place for turn in batch.turns]
        if any(place is not None for place in places):
            self.results.append((places, result))


@dataclass
class Turn:
    """What the host knows of a prompt that is decoded."""

    policy: Policy
    name: int
    place: int | None  # of its result in `Loop.results`; None: its result is not kept
    reference: Any = None
    age: int = 0  # the number of steps that it has taken
    facts: Facts | None = None  # about its pool, as last read from the device
    next: Step | None = None  # its next step, or None if it is finished


class Batch:
    """The prompts that are still decoded, and all that the loop keeps for them from step to step."""

    def __init__(self, pool: Pool, rows: Rows, ledger: Ledger, turns: list[Turn]) -> None:
        self.pool, self.rows, self.ledger, self.turns = pool, rows, ledger, turns

    def keep(self, flags: Sequence[bool]) -> Batch:
        """Return a batch of only those prompts whose flag is True."""
        if all(flags):
            return self
        places = [place for place, flag in enumerate(flags) if flag]
        at, turns = sent(places, self.pool.key.device), [self.turns[place] for place in places]
        ledger = self.ledger.part(at, max(turn.age for turn in turns))
        return Batch(self.pool.keep(at), self.rows.part(at), ledger, turns)

    def join(self, new: Batch, call: Call) -> Batch:
        """Return a batch with more prompts, which have not taken a step. This method waits for the device."""
        prompts = Prompts.join([self.rows.prompts, new.rows.prompts], call.model.pad_id)
        length, blank = prompts.window.shape[1], int(call.model.mask_id == 0)
        pool = Pool.join([self.pool.fit(length, blank), new.pool.fit(length, blank)])
        return Batch(pool, self.rows.join(prompts), self.ledger.join(new.ledger), [*self.turns, *new.turns])

    def know(self, pool: Pool, facts: Sequence[Facts] | None) -> None:
        """Go on with this pool, given facts about each of its prompts."""
        self.pool = pool
        for turn, fact in zip(self.turns, facts or (), strict=True):
            turn.facts = fact

    def advance(self, following: Pool) -> None:
        """Go on with the next pool, after a step of all prompts."""
        self.pool = replace(following, step=self.pool.step + 1)
        for turn in self.turns:
            turn.age += 1

    def steps(self, steps: Sequence[Step]) -> Steps:
        """Return the steps that the prompts take together."""
        return Steps.of_prompts(steps, [turn.name for turn in self.turns], self.pool.key.device)

    def final(self, call: Call) -> Final:
        """Return the view of the last pools of prompts that are finished."""
        length, references = self.pool.tokens.shape[2], [turn.reference for turn in self.turns]
        end = self.steps([Step(turn.age - 1, 0, length, 0, 1.0, True, 0) for turn in self.turns])
        return Final(call, self.pool, self.rows, end, None if None in references else references)


def together(search: Search, step: Taken, view: ForwardView) -> tuple[Pool, Choice]:
    """Let all prompts take their steps: together, or in parts of those that are in the same phase."""
    parts: dict[Any, list[int]] = {}
    for place, phase in enumerate(map(search.phase, view.now.by_prompt, view.now.names)):
        parts.setdefault(phase, []).append(place)
    if len(parts) == 1:
        return step(view, view.now)
    views = (view.part(places) for places in parts.values())
    pools = [step(part, part.now)[0] for part in views]
    order = [place for places in parts.values() for place in places]
    back = sent(sorted(range(len(order)), key=order.__getitem__), view.tie.device)
    following = Pool.join(pools).keep(back)
    return following, Choice(following.source, 1)
