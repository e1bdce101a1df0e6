"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, computes quality and
similarity, chooses k parents, and makes their children, which form the next pool.

One call decodes P prompts whose windows have the same length. All random numbers are keyed (see `rng`), so the answers
do not depend on which prompts share the call. A prompt leaves the call when it is finished. Most callers use
`generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..methods import Scorer
from ..ops import kernels
from ..options import Settings
from ..result import Result
from ..types import Callback, Model, Snapshot
from .answers import LastLook, Ledger, add_answers, empty_result, prompts_to_drop
from .beams import ALONE, Beams
from .pool import Branching, Call, Pool
from .replay import ReplayedGrowth
from .rows import Rows
from .schedule import Policy, Step, in_window
from .texts import Prompts
from .tree import Growing, first_state, merge
from .view import Look


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
    scorer: Scorer | None = None,
    references: Sequence[Any] | None = None,
    callback: Callback | None = None,
    deliver: Callable[[Result, list[int]], None] | None = None,
    beams: Beams = ALONE,
) -> Result:
    """Return k answers for each of P prompts.

    seed, key: [P] int64. The two together select the random stream of each prompt.
    names: [P]. Callbacks and error messages call the prompts by these numbers. The default is 0 to P - 1.
    deliver: a function that is called when prompts are finished, with the result so far and their indices in the call.
    beams: how the rows of a pool are spread over ranks. All ranks make this call inside `beams.together()`, and all get
    the result.
    """
    spec, device, total, most = settings.spec, key.device, len(key), schedule.most
    select: Any = spec.build(settings)
    beams.check(settings.groups, settings.pool_size, callback=callback, scorer=scorer, history=settings.history)
    finish = spec.finish(select, scorer, references)
    head = replace(model.head, fixed=settings.deterministic)
    head = head.ban(model.eos_ids if settings.eos == "never" else ())
    _ = head.drawable  # counted now, because counting later would wait for the device
    call = Call(model, head, settings, beams, torch.tensor(model.eos_ids, dtype=torch.int64, device=device))
    watch, tree = call.watch, spec.tree
    branch = _branching(call, select, schedule)
    names = torch.arange(total, device=device) if names is None else names
    result = empty_result(prompts, settings, model)
    pool, rows = Pool.start(call, prompts, names, seed, key), Rows(call, prompts, schedule.adaptive)
    first = first_state(pool) if tree else pool
    batch = _Batch(first, rows, Ledger(result), [None] * total, [False] * total, [0] * total)

    for index in range(most + 1):
        # 1. Wait for the device: do all conditions hold, and which prompts are finished? Finished prompts leave.
        batch.rows.distinguish(batch.pool)  # first, so that the device does this while the host still waits
        facts = watch.check(batch.pool.facts(schedule.block) if schedule.adaptive else None)
        if tree and facts is not None:
            merged = merge(batch.pool, batch.rows.prompts, facts, batch.compared, index < most - schedule.length)
            if merged is not None:
                batch.pool = merged
                facts = watch.check(merged.facts(schedule.block))
        step = schedule.next(index, facts, device)
        if facts is not None and settings.adaptive:
            batch.shares = [1 - fact.left / (fact.rows * schedule.length) for fact in facts]
        ended = [step is None] * len(batch) if facts is None else [fact.first == schedule.length for fact in facts]
        if step is None or any(ended):
            gone = batch if step is None else batch.part(ended, True)
            end = Step(index - 1, 0, schedule.length, 0, 1.0, True, 0, exact=not schedule.adaptive)
            final = LastLook(gone.pool, gone.rows.final(gone.pool), gone.rows.prompts, end)
            add_answers(gone.ledger, final, finish, select, gone.selecting)
            watch.check()  # computing the scores of the result has added conditions to `watch`
            if deliver is not None:
                deliver(result, gone.ledger.alive.tolist())
            if step is None or all(ended):
                break
            batch = batch.part(ended, False)
        pool, shares = batch.pool, batch.shares
        known = {share: in_window(settings.guidance_window, index, most, share) for share in set(shares)}
        guided = [known[share] for share in shares]
        known = {share: in_window(settings.select_window, index, most, share) for share in set(shares)}
        selecting = [step.last or known[share] for share in shares]
        batch.selecting = selecting
        places = [_places(selecting, wanted, device) for wanted in (True, False)] if len(set(selecting)) > 1 else None

        # 2. Run the distinct rows through the body, and apply guidance to the states.
        hidden = batch.rows.run(pool, step, guided)

        # 3. Choose k parents by quality and similarity. Outside the selection window, a prompt keeps all its rows.
        view = Look(pool, hidden, step, batch.state, batch.rows)
        last, state = step.last and finish is None, dict(batch.state)
        choices = [view.choose(select, index, last)] if any(selecting) else []
        if places is not None:
            _restore(batch.state, state, places[1])
        choices += [] if all(selecting) else [view.stay()]

        # 4. Make the children of each parent, which form the next pool.
        following, choice = branch(pool, hidden, step, choices, places, view)

        # 5. Record which parents were chosen and how many rows ran, and call the callback.
        nominal = (~pool.complete).sum(-1) if schedule.adaptive else torch.full_like(hidden.fresh, pool.size)
        batch.ledger.record(choice, following.source, nominal, view)
        batch.pool = following
        if callback is not None:
            watch.check()
            steps = max(schedule.length, index + 1) if tree else most
            copies: Any = {name: value.clone() for name, value in following.tensors().items()}
            new = replace(following, **copies)
            after_step = new.tokens, new.logprob, list(shares), new.source, pool.awake, new.awake  # theirs to change
            shot = Snapshot(index, steps, pool.names, pool.tokens, view, choice, *after_step)
            dropped = prompts_to_drop(callback(shot))
            if dropped and not step.last:
                batch = batch.part([name in dropped for name in pool.names.tolist()], False)
        if not len(batch):
            break
    return result


@dataclass
class _Batch:
    """The prompts that are still decoded, and all that the loop keeps for them from step to step."""

    pool: Pool
    rows: Rows
    ledger: Ledger
    shares: list[float | None]  # how much of each prompt is revealed, under adaptive rules
    selecting: list[bool]  # whether each prompt selects parents at this step
    compared: list[int]  # how many complete rows of each prompt of a tree had their texts compared
    state: dict[str, Any] = field(default_factory=dict)  # the method's own values

    def __len__(self) -> int:
        return len(self.shares)

    def part(self, flags: Sequence[bool], wanted: bool) -> _Batch:
        """Return a batch of only those prompts whose flags have the wanted value."""
        at = _places(flags, wanted, self.pool.key.device)
        prompts = at.tolist()
        return _Batch(
            self.pool.keep(at),
            self.rows.part(at),
            self.ledger.part(at),
            [self.shares[i] for i in prompts],
            [self.selecting[i] for i in prompts],
            [self.compared[i] for i in prompts],
            {name: value[at] if isinstance(value, Tensor) else value for name, value in self.state.items()},
        )


def _branching(call: Call, select: Any, schedule: Policy) -> Any:
    """Return what makes the next pool of a step: for methods that bring their own, for trees, and for all others."""
    spec = call.settings.spec
    if hasattr(select, "branching"):
        return select.branching(call, schedule)
    if spec.tree:
        grow = Growing(call, getattr(schedule, "reveals", ()), select)
        return ReplayedGrowth(grow, schedule.block) if _replayable(call, select) else grow
    return Branching(call)


def _replayable(call: Call, select: Any) -> bool:
    """Return whether steps of a tree may be recorded. They may on one GPU with Triton, unless the method, the order or
    the rule is the user's own code, which a CUDA graph may not be able to record."""
    settings, own = call.settings, __name__.split(".")[0] + "."
    parts = type(select), settings.order_spec.worth, settings.reveal_spec.rule
    ours = all(part is None or part.__module__.startswith(own) for part in parts)
    plain = settings.savings and not settings.deterministic and settings.start != "entropy"
    return ours and plain and call.beams.size == 1 and kernels.usable(call.end_ids)


def _restore(state: dict[str, Any], before: dict[str, Any], prompts: Tensor) -> None:
    """Give prompts that do not select the values that the method had for them before the others selected. Otherwise,
    their answers would depend on the others. A value that did not exist becomes zero."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            old = before[name][prompts] if name in before else torch.zeros_like(value[prompts])
            state[name] = value.index_copy(0, prompts, old)


def _places(flags: Sequence[bool], wanted: bool, device: torch.device) -> Tensor:
    return torch.tensor([i for i, flag in enumerate(flags) if flag is wanted], dtype=torch.int64, device=device)
