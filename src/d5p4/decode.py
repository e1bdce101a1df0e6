"""The decoding loop. Each step runs the distinct rows of a pool through the model's body, computes quality and
similarity, chooses k parents, and draws their children, which form the next pool.

One call decodes P prompts that share a schedule. All random numbers are keyed (see `rng`), so the answers do not depend
on which prompts share the call. Most callers use `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .answers import Ledger, gather_result, prompts_to_drop
from .beams import ALONE, Beams
from .look import Look, not_finite
from .methods import Scorer
from .ops.ties import occurrence
from .options import Settings
from .pool import Pool
from .project import Draw, Parents, distinct_children, projection
from .rng import SELECT, mix
from .rows import Prompts, RowRunner, guidance_at, guide
from .types import Callback, Model, Result, Schedule, Snapshot
from .watch import Watch


@torch.no_grad()  # not `inference_mode`, because its tensors cannot be used in training
def decode(
    model: Model,
    prompts: Prompts,
    schedule: Schedule,
    settings: Settings,
    *,
    seed: Tensor,
    key: Tensor,
    numbers: Tensor | None = None,
    scorer: Scorer | None = None,
    references: Sequence[Any] | None = None,
    callback: Callback | None = None,
    beams: Beams = ALONE,
) -> Result:
    """Return k answers for each of P prompts.

    seed, key: [P] int64. The two together select the random stream of each prompt.
    numbers: [P]. Callbacks and error messages call the prompts by these numbers. The default is 0 to P - 1.
    beams: how the rows of a pool are spread over ranks. All ranks make this call inside `beams.together()`, and all get
    the result.
    """
    beams.check(settings.groups, settings.pool_size, callback=callback, scorer=scorer, history=settings.history)
    spec, steps = settings.spec, len(schedule.steps)
    select, project = spec.build(settings), projection(settings.order)
    finish = spec.finish(select, scorer, references)
    head = replace(model.head, fixed=settings.deterministic)
    head = head.ban(model.eos_ids if settings.eos == "never" else ()).counted()
    last_ids = torch.tensor(model.eos_ids, device=key.device) if settings.eos == "last" and model.eos_ids else None
    shape = settings.temperature, settings.top_k, settings.top_p, settings.order, settings.order_temperature
    draw = Draw(head, model.mask_id, *shape, last_ids)
    guided = settings.guidance_window or ((0, (steps + 1) // 2) if spec.half_guided else None)

    reuse = settings.savings and settings.order == "ancestral"  # in other orders, no child equals its parent
    conditional, unconditional = (
        RowRunner(model, rows, settings.max_tokens_per_forward, settings.savings, reuse, beams)
        for rows in (prompts, prompts.without_prompt(model.mask_id))
    )
    size = settings.pool_size
    masks = torch.full((len(key), size // beams.size, schedule.length), model.mask_id, device=key.device)
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    pool = Pool.start(masks, prompts.positions, size, settings.groups, wide)
    ledger = Ledger(torch.arange(len(key), device=key.device) if numbers is None else numbers, settings.history)
    state: dict[str, Any] = {}
    watch = Watch()

    for step in schedule.steps:
        watch.check()  # only here and in `RowRunner.run` does the host wait for the device

        # 1. Run the distinct rows through the body, and apply guidance to the states.
        g = guidance_at(step.index, settings.guidance, guided)
        hidden = conditional.run(pool.tokens, pool.row_hash)
        states, fresh = hidden.states, hidden.fresh
        if g != 1:
            free = unconditional.run(pool.tokens, pool.row_hash)
            states, fresh = guide(hidden.states, free.states, g), fresh + free.fresh

        # 2. Choose k parents by quality and similarity.
        look = Look(pool, hidden, states, step, settings, model, head, ledger.names, watch, beams)
        view = look.view(state)
        window = settings.select_window
        if step.last or window is None or window[0] <= step.index < window[1]:
            try:
                chosen_now = select(view, settings.groups, mix(seed, key, SELECT, step.index))
            except Exception:
                watch.check()  # if the cause is that logits are not finite, this raises an error that says so
                raise
            after = settings.groups if step.last and not finish else None
            choice = beams.agree(view.check(chosen_now, after, watch))
        else:
            choice = view.stay()

        # 3. Draw the children. The rank that holds a parent draws the children of that parent.
        seats = beams.seats(choice.parents, view.size)
        chosen = pool.take(choice.parents, seats)
        number = occurrence(chosen.row_hash, chosen.tie)
        stream = seats.of(mix(seed[:, None], key[:, None], step.index, chosen.row_hash, number))
        positions = conditional.prompts.positions
        parents = Parents(chosen.tokens, states, seats.here(hidden.slot), positions[seats.prompt], stream)
        count = 4 * settings.w if settings.distinct else choice.children
        children = project(parents, step, draw, count)
        owner = torch.stack([seats.prompt[:, None].expand_as(seats.row), seats.of(choice.parents)], 2).flatten(0, 1)
        watch.expect(children.finite.flatten(), not_finite(ledger.names, owner, step.index))
        if settings.distinct:
            children = distinct_children(children, parents, chosen.tie, choice.children, seats, beams)
        regroup = choice.parents.shape[1] == settings.groups
        following = chosen.branch(children.tokens, children.logprob, positions, step.index, regroup, seats, beams)

        # 4. Record which parents were chosen and how many rows ran, and call the callback.
        ledger.record(choice, fresh, view.size * (1 if g == 1 else 2), view, pool.tokens)
        dropped: list[int] = []
        if callback is not None:
            watch.check()
            after_step = following.tokens, following.logprob
            shot = Snapshot(step.index, steps, ledger.names, pool.tokens, view, choice, *after_step)
            dropped = prompts_to_drop(callback(shot))
        pool = following
        if dropped and not step.last:
            keep = (~torch.isin(ledger.names, torch.tensor(dropped, device=key.device))).nonzero()[:, 0]
            pool, seed, key = pool.keep(keep), seed[keep], key[keep]
            ledger.keep(keep)
            conditional.keep(keep)
            unconditional.keep(keep)
            state = {name: value[keep] if isinstance(value, Tensor) else value for name, value in state.items()}
            if not len(keep):
                break

    watch.check()
    result = gather_result(prompts, pool.whole(beams), look, view, choice, seats, ledger, finish)
    watch.check()  # computing the scores of the result has added conditions to `watch`
    return result
