"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, computes quality and
similarity, chooses k parents, and makes their children, which form the next pool.

One call decodes P prompts whose windows have the same length. All random numbers are keyed (see `rng`), so the answers
do not depend on which prompts share the call. A prompt leaves the call when it is finished. Most callers use
`generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..methods import Scorer
from ..options import Settings
from ..project import Draw, Parents, Projection, projection
from ..result import Result
from ..rng import SELECT, mix
from ..types import Callback, Choice, Head, Model, Snapshot
from .answers import Ledger, add_answers, empty_result, prompts_to_drop
from .beams import ALONE, Beams
from .pool import Ends, Pool
from .rows import Prompts, Rows, WindowHidden
from .schedule import Policy, Step, Watch, in_window
from .view import Look, not_finite


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
    beams.check(settings.groups, settings.pool_size, callback=callback, scorer=scorer, history=settings.history)
    spec, device, total = settings.spec, key.device, len(key)
    select: Any = spec.build(settings)
    finish = spec.finish(select, scorer, references)
    head = replace(model.head, fixed=settings.deterministic)
    head = head.ban(model.eos_ids if settings.eos == "never" else ()).counted()
    end_ids = torch.tensor(model.eos_ids, device=device) if model.eos_ids else None
    ends = Ends(model.mask_id, end_ids, bool(settings.stop))
    draw = _draw(settings, head, ends)
    project = projection(settings.order, spec.children)
    guided: Any = settings.guidance_window
    if guided is None and spec.half_guided:
        guided = (0, 0.5) if settings.adaptive else (0, (schedule.most + 1) // 2)

    # Only an ancestral child can equal its parent and, under adaptive rules, a row that waits at the end of a block.
    reuse = schedule.adaptive or settings.order == "ancestral"
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    batch = _Batch(
        Pool.start(prompts.positions, prompts.appended, settings.pool_size, settings.groups, wide, ends, beams),
        Rows(model, prompts, settings.max_tokens_per_forward, settings.savings, reuse),
        Ledger(torch.arange(total, device=device) if names is None else names, settings.history),
        seed,
        key,
        [False] * total,
    )
    result = empty_result(prompts, batch.ledger, settings, model)
    watch = Watch()
    look = partial(Look, settings=settings, model=model, head=head, watch=watch)

    for index in range(schedule.most + 1):
        # 1. Wait for the device: do all conditions hold, and which prompts are finished? Finished prompts leave.
        numbers = batch.pool.facts(schedule.block) if schedule.adaptive else None
        facts = watch.check(numbers)
        step = schedule.next(index, facts, device)
        if step is None or any(fact.first == schedule.length for fact in facts or ()):
            ended = [step is None or facts is not None and facts[i].first == schedule.length for i in range(len(batch))]
            gone = batch.part([i for i, end in enumerate(ended) if end])
            last_forward = gone.pool.last_masked(None if schedule.adaptive else index - 1)
            hidden, last = gone.rows.final(gone.pool), Step(index - 1, 0, schedule.length, 0, 1.0, True, 0)
            view = look(gone.pool, hidden, last, prompts=gone.ledger.names, state={}, last_forward=last_forward)
            add_answers(result, prompts, view, gone.ledger, finish, select, gone.keys(index), gone.selected)
            watch.check()  # computing the scores of the result has added conditions to `watch`
            if deliver is not None:
                deliver(result, gone.ledger.alive.tolist())
            if all(ended):
                break
            left = [i for i, end in enumerate(ended) if not end]
            batch, facts = batch.part(left), None if facts is None else [facts[i] for i in left]
            numbers = None if numbers is None else numbers[torch.tensor(left, device=device)]
            step = schedule.next(index, facts, device)
        assert step is not None
        pool = batch.pool
        shares: list[float | None] = [None] * len(batch)  # how much of each prompt is revealed, under adaptive rules
        progress = None
        if settings.adaptive and facts is not None and numbers is not None:
            shares = [fact.share(pool.size, schedule.length) for fact in facts]
            progress = 1 - numbers[:, 2] / (pool.size * schedule.length)
        known = {share: in_window(guided, index, share) for share in set(shares)}
        scales = [settings.guidance if known[share] else 1.0 for share in shares]
        known = {share: step.last or in_window(settings.select_window, index, share) for share in set(shares)}
        selecting = [known[share] for share in shares]
        split = [_places(selecting, wanted, device) for wanted in (True, False)] if len(set(selecting)) > 1 else None

        # 2. Run the distinct rows through the body, and apply guidance to the states.
        hidden = batch.rows.run(pool, scales, pool.complete if schedule.adaptive else None)

        # 3. Choose k parents by quality and similarity. Outside the selection window, a prompt keeps all its rows.
        view = look(pool, hidden, step, prompts=batch.ledger.names, state=batch.state, progress=progress)
        choices = []
        if any(selecting):
            try:
                chosen = select(view, settings.groups, batch.keys(index))
            except Exception:
                watch.check()  # if the cause is that logits are not finite, this raises an error that says so
                raise
            after = settings.groups if step.last and not finish and not hasattr(select, "prune") else None
            choices.append(beams.agree(view.check(chosen, after, watch)))
        if not all(selecting):
            choices.append(view.stay())

        # 4. Make the children of each parent, which form the next pool.
        advance = partial(_advance, settings=settings, project=project, draw=draw, select=select, watch=watch)
        if split is None:
            choice = choices[0]
            following = advance(pool, batch.seed, batch.key, batch.ledger.names, hidden, choice, step)
        else:  # some prompts select parents, and the others keep all their rows
            pools = []
            for at, part in zip(split, choices, strict=True):
                own = replace(step, starts=None if step.starts is None else step.starts[at])
                slots, part = replace(hidden, slot=hidden.slot[at]), part._replace(parents=part.parents[at])
                seeds, keys, names = batch.seed[at], batch.key[at], batch.ledger.names[at]
                pools.append(advance(pool.keep(at), seeds, keys, names, slots, part, own))
            following = Pool.join(pools, split)
            choice = Choice(following.source, 1)

        # 5. Record which parents were chosen and how many rows ran, and call the callback.
        nominal = (~pool.complete).sum(-1) if schedule.adaptive else torch.full_like(hidden.fresh, pool.size)
        batch.ledger.record(choice, following.source, hidden.fresh, nominal * hidden.passes, view)
        dropped: list[int] = []
        if callback is not None:
            watch.check()
            after_step = following.tokens, following.logprob, shares
            shot = Snapshot(index, schedule.most, batch.ledger.names, pool.tokens, view, choice, *after_step)
            dropped = prompts_to_drop(callback(shot))
        batch.pool, batch.selected = following, selecting
        if dropped and not step.last:
            batch = batch.part([i for i, name in enumerate(batch.ledger.names.tolist()) if name not in dropped])
            if not len(batch):
                break
    return result


def _draw(settings: Settings, head: Head, ends: Ends) -> Draw:
    reveal = settings.reveal_spec
    start = settings.temperature if settings.start_temperature is None else settings.start_temperature
    return Draw(
        head,
        ends.mask_id,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.order,
        settings.order_spec.build(settings),
        settings.order_temperature,
        ends.ids if settings.eos == "last" else None,
        reveal.build(settings) if reveal.adaptive else None,
        reveal.statistics,
        start if settings.start == "entropy" else None,
    )


@dataclass
class _Batch:
    """The prompts that are still decoded, and all that the loop keeps for them from step to step."""

    pool: Pool
    rows: Rows
    ledger: Ledger
    seed: Tensor  # [P]
    key: Tensor  # [P]
    selected: list[bool]  # whether the rows of each prompt are children of selected parents
    state: dict[str, Any] = field(default_factory=dict)  # the method's own values

    def __len__(self) -> int:
        return len(self.selected)

    def keys(self, step: int) -> Tensor:
        """Return the random streams [P] of the selector at a step."""
        return mix(self.seed, self.key, SELECT, step)

    def part(self, prompts: Sequence[int]) -> _Batch:
        """Return a batch of only those prompts whose indices are in `prompts`."""
        at = torch.tensor(prompts, dtype=torch.int64, device=self.key.device)
        return _Batch(
            self.pool.keep(at),
            self.rows.part(at),
            self.ledger.part(at),
            self.seed[at],
            self.key[at],
            [self.selected[i] for i in prompts],
            {name: value[at] if isinstance(value, Tensor) else value for name, value in self.state.items()},
        )


def _places(flags: Sequence[bool], wanted: bool, device: torch.device) -> Tensor:
    return torch.tensor([i for i, flag in enumerate(flags) if flag is wanted], dtype=torch.int64, device=device)


def _advance(
    pool: Pool,
    seed: Tensor,
    key: Tensor,
    names: Tensor,
    hidden: WindowHidden,
    choice: Choice,
    step: Step,
    *,
    settings: Settings,
    project: Projection,
    draw: Draw,
    select: Any,
    watch: Watch,
) -> Pool:
    """Return the next pool: the children of the chosen parents."""
    chosen = pool.choose(choice)
    seats = chosen.seats
    parents = Parents(
        chosen.tokens,
        hidden.states,
        seats.here(hidden.slot),
        pool.positions[seats.prompt],
        chosen.stream(seed, key, step.index),
        chosen.open,
        seats.prompt,
    )
    children = project(parents, step, draw, 4 * settings.w if settings.distinct else choice.children)
    owner = torch.stack([seats.prompt[:, None].expand_as(seats.row), seats.of(choice.parents)], 2).flatten(0, 1)
    watch.expect(children.finite.flatten(), not_finite(names, owner, step.index))
    if settings.distinct:
        children = chosen.distinct(children, choice.children)
    if not step.exact:
        children = chosen.finish(children)
    following = chosen.branch(children, step.index, choice.parents.shape[1] == settings.groups)
    if hasattr(select, "prune"):
        kept = select.prune(following.whole(), settings.groups, mix(seed, key, SELECT, step.index))
        following = following.prune(pool.beams.agree(Choice(kept, 1)).parents)
    return following
