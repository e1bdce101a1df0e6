"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, and the search of the method
turns what the model says about them into the next pool.

One call decodes P prompts whose windows have the same length. All random numbers are keyed (see `rng`), so the answers
do not depend on which prompts share the call. A prompt leaves the call when it is finished. Most callers use
`generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..options import Settings
from ..result import Result
from ..types import Callback, Choice, Model
from .answers import Final, Ledger, add_answers, empty_result, prompts_to_drop, snapshot
from .pool import Call, Pool
from .ranks import ALONE, Ranks
from .replay import recorded
from .rows import Rows
from .schedule import Facts, Policy, Step, Steps, sent
from .texts import Prompts
from .view import ForwardView

if TYPE_CHECKING:
    from ..methods.search import Search


@torch.no_grad()  # not `inference_mode`, because its tensors cannot be used in training
def decode(
    model: Model,
    prompts: Prompts,
    schedule: Policy | Sequence[Policy],
    settings: Settings,
    *,
    seed: Tensor,
    key: Tensor,
    names: Tensor | None = None,
    scorer: Callable[..., Any] | None = None,
    references: Sequence[Any] | None = None,
    callback: Callback | None = None,
    deliver: Callable[[Result, list[int]], None] | None = None,
    ranks: Ranks = ALONE,
) -> Result:
    """Return k answers for each of P prompts.

    schedule: the policy of all prompts, or one per prompt.
    seed, key: [P] int64. The two together select the random stream of each prompt.
    names: [P]. Callbacks and error messages call the prompts by these numbers. The default is 0 to P - 1.
    deliver: a function that is called when prompts are finished, with the result so far and their indices in the call.
    ranks: the processes that divide the forwards. All make this call inside `ranks.together()`, and all get the result.
    """
    call = Call.make(model, settings, key.device, scorer, references, prompts.extra)
    search, checks = settings.spec.search(settings), call.checks
    names = torch.arange(len(key), device=key.device) if names is None else names
    policies = [schedule] * len(key) if isinstance(schedule, Policy) else list(schedule)
    result = empty_result(prompts, settings, model, search.extras(settings))
    pool = search.start(call, policies, Pool.start(call, prompts, names, seed, key))
    turns = [Turn(policy, name) for policy, name in zip(policies, names.tolist(), strict=True)]
    batch, step = Batch(pool, Rows(call, prompts, ranks), Ledger(result), turns), recorded(search, ranks.size)

    while True:
        # 1. Wait for the device: do all conditions hold, and which prompts are finished? Finished prompts leave.
        batch.rows.distinguish(batch.pool)  # first, so that the device does this while the host still waits
        facts = checks.read(batch.pool.facts() if settings.early else None)
        if facts is not None:
            settled = search.settle(batch, facts)
            facts = facts if settled is batch.pool else checks.read(settled.facts())
            batch.know(settled, facts)
        steps = [turn.policy.next(turn.age, turn.facts) for turn in batch.turns]
        if None in steps:
            gone = batch.keep([one is None for one in steps])
            final = gone.final()
            kept = gone.rows.agree(search.finish(final, settings.groups))
            add_answers(gone.ledger, final, kept, search.score_kind)
            checks.read()  # computing the scores of the result has added conditions to `checks`
            if deliver is not None:
                deliver(result, gone.ledger.alive.tolist())
            if not any(steps):
                break
            batch = batch.keep([one is not None for one in steps])

        # 2. Run the distinct rows through the body, and apply guidance to the states.
        now = batch.steps([one for one in steps if one is not None])
        view = ForwardView(batch.pool, batch.rows.run(batch.pool, now), now, batch.rows.prompts)

        # 3. The search makes the next pool: it selects rows and draws their children, or enumerates and prunes them.
        following, choice = batch.rows.agree(together(search, step, view))

        # 4. Record which parents were chosen and how many rows ran, and call the callback.
        batch.ledger.record(view, choice, following.source)
        batch.advance(following)
        if callback is not None:
            checks.read()
            dropped = ranks.agree_on(prompts_to_drop(callback(snapshot(view, choice, following))))
            if dropped and not now.last:
                stay = [turn.name not in dropped for turn in batch.turns]
                if not any(stay):
                    break
                batch = batch.keep(stay)
    return result


@dataclass
class Turn:
    """What the host knows of a prompt that is decoded."""

    policy: Policy
    name: int
    age: int = 0  # the number of steps that it has taken
    facts: Facts | None = None  # about its pool, as last read from the device


class Batch:
    """The prompts that are still decoded, and all that the loop keeps for them from step to step."""

    def __init__(self, pool: Pool, rows: Rows, ledger: Ledger, turns: list[Turn]) -> None:
        self.pool, self.rows, self.ledger, self.turns = pool, rows, ledger, turns

    def keep(self, flags: Sequence[bool]) -> Batch:
        """Return a batch of only those prompts whose flag is True."""
        if all(flags):
            return self
        places = [place for place, flag in enumerate(flags) if flag]
        at = torch.tensor(places, dtype=torch.int64, device=self.pool.key.device)
        return Batch(self.pool.keep(at), self.rows.part(at), self.ledger.part(at), [self.turns[i] for i in places])

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

    def final(self) -> Final:
        """Return the view of the last pools of prompts that are finished."""
        length = self.pool.tokens.shape[2]
        end = self.steps([Step(turn.age - 1, 0, length, 0, 1.0, True, 0) for turn in self.turns])
        return Final(self.pool, self.rows, end, self.ledger.alive)


Taken = Callable[[ForwardView, Steps], tuple[Pool, Choice]]
"""The step of a search, maybe recorded."""


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
