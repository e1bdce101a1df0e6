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

Several ranks divide the rows. Hidden states stay on the rank that ran the row, which also computes what the head says
about them (`WindowHidden.compute`); all ranks get these numbers. Besides them, only the features that similarity
compares are sent to all ranks. The next pool is that of the first rank, so rounding errors cannot make the
ranks differ.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ops.precision import working_dtype
from ..ops.ties import first_equal
from ..types import Hidden, Model, map_hidden
from .cache import ApproximateCache, Cache, ExactCache
from .pool import Call, Pool, joined_rows
from .ranks import ALONE, Ranks, divide
from .replay import Replay
from .schedule import Steps, sent
from .texts import Prompts

T = TypeVar("T")
PER_PROMPT = ("slot", "fresh", "row_hash", "active", "ran", "has", "start", "passes", "tokens", "contexts")


@dataclass(frozen=True)
class WindowHidden:
    """The hidden states at the window positions of the U distinct rows of all pools. Those of rank 0 come first."""

    states: Tensor  # [u, L, D] of the rows that this rank has; u = U if there is one rank
    features: Tensor  # [u, L, D]
    owner: Tensor  # [U, 2] for each distinct row: the prompt's index, and the row's index in its pool
    slot: Tensor  # [P, N] the index of each row among the U distinct rows
    counts: tuple[int, ...]  # u of each rank
    ranks: Ranks
    fresh: Tensor  # [P] how many rows went through the model
    row_hash: Tensor  # [P, N] the hashes of the rows
    active: Tensor  # [P] the prompts whose rows have states
    ran: Tensor  # [P, N] the rows whose states are their own, not those of a parent
    has: Tensor  # [P, N] the rows that have states: not those that were complete before the first forward
    start: Tensor  # [P] the start of the block; with a cache, states past the block have no meaning
    passes: Tensor | int = 1  # [P] how often a row goes through the model: twice with guidance
    tokens: Tensor | int = 0  # [P] how many positions went through the model
    contexts: Tensor | int = 0  # [P] how many rows the contexts of a cache would cost if equal rows ran apart

    def part(self, prompts: Tensor) -> WindowHidden:
        """Return the states for these prompts only. All states are kept, and `slot` has those of the prompts."""
        rows: dict[str, Any] = {n: x[prompts] for n in PER_PROMPT if isinstance(x := getattr(self, n), Tensor)}
        return replace(self, **rows)

    def grow(self, prompts: int, length: int) -> WindowHidden:
        """Return the states for this many prompts with windows of this length. The last ones have no states yet."""
        sizes, pad = [len(self.start), prompts - len(self.start)], torch.nn.functional.pad
        rows: dict[str, Any] = {
            name: joined_rows([x, None], sizes) for name in PER_PROMPT if isinstance(x := getattr(self, name), Tensor)
        }
        more, hidden = length - self.states.shape[1], Hidden(self.states, self.features)
        states, features, _, _ = map_hidden(lambda x: pad(x, (0, 0, 0, more)), hidden)
        return replace(self, states=states, features=features, **rows)

    def take(self, prompts: Tensor) -> WindowHidden:
        """Return the states for these prompts only, without those of others. This method waits for the device."""
        place = torch.full_like(self.start, -1).index_put((prompts,), torch.arange(len(prompts), device=prompts.device))
        owner = torch.stack([place[self.owner[:, 0]], self.owner[:, 1]], -1)
        wanted, part = owner[:, 0] >= 0, self.part(prompts)
        index, counts = wanted[self.here].nonzero()[:, 0], tuple(int(x.sum()) for x in wanted.split(self.counts))
        states, features, _, _ = map_hidden(lambda x: x[index], Hidden(self.states, self.features))
        slot = wanted.cumsum(0)[part.slot] - 1
        return replace(part, states=states, features=features, owner=owner[wanted], slot=slot, counts=counts)

    @property
    def here(self) -> slice:
        """Which of the U distinct rows this rank has."""
        first = sum(self.counts[: self.ranks.rank])
        return slice(first, first + self.counts[self.ranks.rank])

    def rank_of(self, slot: Tensor) -> Tensor:
        """Return the ranks that have the rows with these slots."""
        return torch.bucketize(slot, torch.tensor([*accumulate(self.counts)], device=slot.device), right=True)

    def join(self, *own: Tensor) -> list[Tensor]:
        """Join values [u, ...] of the rows of each rank into the values [U, ...] of all rows."""
        return self.ranks.join(own, self.counts)

    def compute(self, slot: Tensor, function: Callable[..., dict[str, Tensor]], *given: Tensor) -> dict[str, Tensor]:
        """Return function(index, *given), tensors [R, ...], for rows with these slots [R]. `states[index]` is the row,
        and given are tensors [R, ...]. The rank that has a row computes its values, and every rank gets them."""
        if self.ranks.size == 1:
            return function(slot, *given)
        rank = self.rank_of(slot)
        mine = (rank == self.ranks.rank).nonzero()[:, 0]
        own = function(slot[mine] - self.here.start, *(x[mine] for x in given))
        joined = self.ranks.join([*own.values()], rank.bincount(minlength=self.ranks.size).tolist())
        back = rank.argsort(stable=True).argsort()
        return {name: values[back] for name, values in zip(own, joined, strict=True)}


def _places(rows: Tensor) -> Tensor:
    """Return the indices 0, 1, ... of rows [P, N], expanded to [P, N]."""
    return torch.arange(rows.shape[1], device=rows.device).expand_as(rows)


class Repeats(NamedTuple):
    """Which rows of a pool have the same states, and which have those of the previous pool."""

    pool: Pool
    complete: Tensor  # [P, N] the rows that keep the states of the forward that completed them
    first: Tensor  # [P, N] the index of the row whose states a row uses. Without `share`, only complete rows share
    known: Tensor  # [P, N] the rows that had states of their own in the previous pool, and need no forward in its block
    source: Tensor  # [P, N] the row of the previous pool whose states a known or complete row takes


@dataclass(frozen=True)
class WholeRows:
    """Runs whole rows: the forward without a cache."""

    model: Model
    prompts: Prompts
    max_tokens: int  # per forward
    body: Any

    @cached_property
    def masked(self) -> bool:
        """Whether forwards need an attention mask."""
        return self.prompts.fixed or not bool(self.prompts.attention_mask.all())

    def context_names(self, pool: Pool, start: Tensor) -> None:
        """Return None, because rows share nothing."""

    def run(
        self, pool: Pool, start: Tensor, chosen: Tensor, running: Tensor, here: Any = None
    ) -> tuple[Hidden, Tensor]:
        """Return states and features [R, L, D] of R rows, and the cost of the step (see `Cache.run`)."""
        prompt, row = chosen.unbind(1)
        width = self.prompts.attention_mask.sum(-1)
        cost = torch.stack([*[torch.zeros_like(width)] * 3, width])
        if not len(chosen):
            nothing = self.model.head.weight.new_zeros(0, pool.tokens.shape[2], self.model.head.weight.shape[1])
            return Hidden(nothing, nothing), cost
        parts = zip(pool.tokens[prompt, row].split(self.size), prompt.split(self.size), strict=True)
        hidden = [self.microbatch(*part) for part in parts]
        return hidden[0] if len(hidden) == 1 else map_hidden(lambda *x: torch.cat(x), *hidden), cost

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


class RowRunner:
    """Runs the rows of the pools of a batch of prompts through the body."""

    def __init__(self, call: Call, prompts: Prompts, ranks: Ranks) -> None:
        model, settings, self.call, self.ranks = call.model, call.settings, call, ranks
        self.share, self.adaptive = settings.savings, call.early
        # An ancestral child can equal its parent. Under adaptive rules, so can a row that waits at the end of a block.
        self.reuse = settings.savings and (call.early or settings.order == "ancestral")
        recordable = self.share and not prompts.fixed and prompts.tokens.is_cuda and getattr(model, "recordable", False)
        body: Any = Replay(model) if recordable else model.body
        self.whole = WholeRows(model, prompts, settings.max_tokens_per_forward, body)
        self.cache: Cache | None = None  # made by the first run, because guidance may start late or never
        self.last: WindowHidden | None = None
        self.repeats: Repeats | None = None  # what `distinguish` found out about the next pool

    def run(self, pool: Pool, step: Steps, active: Tensor | None = None, rank: Tensor | None = None) -> WindowHidden:
        """Return the hidden states of the pool. Complete rows keep those of their last forward. This method waits for
        the device, because the size of the forward depends on the number of distinct rows.

        active [P] bool: the prompts to run (default: all).
        rank [P, N]: the rank that runs each row (default: see `divide`).
        """
        repeats, forward = self.distinguish(pool), self._forward(pool)
        last, complete = self.last if self.reuse or self.adaptive else None, repeats.complete
        start = torch.full_like(pool.key, step.start) if step.starts is None else step.starts
        active = torch.ones_like(start, dtype=torch.bool) if active is None else active
        known, has = torch.zeros_like(complete), ~complete
        if last is not None:
            same_block = self.call.settings.cache == "none" or (last.start == start)[:, None]
            known = (repeats.known & same_block | complete) & (
                last.active[:, None] & last.has.gather(1, repeats.source)
            )
            has = has | known
        # Complete rows never run, but one row of every prompt does, so that its states have a row.
        empty, distinct = complete & ~known, repeats.first == _places(repeats.first)
        useless = empty & ~(empty.all(-1, keepdim=True) & (repeats.first == 0))
        stored = distinct & active[:, None] & ~useless
        fresh, taken, running = stored & ~known, stored & known, ~complete & active[:, None]
        if self.ranks.size > 1 and rank is None:
            home = None if self.last is None else self.last.rank_of(self.last.slot.gather(1, repeats.source))
            rank = divide(fresh, self.ranks.size, home, forward.context_names(pool, start)).gather(1, repeats.first)
        # All that must wait for the device is done before the forward: the host then works while the forward runs.
        (own_fresh, own_taken), owner, slot, counts = self._listed(rank, fresh, taken)
        here = None if rank is None else rank == self.ranks.rank
        hidden, (rows, tokens, contexts, width) = forward.run(pool, start, own_fresh, running, here)
        if last is not None and len(own_taken):
            index = last.slot.gather(1, repeats.source)[own_taken.unbind(1)] - last.here.start
            hidden = map_hidden(lambda new, x: torch.cat([new, x[index]]), hidden, Hidden(last.states, last.features))
        count = (distinct & running & ~known).sum(-1)
        where = owner, slot.gather(1, repeats.first), counts, self.ranks
        facts = count + rows, pool.row_hash, active, ~complete, has, start
        tokens = count * width + tokens
        self.last = WindowHidden(hidden.states, hidden.features, *where, *facts, tokens=tokens, contexts=contexts)
        self.repeats = None
        return self.last

    def _listed(self, rank: Tensor | None, *flags: Tensor) -> tuple[list[Tensor], Tensor, Tensor, tuple[int, ...]]:
        """List the rows that have one of the flags [P, N], in the sequence of ranks and then of flags. Return the rows
        [r, 2] of this rank for each flag, all rows [U, 2], the place [P, N] of each row among them (a row that is not
        listed has the place of another row of its prompt), and `counts`."""
        ranks = range(self.ranks.size)
        rows = [[(flag if rank is None else flag & (rank == r)).nonzero() for flag in flags] for r in ranks]
        owner = torch.cat([some for own in rows for some in own])
        place = torch.full_like(flags[0], -1, dtype=torch.int64)
        place[owner.unbind(1)] = torch.arange(len(owner), device=owner.device)
        place = torch.where(place < 0, place.amax(-1, keepdim=True), place).clamp_min(0)
        return rows[self.ranks.rank], owner, place, tuple(sum(map(len, own)) for own in rows)

    def _forward(self, pool: Pool) -> WholeRows | Cache:
        call, settings = self.call, self.call.settings
        if settings.cache == "none":
            return self.whole
        if self.cache is None:
            kind = ExactCache if settings.cache == "exact" else ApproximateCache
            self.cache = kind(call.model, self.whole.prompts, settings, settings.pool_size, self.whole.body)
        return self.cache

    def final(self, pool: Pool) -> WindowHidden:
        """Return the states of complete rows at their last forward: those of their parents. Equal rows are not shared,
        because their parents may differ."""
        assert self.last is not None
        last, everyone = self.last, torch.ones_like(pool.row_hash, dtype=torch.bool)
        old = last.slot.gather(1, pool.source)
        (own,), owner, slot, counts = self._listed(last.rank_of(old) if self.ranks.size > 1 else None, everyone)
        index = old[own.unbind(1)] - last.here.start
        hidden = map_hidden(lambda x: x[index], Hidden(last.states, last.features))
        where = owner, slot, counts, self.ranks
        facts = torch.zeros_like(old[:, 0]), pool.row_hash, last.active, everyone, last.has.gather(1, pool.source)
        return WindowHidden(hidden.states, hidden.features, *where, *facts, last.start)

    def distinguish(self, pool: Pool) -> Repeats:
        """Find out which rows of a pool repeat others. The loop calls this method before it waits for the device, so
        that the device does this work without waiting for the host."""
        if self.repeats is not None and self.repeats.pool is pool:
            return self.repeats
        last, equal = self.last, first_equal(pool.row_hash)
        complete = pool.complete if self.adaptive else torch.zeros_like(pool.row_hash, dtype=torch.bool)
        first = equal if self.share else torch.where(complete, equal, _places(pool.row_hash))
        known, source = torch.zeros_like(complete), pool.source
        if last is not None and (self.reuse or self.adaptive):
            same = pool.row_hash[:, :, None] == last.row_hash[:, None, :]
            there, place = same.any(-1), same.to(torch.uint8).argmax(-1)
            if self.reuse:  # a row that slept has no states of its own, so it must run when it wakes up
                known = there & last.ran.gather(1, place)
            # Equal complete rows of one prompt must have equal states, also if their parents differ: they take the
            # states of the equal row in the previous pool or, without one, of the parent of the first equal row.
            source = torch.where(there, place, pool.source.gather(1, equal))
        self.repeats = Repeats(pool, complete, first, known, source)
        return self.repeats

    def part(self, index: Tensor) -> RowRunner:
        """Return a runner that continues with these prompts only."""
        runner, prompts = copy(self), self.whole.prompts.take(index)
        runner.whole, runner.repeats = replace(self.whole, prompts=prompts), None
        runner.cache = None if self.cache is None else self.cache.part(index, prompts)
        runner.last = None if self.last is None else self.last.part(index)
        return runner

    def join(self, prompts: Prompts) -> RowRunner:
        """Return a runner of more prompts: those of this runner, and then the new ones."""
        runner, (total, length) = copy(self), prompts.window.shape
        runner.whole, runner.repeats = replace(self.whole, prompts=prompts), None
        runner.last = None if self.last is None else self.last.grow(total, length)
        if runner.cache is not None:
            runner.cache.join(prompts)
        return runner


class Rows:
    """Runs rows with and, where a prompt has guidance, without their prompts, and applies guidance to the states."""

    def __init__(self, call: Call, prompts: Prompts, ranks: Ranks = ALONE) -> None:
        self.conditional = RowRunner(call, prompts, ranks)
        self.unconditional = RowRunner(call, prompts.without_prompt(call.model.mask_id), ranks)
        self.scale, self.window, self.ranks = call.settings.guidance, call.settings.guidance_window, ranks
        self.guided = False  # whether any prompt had guidance at the last step
        self.active: Tensor | None = None  # [P] which prompts had guidance at the last step; None: all

    @property
    def prompts(self) -> Prompts:
        return self.conditional.whole.prompts

    def distinguish(self, pool: Pool) -> None:
        """Find out which rows of a pool must be run. `run` would do so, too, but after the loop has waited."""
        self.conditional.distinguish(pool)

    def run(self, pool: Pool, step: Steps) -> WindowHidden:
        """Return the hidden states of a pool, with guidance for the prompts that are in the window of guidance."""
        guided = [one.within(self.window) for one in step.by_prompt]
        self.guided, self.active = any(guided) and self.scale != 1, None
        if self.guided and not all(guided):
            self.active = sent(guided, pool.tokens.device)
        hidden = self.conditional.run(pool, step)
        if self.guided:
            rank = hidden.rank_of(hidden.slot) if self.ranks.size > 1 else None
            return self._guide(hidden, self.unconditional.run(pool, step, self.active, rank))
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
        prompt, row = hidden.owner[hidden.here].unbind(1)  # a rank runs the same rows with and without their prompts
        others = free.states if len(free.states) else hidden.states
        index = (free.slot[prompt, row] - free.here.start).clamp(0, max(0, len(others) - 1))
        states = guide(hidden.states, others[index], self.scale)
        guided = free.has[prompt, row]  # a complete row stays as it was
        guided = guided if self.active is None else guided & self.active[prompt]
        states = torch.where(guided[:, None, None], states, hidden.states)
        sums = {name: getattr(hidden, name) + getattr(free, name) for name in ("fresh", "tokens", "contexts")}
        return replace(hidden, states=states, passes=self.passes, **sums)

    def agree(self, value: T) -> T:
        """Return, on every rank, the value of the first rank: tensors in a pool, in tuples or in dicts."""
        if self.ranks.size == 1:
            return value
        own: list[Tensor] = []
        _mapped(value, lambda x: own.append(x) or x)  # type: ignore[func-returns-value]
        agreed = iter(self.ranks.agree(own))
        return _mapped(value, lambda x: next(agreed))

    def part(self, index: Tensor) -> Rows:
        """Return the rows of these prompts only."""
        rows = copy(self)
        rows.conditional, rows.unconditional = self.conditional.part(index), self.unconditional.part(index)
        rows.active = None if self.active is None else self.active[index]
        return rows

    def join(self, prompts: Prompts) -> Rows:
        """Return the rows of more prompts: those of these rows, and then the new ones."""
        rows, blank = copy(self), prompts.without_prompt(self.conditional.whole.model.mask_id)
        rows.conditional, rows.unconditional = self.conditional.join(prompts), self.unconditional.join(blank)
        if self.guided:
            total, old = len(prompts.first), len(self.prompts.first)
            active = torch.ones_like(self.prompts.first, dtype=torch.bool) if self.active is None else self.active
            rows.active = joined_rows([active, None], [old, total - old])
        return rows


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with changed tensors (see `Rows.agree`)."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, Pool):
        names = [f.name for f in fields(value) if f.name != "undecided"]
        return replace(value, **{name: _mapped(getattr(value, name), change) for name in names})
    if isinstance(value, tuple):
        parts = [_mapped(part, change) for part in value]
        return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


def guide(conditional: Tensor, unconditional: Tensor, g: float) -> Tensor:
    """Apply guidance to the states. The result is at least float32, because g magnifies rounding errors."""
    c, u = (x.to(working_dtype(conditional.dtype)) for x in (conditional, unconditional))
    return u + g * (c - u)
