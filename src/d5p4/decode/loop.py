"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, and the search of the method
turns what the model says about them into the next pool.

One call decodes P prompts whose windows have the same length. All random numbers are keyed (see `rng`), so the answers
do not depend on which prompts share the call. A prompt leaves the call when it is finished. Most callers use
`generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import Settings
from ..result import Result
from ..types import Callback, Model
from .answers import Final, Ledger, add_answers, empty_result, prompts_to_drop, snapshot
from .pool import Call, Pool
from .ranks import ALONE, Ranks
from .replay import recorded
from .rows import Rows
from .schedule import Policy, Step
from .texts import Prompts
from .view import ForwardView


@torch.no_grad()  # not `inference_mode`, because its tensors cannot be used in training
def decode(
    model: Model,
    prompts: Prompts,
    schedule: Policy,
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

    seed, key: [P] int64. The two together select the random stream of each prompt.
    names: [P]. Callbacks and error messages call the prompts by these numbers. The default is 0 to P - 1.
    deliver: a function that is called when prompts are finished, with the result so far and their indices in the call.
    ranks: the processes that divide the forwards. All make this call inside `ranks.together()`, and all get the result.
    """
    call = Call.make(model, settings, key.device, scorer, references, prompts.extra)
    search, checks = settings.spec.search(settings), call.checks
    names = torch.arange(len(key), device=key.device) if names is None else names
    result = empty_result(prompts, settings, model, search.extras(settings))
    pool = search.start(call, schedule, Pool.start(call, prompts, names, seed, key))
    batch = Batch(pool, Rows(call, prompts, schedule.adaptive, ranks), Ledger(result))
    step = recorded(search, schedule.block, ranks.size)

    for index in range(schedule.most + 1):
        # 1. Wait for the device: do all conditions hold, and which prompts are finished? Finished prompts leave.
        batch.rows.distinguish(batch.pool)  # first, so that the device does this while the host still waits
        facts = checks.read(batch.pool.facts(schedule.block) if schedule.adaptive else None)
        if facts is not None:
            settled = search.settle(batch, facts, index)
            facts = facts if settled is batch.pool else checks.read(settled.facts(schedule.block))
            batch.pool, batch.facts = settled, facts or []
        now = schedule.next(index, facts, key.device)
        ended = [now is None or (fact is not None and not fact.left) for fact in batch.facts]
        if any(ended):
            gone = batch if all(ended) else batch.keep(ended)
            end = Step(index - 1, 0, schedule.length, 0, 1.0, True, 0, exact=not schedule.adaptive)
            final = Final(gone.pool, gone.rows, end, gone.ledger.alive)
            kept = gone.rows.agree(search.finish(final, settings.groups))
            add_answers(gone.ledger, final, kept, search.score_kind)
            checks.read()  # computing the scores of the result has added conditions to `checks`
            if deliver is not None:
                deliver(result, gone.ledger.alive.tolist())
            if all(ended):
                break
            batch = batch.keep([not end for end in ended])
        assert now is not None

        # 2. Run the distinct rows through the body, and apply guidance to the states.
        view = ForwardView(batch.pool, batch.rows.run(batch.pool, now), now, batch.rows)

        # 3. The search makes the next pool: it selects rows and draws their children, or enumerates and prunes them.
        following, choice = batch.rows.agree(step(view, now))

        # 4. Record which parents were chosen and how many rows ran, and call the callback.
        batch.ledger.record(view, choice, following.source, schedule.adaptive)
        before, batch.pool = batch.pool, following
        if callback is not None:
            checks.read()
            dropped = ranks.agree_on(prompts_to_drop(callback(snapshot(view, choice, following, now))))
            if dropped and not now.last:
                batch = batch.keep([name not in dropped for name in before.names.tolist()])
        if not batch.facts:
            break
    return result


class Batch:
    """The prompts that are still decoded, and all that the loop keeps for them from step to step. If the
    policy needs facts, `facts` has those that were last read from the device for each prompt."""

    def __init__(self, pool: Pool, rows: Rows, ledger: Ledger, facts: list[Any] | None = None) -> None:
        self.pool, self.rows, self.ledger = pool, rows, ledger
        self.facts: list[Any] = [None] * len(pool.key) if facts is None else facts

    def keep(self, flags: Sequence[bool]) -> Batch:
        """Return a batch of only those prompts whose flag is True."""
        places = [place for place, flag in enumerate(flags) if flag]
        at = torch.tensor(places, dtype=torch.int64, device=self.pool.key.device)
        return Batch(self.pool.keep(at), self.rows.part(at), self.ledger.part(at), [self.facts[i] for i in places])
