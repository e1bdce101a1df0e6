"""Runs each distinct row through the model once.

Equal rows of a prompt have equal hidden states. So only one of the equal rows goes through the body, and the other
rows use its states. A row that was already in the previous pool (a row that waits at the end of a block, or an
ancestral child that equals its parent) reuses the states of that pool. Both savings change the cost, but never the
results. A complete row is never run: it keeps the states of the forward that completed it. Only the hidden states of
window positions are kept.

The rounding of a row may depend on the shape of the forward. With `Prompts.fixed`, all forwards therefore have the same
shape and an attention mask. A forward with too few rows is filled up with copies of a row.

Classifier-free guidance with scale g combines the conditional logits l_c and the unconditional logits l_u. The head is
affine, so l_u + g (l_c - l_u) = head(h_u + g (h_c - h_u)), and guidance can act on the hidden states h. Guidance thus
costs a second pass through the body, but not through the head. g = 1 turns guidance off. LLaDA's own scale is g - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.precision import working_dtype
from ..ops.ties import first_equal
from ..types import Hidden
from .cache import Cache, map_hidden
from .pool import Call, Pool
from .replay import Replay
from .schedule import Step
from .texts import Prompts


@dataclass(frozen=True)
class WindowHidden:
    """The hidden states at the window positions of the U distinct rows of all pools."""

    states: Tensor  # [U, L, D]
    features: Tensor  # [U, L, D]
    owner: Tensor  # [U, 2] for each distinct row: the prompt's index, and the row's index among this rank's rows
    slot: Tensor  # [P, n] the index, among the U distinct rows, of each row that this rank holds
    fresh: Tensor  # [P] how many rows of the whole pool went through the model
    row_hash: Tensor  # [P, N] the hashes of the rows of the whole pool
    active: Tensor | None = None  # [P] the prompts whose rows have states; None: all
    ran: Tensor | None = None  # [P, N] the rows whose states are their own, not those of a parent; None: all
    has: Tensor | None = None  # [P, N] the rows that have states: not those that were complete before the first forward
    passes: Tensor | int = 1  # [P] how often a row goes through the model: twice with guidance
    tokens: Tensor | int = 0  # [P] how many positions of the whole pool went through the model
    contexts: Tensor | int = 0  # [P] how many rows the contexts of a cache would cost if equal rows ran apart
    start: Tensor | None = None  # [P] the start of the block; with a cache, states past the block have no meaning

    def part(self, prompts: Tensor) -> WindowHidden:
        """Return the states for these prompts only. All states are kept, and `slot` has those of the prompts."""
        names = ("slot", "row_hash", "active", "ran", "has", "start")
        parts = {name: value[prompts] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **parts)


def _needs_mask(prompts: Prompts) -> bool:
    return prompts.fixed or not bool(prompts.attention_mask.all())


def _taken(has: Tensor | None, source: Tensor) -> Tensor:
    """Return, for rows with the given sources [P, N], whether the sources have states."""
    return torch.ones_like(source, dtype=torch.bool) if has is None else has.gather(1, source)


def _numbers(flags: Tensor) -> Tensor:
    """Return flags [P, N] as numbers: the n-th true element has the number n - 1."""
    return flags.flatten().cumsum(0).view_as(flags) - 1


Known = tuple[WindowHidden, Tensor, Tensor]
Distinguished = tuple[tuple[Tensor, Tensor], Known | None]
"""What `RowRunner._distinct` and `RowRunner._known` return."""


class RowRunner:
    """Runs the rows of the pools of a batch of prompts through the body."""

    def __init__(self, call: Call, prompts: Prompts, reuse: bool = True) -> None:
        """`reuse`: whether a row of the previous pool may come again."""
        model, settings = call.model, call.settings
        self.model, self.max_tokens, self.share = model, settings.max_tokens_per_forward, settings.savings
        self.reuse = reuse and self.share
        recordable = self.share and not prompts.fixed and prompts.tokens.is_cuda and getattr(model, "recordable", False)
        self.body: Any = Replay(model) if recordable else model.body
        self.prompts, self.masked = prompts, _needs_mask(prompts)
        self.last: WindowHidden | None = None
        self.distinguished: tuple[Pool, Distinguished] | None = None  # what `distinguish` found out about a pool
        self.cache: Cache | None = None  # made by the first run, because guidance may start late or never

    def run(self, pool: Pool, step: Step, active: Tensor | None = None, complete: Tensor | None = None) -> WindowHidden:
        """Return the hidden states of the rows that this rank holds. This method waits for the device, because the
        size of the forward depends on the number of distinct rows.

        active [P] bool: the prompts to run (default: all). complete [P, N] bool: the rows that are not run, because
        they keep the states of their last forward (default: none).
        """
        beams, row_hash, settings = pool.call.beams, pool.row_hash, pool.call.settings
        if self.cache is None and settings.cache != "none":
            contexts = max(1, settings.pool_size // beams.size)
            self.cache = Cache(self.model, self.prompts, settings, contexts, self.body)
        start = torch.full_like(pool.key, step.start) if step.starts is None else step.starts
        own_hash = beams.own(row_hash)
        (first, stored), known = self.distinguish(pool, complete)
        stored = stored if active is None else stored & active[:, None]
        if known is not None:
            last, same, source = known
            if self.cache is not None and last.start is not None:  # the states of a cache end with the block
                same = same & (last.start == start)[:, None]
            same = same if complete is None else same | complete
            known = last, same if last.active is None else same & last.active[:, None], source
        has = None
        if complete is not None:  # complete rows never run, but every rank runs one row, so that its states have a row
            has = ~complete if known is None else ~complete | (known[1] & _taken(known[0].has, known[2]))
            empty = beams.own(complete if known is None else complete & ~known[1])
            stored = stored & (~empty | (empty.all(-1, keepdim=True) & (first == 0)))
        fresh = stored if known is None else stored & ~beams.own(known[1])
        owner, slot = fresh.nonzero(), _numbers(fresh)
        # All that must wait for the device is done before the forward: the host then works while the forward runs.
        if known is not None:
            taken = stored & ~fresh
            taken_rows = taken.nonzero()
        cost = None
        if self.cache is None:
            hidden = self._forward(pool.tokens, owner)
        else:
            running = torch.ones_like(row_hash, dtype=torch.bool) if complete is None else ~complete
            running = running if active is None else running & active[:, None]
            hidden, cost = self.cache.run(pool, start, owner, running)
        if known is not None:
            old, known_rows, source = known
            states, features, old_slot = beams.fetch(old.states, old.features, old.slot, source, known_rows)
            slot = torch.where(taken, len(owner) + _numbers(taken), slot)
            index = old_slot[taken_rows[:, 0], taken_rows[:, 1]]
            hidden = map_hidden(lambda new, x: torch.cat([new, x[index]]), hidden, Hidden(states, features))
            owner = torch.cat([owner, taken_rows])
        if own_hash is not row_hash:  # count the rows of all ranks
            fresh = self._distinct(row_hash, complete)[1]
            fresh = fresh if active is None else fresh & active[:, None]
            fresh = fresh if known is None else fresh & ~known[1]
        fresh = fresh if complete is None else fresh & ~complete
        ran, slot = None if complete is None else ~complete, slot.gather(1, first).clamp_min(0)
        count, contexts = fresh.sum(-1), 0
        if cost is None:
            tokens = count * self.prompts.attention_mask.sum(-1)
        else:
            rows, positions, contexts, width = cost
            count, tokens = count + rows, count * width + positions
        facts = owner, slot, count, row_hash, active, ran, has
        self.last = WindowHidden(hidden.states, hidden.features, *facts, tokens=tokens, contexts=contexts, start=start)
        self.distinguished = None  # has the states before these, whose memory is now free
        return self.last

    def final(self, pool: Pool) -> WindowHidden:
        """Return the states of complete rows at their last forward: those of their parents. Equal rows are not shared,
        because their parents may differ."""
        assert self.last is not None
        old, everyone = self.last, torch.ones_like(pool.row_hash, dtype=torch.bool)
        states, features, slot = pool.call.beams.fetch(old.states, old.features, old.slot, pool.source, everyone)
        index, own = slot.flatten(), torch.ones_like(slot, dtype=torch.bool)
        hidden = map_hidden(lambda x: x[index], Hidden(states, features))
        facts = own.nonzero(), _numbers(own), torch.zeros_like(slot[:, 0]), pool.row_hash
        return WindowHidden(hidden.states, hidden.features, *facts, has=_taken(old.has, pool.source))

    def distinguish(self, pool: Pool, complete: Tensor | None) -> Distinguished:
        """Return what `_distinct` and `_known` find out about a pool. The loop calls this method before it waits for
        the device, so that the device does this work without waiting for the host."""
        if self.distinguished is None or self.distinguished[0] is not pool:
            own = pool.call.beams.own
            distinct = self._distinct(own(pool.row_hash), None if complete is None else own(complete))
            self.distinguished = pool, (distinct, self._known(pool, complete))
        return self.distinguished[1]

    def _distinct(self, row_hash: Tensor, complete: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the index [P, N] of the row whose states a row uses, and the rows whose states are stored, a bool
        [P, N]. Without `share`, only complete rows share states."""
        place, first = torch.arange(row_hash.shape[1], device=row_hash.device), first_equal(row_hash)
        if not self.share:
            first = place.expand_as(first) if complete is None else torch.where(complete, first, place)
        return first, first == place

    def _known(self, pool: Pool, complete: Tensor | None) -> Known | None:
        """Return the previous states, which rows [P, N] that are not complete need no forward if their block is the
        same, and the rows [P, N] of the previous pool whose states rows take. Return None if all rows need a forward.
        """
        last = self.last
        if last is None or (complete is None and not self.reuse):
            return None
        same = pool.row_hash[:, :, None] == last.row_hash[:, None, :]
        equal, source = same.any(-1), same.to(torch.uint8).argmax(-1)
        known = equal if self.reuse else torch.zeros_like(equal)
        if last.ran is not None:  # a row that slept has no states of its own, so it must run when it wakes up
            known = known & last.ran.gather(1, source)
        if complete is not None:
            # Equal complete rows of one prompt must have equal states, also if their parents differ: they take the
            # states of the equal row in the previous pool or, without one, of the parent of the first equal row.
            source = torch.where(equal, source, pool.source.gather(1, first_equal(pool.row_hash)))
        return last, known, source

    def _forward(self, answers: Tensor, chosen: Tensor) -> Hidden:
        """Return states and features [R, L, D] of R rows. Row r holds the answer answers[p, i], (p, i) = chosen[r]."""
        if not len(chosen):
            weight = self.model.head.weight
            nothing = weight.new_zeros(0, answers.shape[2], weight.shape[1])
            return Hidden(nothing, nothing)
        prompt, row = chosen.unbind(1)
        parts = zip(answers[prompt, row].split(self.size), prompt.split(self.size), strict=True)
        return map_hidden(lambda *x: torch.cat(x), *(self.microbatch(*part) for part in parts))

    @property
    def size(self) -> int:
        """The most rows per forward."""
        return max(1, self.max_tokens // self.prompts.tokens.shape[1])

    def microbatch(self, answers: Tensor, prompt: Tensor) -> Hidden:
        """Return states and features [r, L, D] of at most `size` answers [r, L] to the prompts with the indices [r]."""
        count = len(prompt)
        if self.prompts.fixed and count < self.size:
            place = torch.arange(self.size, device=prompt.device)
            answers, prompt = (x[place * (place < count)] for x in (answers, prompt))
        batch = self.prompts.take(prompt)
        tokens = batch.fill(answers[:, None])[:, 0]
        hidden = self.body(tokens, batch.attention_mask if self.masked else None)
        window = batch.window[:count, :, None].expand(-1, -1, hidden.states.shape[-1])
        return map_hidden(lambda x: x[:count].gather(1, window), hidden)

    def part(self, index: Tensor) -> RowRunner:
        """Return a runner that continues with these prompts only."""
        runner = copy(self)
        runner.prompts = self.prompts.take(index)
        runner.masked = _needs_mask(runner.prompts)
        runner.cache = None if self.cache is None else self.cache.part(index, runner.prompts)
        runner.last, runner.distinguished = None if self.last is None else self.last.part(index), None
        return runner


class Rows:
    """Runs rows with and, where a prompt has guidance, without their prompts, and applies guidance to the states."""

    def __init__(self, call: Call, prompts: Prompts, adaptive: bool) -> None:
        """`adaptive`: whether rows may be complete before the last step."""
        settings = call.settings
        # An ancestral child can equal its parent. Under adaptive rules, so can a row that waits at the end of a block.
        reuse = adaptive or settings.order == "ancestral"
        self.adaptive = adaptive
        self.conditional, self.unconditional = (
            RowRunner(call, rows, reuse) for rows in (prompts, prompts.without_prompt(call.model.mask_id))
        )
        self.scale, self.beams = settings.guidance, call.beams
        self.guided = False  # whether any prompt had guidance at the last step
        self.active: Tensor | None = None  # [P] which prompts had guidance at the last step; None: all

    @property
    def prompts(self) -> Prompts:
        return self.conditional.prompts

    def distinguish(self, pool: Pool) -> None:
        """Find out which rows of a pool must be run. `run` would do so, too, but after the loop has waited."""
        self.conditional.distinguish(pool, pool.complete if self.adaptive else None)

    def run(self, pool: Pool, step: Step, guided: Sequence[bool]) -> WindowHidden:
        """Return the hidden states of a pool. `guided` says which prompts have guidance."""
        self.guided, self.active = any(guided) and self.scale != 1, None
        if self.guided and not all(guided):  # made before the forward, because making a tensor waits for the device
            self.active = torch.tensor(guided, device=pool.tokens.device)
        complete = pool.complete if self.adaptive else None
        hidden = self.conditional.run(pool, step, complete=complete)
        if self.guided:
            return self._guide(hidden, self.unconditional.run(pool, step, self.active, complete))
        self.unconditional.last = None  # a later pool must not take its states from a pool before this one
        return hidden

    @property
    def passes(self) -> Tensor | int:
        """How often [P] a row is run: twice with guidance."""
        return 1 if not self.guided else 2 if self.active is None else 1 + self.active.long()

    def final(self, pool: Pool) -> WindowHidden:
        """Return the hidden states of complete rows at their last forward, with the guidance of the last step."""
        hidden = self.conditional.final(pool)
        return self._guide(hidden, self.unconditional.final(pool)) if self.guided else hidden

    def _guide(self, hidden: WindowHidden, free: WindowHidden) -> WindowHidden:
        prompt, row = hidden.owner.unbind(1)
        states = guide(hidden.states, free.states[free.slot[prompt, row]], self.scale)
        guided = None if free.has is None else self.beams.own(free.has)[prompt, row]  # a complete row stays as it was
        if self.active is not None:
            guided = self.active[prompt] if guided is None else self.active[prompt] & guided
        if guided is not None:
            states = torch.where(guided[:, None, None], states, hidden.states)
        sums = {name: getattr(hidden, name) + getattr(free, name) for name in ("fresh", "tokens", "contexts")}
        return replace(hidden, states=states, passes=self.passes, **sums)

    def part(self, index: Tensor) -> Rows:
        """Return the rows of these prompts only."""
        rows = copy(self)
        rows.conditional, rows.unconditional = self.conditional.part(index), self.unconditional.part(index)
        rows.active = None if self.active is None else self.active[index]
        return rows


def guide(conditional: Tensor, unconditional: Tensor, g: float) -> Tensor:
    """Apply guidance to the states. The result is at least float32, because g magnifies rounding errors."""
    c, u = (x.to(working_dtype(conditional.dtype)) for x in (conditional, unconditional))
    return u + g * (c - u)
