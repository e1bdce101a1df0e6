"""A search owns everything between a forward and the next pool. The loop (`decode.loop`) calls it in this order:

    check     before a decode: refuse settings that the search cannot use
    start     when prompts begin or join: their first pool
    settle    before every forward, if rows may be complete early: drop or wake up rows, given facts about every prompt
    step      after every forward: the next pool
    finish    when prompts are finished: their answers

`Beam` selects rows, then draws their children. `TreeSearch` enumerates children, then prunes them before they are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..decode.pool import Call, Pool, pick, starting_at
from ..decode.schedule import Facts, Policy, Step, Steps, sent
from ..errors import D5P4Error
from ..ops.precision import wide
from ..ops.ties import occurrence
from ..options import Settings
from ..rng import hash_tokens, mix
from ..types import Choice, Kept
from .children import Draw, Parents, ancestral, distinct_children, drawn
from .constrained import constrain

if TYPE_CHECKING:
    from ..constraint import Prefix
    from ..decode.answers import Final
    from ..decode.batch import Batch
    from ..decode.rows import WindowHidden
    from ..decode.view import ForwardView


class Search:
    """Makes the pools and the answers of one decode call. Subclasses may be dataclasses of the method's parameters."""

    pure: ClassVar[bool] = False  # whether `step` may be recorded as a CUDA graph; a subclass must declare it again
    separates: ClassVar[bool] = False  # whether equal rows get different children even if no number is random
    score_kind: ClassVar[str | None] = None  # what the scores are that `finish` gives, if they are not the model's
    timeless: ClassVar[bool] = False  # whether `view.step` is never read, so that prompts may be at different steps
    completes: ClassVar[bool] = True  # whether a parent whose first child is complete has only this child
    constrains: ClassVar[bool] = False  # whether all its tokens are drawn under the masks of a constraint
    finishes: bool = False  # whether all rows of the pool are kept for a `finish` of the method's own

    call: Call
    draw: Draw
    project: Any  # the projection, which makes the children of parents

    def check(self, settings: Settings) -> None:
        """Raise an error, which names the option, if the search cannot use these settings."""

    def check_scorer(self, method: str, scorer: Any = None, references: Any = None) -> None:
        """Raise an error if the method cannot use a scorer or references that are given."""
        if scorer is not None or references is not None:
            name = "references" if scorer is None else "scorer"
            raise D5P4Error(f"method {method!r} takes no {name}; use method='best-of-n'", option=name)

    def cost(self, settings: Settings, steps: int) -> tuple[int, int]:
        """Return how many pools a decode runs beyond one per step, and the candidates of a step times the starts of its
        selection. The server uses both numbers to limit requests."""
        starts = settings.pool_size if settings.params.get("solver") == "full-search" else settings.groups
        return 0, settings.pool_size * starts if settings.spec.branches else 0

    def extras(self, settings: Settings) -> dict[str, tuple[int, ...]]:
        """Return the names and the shapes (per prompt) of what `finish` adds to `Result.extras`."""
        return {}

    def start(self, call: Call, schedules: Sequence[Policy], pool: Pool) -> Pool:
        """Prepare for a decode call, and return the first pool of P prompts, given a pool of equal rows of masks."""
        settings = call.settings
        reveal, start = settings.reveal_spec, settings.start_temperature
        draw = Draw(
            call.head,
            call.model.mask_id,
            settings.temperature,
            (settings.top_k, settings.top_p, settings.min_p),
            settings.order,
            settings.order_temperature,
            settings.order_spec.build(settings),
            last_ids=call.end_ids if settings.eos == "last" and len(call.end_ids) else None,
            rule=reveal.build(settings) if reveal.adaptive else None,
            statistics=reveal.statistics,
            start=None if settings.start != "entropy" else settings.temperature if start is None else start,
        )
        vars(self).update(call=call, draw=draw, project=ancestral if settings.order == "ancestral" else drawn)
        if call.matchers is None:
            return pool
        nothing = torch.zeros(pool.row_hash.shape, dtype=wide(pool.key.device), device=pool.key.device)
        return replace(pool, state={"log_z": nothing, "unfinished": nothing})

    def drop(self, pool: Pool, dead: Sequence[tuple[int, int]], prefixes: Mapping[tuple[int, int], Prefix]) -> Pool:
        """Return a pool in which the rows `dead`, which cannot become answers of the form, are marked as unfinished.
        Other rows in their place would change the law. Rows are given by prompt and index; `prefixes` has running ones.
        """
        if not dead:
            return pool
        index = sent(dead, pool.key.device).unbind(1)
        unfinished = pool.state["unfinished"].index_put(index, torch.ones_like(index[0], dtype=wide(pool.key.device)))
        return replace(pool, state=pool.state | {"unfinished": unfinished})

    def settle(self, batch: Batch, facts: Sequence[Facts]) -> tuple[Pool, Sequence[Facts]]:
        """Return the pool that the next step runs and facts about it, given those about the pool of every prompt."""
        if self.call.matchers is None:
            return batch.pool, facts
        pool, changed = constrain(batch.pool, self)
        return pool, batch.facts(pool) if changed else facts

    def phase(self, step: Step, name: int) -> Any:
        """Return a value for the next step of a prompt. Prompts with different values take their steps apart."""
        return self.draw.start is not None and step.index == 0, None if self.timeless else step.index

    def step(self, view: ForwardView, now: Steps) -> tuple[Pool, Choice]:
        """Return the next pool, and the choice of its parents."""
        raise NotImplementedError

    def finish(self, final: Final, k: int) -> Kept:
        """Return the rows of the last pool that become answers."""
        raise NotImplementedError

    def streams(self, mothers: Pool) -> Tensor:
        """Return the seeds [P, m] of the children of the chosen parents."""
        names = (x[:, None] for x in (mothers.seed, mothers.key, mothers.step))
        return mix(*names, mothers.row_hash, occurrence(mothers.row_hash, mothers.tie))

    def drawing(self, pool: Pool, choice: Choice, parents: Parents, step: Steps) -> Draw:
        """Return how the tokens of a step are drawn."""
        later = self.draw.start is not None and step.by_prompt[0].index > 0
        return replace(self.draw, start=None) if later else self.draw

    def parents(self, pool: Pool, hidden: WindowHidden, choice: Choice) -> Parents:
        """Return the chosen parents."""
        call, mothers, slot = self.call, pool.take(choice.parents), hidden.slot.gather(1, choice.parents)
        stream, opened = self.streams(mothers), call.eligible(pick(pool.undecided, choice.parents), pool.positions)
        masks = None if pool.masks is None else pick(pool.masks, choice.parents)[:, :, None]
        matchers = call.matchers if call.settings.reveal_spec.adaptive else None
        if matchers is not None:  # a run of sure tokens stays inside the answer
            opened = opened if pool.end is None else opened & ~starting_at(pool.end, opened)
        elif masks is not None:  # they are those of the first open position of a row
            opened = opened & (opened.cumsum(-1) == 1)
        rows = (lambda x: call.open(x, pool)), (lambda x: call.ends(x, pool)), hidden.compute, masks, matchers
        return Parents(mothers.tokens, hidden.states, slot, pool.positions, stream, opened, mothers.state, *rows)

    def children(self, pool: Pool, hidden: WindowHidden, step: Steps, choice: Choice) -> Pool:
        """Return the children of the chosen parents."""
        call, settings = self.call, self.call.settings
        mothers, parents = pool.take(choice.parents), self.parents(pool, hidden, choice)
        row_hash, tie, old = mothers.row_hash, mothers.tie, mothers.tokens
        number = occurrence(row_hash, tie)  # the number of each parent among equal parents
        count = 4 * settings.w if settings.distinct else choice.children
        draw = self.drawing(pool, choice, parents, step)
        children = self.project(parents, step, draw, count)
        prompt = torch.arange(len(row_hash), device=row_hash.device)[:, None].expand_as(choice.parents)
        owner = torch.stack([prompt, choice.parents], 2).flatten(0, 1)
        call.checks.expect_finite(children.finite.flatten(), pool.names, owner, pool.step)
        if children.comparable is not None:
            reason = "returned NaN for an open position; it must return numbers, and larger ones come first"
            error = partial(D5P4Error, reason, option="order", value=settings.order)
            call.checks.expect(children.comparable, lambda holds: error())
        if settings.distinct:
            hashes = hash_tokens(children.tokens, pool.positions[:, None, None])
            children = children.take(distinct_children(hashes, tie, choice.children))
        if self.completes and call.early:
            # A parent whose first child is complete has only this child. Its copies fill the other places, so that
            # every selector stays valid. They are equal rows and cost no forward.
            done = ~call.open(children.tokens[:, :, :1], pool).any(-1)
            children = children.take(torch.arange(choice.children, device=done.device) * ~done)
        new = children.tokens != old[:, :, None]
        tokens = children.tokens.flatten(1, 2)
        logprob = torch.where(new, children.logprob, mothers.logprob[:, :, None]).flatten(1, 2)
        revealed = torch.where(new, pool.step[:, None, None, None], mothers.revealed[:, :, None]).flatten(1, 2)
        child_hash = hash_tokens(tokens, pool.positions[:, None])
        place = torch.arange(child_hash.shape[1], device=child_hash.device)
        width = child_hash.shape[1] // choice.parents.shape[1]
        mother = (place // width).expand_as(child_hash)  # the index of each row's parent in `choice`
        source = choice.parents.gather(1, mother)
        tie = mix(child_hash, row_hash.gather(1, mother), number.gather(1, mother), place % width)
        regroup = choice.parents.shape[1] == settings.groups
        kept = {name: values.flatten(1) for name, values in children.state.items()}
        return replace(
            pool,
            tokens=tokens,
            logprob=logprob,
            revealed=revealed,
            row_hash=child_hash,
            tie=tie,
            group=mother if regroup else pool.group.gather(1, source),
            source=source,
            state=kept or {name: values.gather(1, source) for name, values in pool.state.items()},
        )
