"""The prompts that are decoded together, and all that is kept for them from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..result import Result
from ..types import Choice
from .answers import Final, Ledger, add_answers, empty_result
from .pool import Call, Pool
from .ranks import Ranks
from .rows import Rows
from .schedule import Facts, Policy, Step, Steps, sent
from .texts import Prompts
from .view import SPENT, ForwardView

if TYPE_CHECKING:
    from ..search import Search

Taken = Callable[[ForwardView, Steps], tuple[Pool, Choice]]
"""The `step` of a search, or a recorded one."""


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


@dataclass(frozen=True)
class Batch:
    """The prompts that are still decoded."""

    call: Call
    search: Search
    pool: Pool
    rows: Rows
    ledger: Ledger
    turns: list[Turn]

    @staticmethod
    def start(call: Call, search: Search, ranks: Ranks, new: Arrivals, kept: bool) -> Batch:
        """Return the batch of new prompts."""
        count = len(new.key)
        pool = search.start(call, new.schedules, Pool.start(call, new.rows, new.names, new.seed, new.key))
        places = range(count) if kept else [None] * count
        facts = new.schedules, new.names.tolist(), places, new.references or [None] * count
        turns = [Turn(*own) for own in zip(*facts, strict=True)]
        return Batch(call, search, pool, Rows(call, new.rows, ranks), Ledger(count, new.key.device), turns)

    def join(self, new: Batch) -> Batch:
        """Return a batch with more prompts, which have not taken a step. This method waits for the device."""
        model = self.call.model
        prompts = Prompts.join([self.rows.prompts, new.rows.prompts], model.pad_id)
        length, blank = prompts.window.shape[1], int(model.mask_id == 0)
        pool = Pool.join([self.pool.fit(length, blank), new.pool.fit(length, blank)])
        rows, ledger = self.rows.join(prompts), self.ledger.join(new.ledger)
        return replace(self, pool=pool, rows=rows, ledger=ledger, turns=[*self.turns, *new.turns])

    def part(self, places: list[int]) -> Batch:
        at, turns = sent(places, self.pool.key.device), [self.turns[place] for place in places]
        ledger = self.ledger.part(at, max(turn.age for turn in turns))
        return replace(self, pool=self.pool.keep(at), rows=self.rows.part(at), ledger=ledger, turns=turns)

    def facts(self, pool: Pool) -> Sequence[Facts]:
        """Wait for the device, and raise the error of a condition that does not hold. Return facts about a pool, or
        none if no row can be complete before the last step."""
        return self.call.checks.read(pool.facts(self.call) if self.call.early else None) or []

    def settle(self) -> Batch:
        """Wait for the device, let the search change the pool before it is run, and ask each policy for the next step
        of its prompt."""
        self.rows.distinguish(self.pool)  # first, so that the device does this while the host still waits
        pool, facts = self.pool, self.facts(self.pool)
        if facts:
            pool, facts = self.search.settle(self, facts)
        for place, turn in enumerate(self.turns):
            turn.facts = facts[place] if facts else None
            turn.next = turn.policy.next(turn.age, turn.facts)
        return replace(self, pool=pool)

    def run(self) -> ForwardView:
        """Run the distinct rows through the body, and apply guidance to the states."""
        now = self.steps([turn.next for turn in self.turns if turn.next is not None])
        return ForwardView(self.call, self.pool, self.rows.run(self.pool, now), now, self.rows.prompts)

    def follow(self, step: Taken, view: ForwardView) -> tuple[Batch, Choice]:
        """Let the search make the next pool: it selects rows and draws their children, or enumerates and prunes them.
        Record the parents and how many rows ran."""
        following, choice = self.rows.agree(self._following(step, view))
        self.ledger.record(view, following.source)
        for turn in self.turns:
            turn.age += 1
        opened = self.call.open(following.tokens, following)
        return replace(self, pool=replace(following, undecided=opened, step=self.pool.step + 1)), choice

    def _following(self, step: Taken, view: ForwardView) -> tuple[Pool, Choice]:
        """Let all prompts take their steps: together, or in parts of those that are in the same phase."""
        parts: dict[Any, list[int]] = {}
        for place, phase in enumerate(map(self.search.phase, view.now.by_prompt, view.now.names)):
            parts.setdefault(phase, []).append(place)
        if len(parts) == 1:
            return step(view, view.now)
        views = (view.part(places) for places in parts.values())
        pools = [step(part, part.now)[0] for part in views]
        order = [place for places in parts.values() for place in places]
        back = sent(sorted(range(len(order)), key=order.__getitem__), view.tie.device)
        following = Pool.join(pools).keep(back)
        return following, Choice(following.source, 1)

    def steps(self, steps: Sequence[Step]) -> Steps:
        """Return the steps that the prompts take together."""
        return Steps.of_prompts(steps, [turn.name for turn in self.turns], self.pool.key.device)

    def result(self, finished: bool) -> Result:
        """Return the result of prompts that leave. Dropped prompts, which are not finished, have no answers."""
        call, search, rows = self.call, self.search, self.rows
        costs = self.ledger.costs + self.pool.memory.get(SPENT, 0)
        result = empty_result(rows.prompts, call.settings, call.model, search.extras(call.settings), costs)
        if finished:
            length, references = self.pool.tokens.shape[2], [turn.reference for turn in self.turns]
            end = self.steps([Step(turn.age - 1, 0, length, 0, 1.0, True, 0) for turn in self.turns])
            final = Final(call, self.pool, rows, end, None if None in references else references)
            kept = rows.agree(search.finish(final, call.settings.groups))
            add_answers(result, self.ledger, final, kept, search.score_kind)
            call.checks.read()  # computing the scores of the result has added conditions to `checks`
        return result


def divided(whole: Any, flags: Sequence[bool]) -> tuple[Any, Any]:
    """Return the part of a batch or view with the prompts whose flag is True, and that with the others, or None."""
    if all(flags) or not any(flags):
        return (whole, None) if all(flags) else (None, whole)
    yes, no = (whole.part([place for place, flag in enumerate(flags) if flag == side]) for side in (True, False))
    return yes, no
