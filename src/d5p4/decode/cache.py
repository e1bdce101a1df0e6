"""Keeps keys and values of positions that later forwards only read, so that a step runs one block per row.

exact    for block-causal models. A finished block never changes, so its keys and values are exact. The prompt is stored
         once for all prompts that are equal, and the finished blocks once for all rows that share them
prefix   for models with full attention, an approximation: a whole-row forward is made when a block begins, with masks
         in the block, and the positions before the block keep its keys and values. The rest of the row is run
dual     as prefix, but all positions outside the block keep their keys and values. Only the block is run

A *context* is what a row reads but does not run. A context depends on the prompt and on the tokens before the block
(exact) or outside the block (prefix and dual), and a hash of these tokens is its name. Rows with the same context share
one slot of a shelf, so inside a block nothing is copied. When a prompt goes to its next block, a child context takes
over the slot of its parent, and only further children of the same parent copy it. Then one forward of the finished
block, in which no token is masked, *commits* the block: its keys, values and states are stored. A context that is
missing (a row of a tree woke up, or its rows went to another rank) is computed again, block by block. A rank keeps a
context while any row reads it, so a rank computes a context at most once per block.

Every decode call has its own cache, so a cache never meets changed weights. With guidance, the rows with the prompt and
the rows without it have separate caches. A prompt may join a cache at any step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..options import Settings
from ..rng import hash_tokens
from ..types import Context, Hidden, Model, Store
from .pool import Pool
from .texts import Prompts

CACHE_BYTES = 8 << 30  # the caches of a call that decodes several prompts have at most about this many bytes
KEPT_BYTES = 1 << 30  # a forward that returns its keys and values has at most this many bytes of them


def bytes_per_token(model: Model, settings: Settings) -> int:
    """Return the bytes that the caches of a call need per token of a row."""
    layers, heads, width = model.cache_shape  # type: ignore[attr-defined]
    return 2 * layers * heads * width * model.head.weight.element_size() * (1 if settings.guidance == 1 else 2)


class RowContext(NamedTuple):
    """What the host knows of a row of a pool."""

    row: int  # its index in the pool
    start: int  # the window position at which its block begins
    running: bool  # whether it is not complete
    name: int  # of its context
    parent: int  # the name of its context in the previous block
    has_states: bool  # whether the forward that computes the context also gives the states of the row
    here: bool  # whether this rank runs it


Target = tuple[int, int, int, int, int]  # a context to compute: prompt, row, slot, blocks so far, blocks in all


class Shelf:
    """What forwards left behind, in numbered slots: keys and values, and the states and features of the window."""

    def __init__(self, model: Model) -> None:
        weight, (layers, heads, width) = model.head.weight, model.cache_shape  # type: ignore[attr-defined]
        self.width = weight.shape[1]
        self.kv = weight.new_zeros(layers, 2, 0, 0, heads, width)  # see `Store.kv`
        self.edges = weight.new_zeros(0, self.width)  # [slots, D], see `Hidden.edge`
        both = getattr(model, "features_before_norm", False)  # otherwise the features are the states
        self.rows = weight.new_zeros(0, 0, self.width * (1 + both))  # [slots, L, D or 2 D] states, then features

    def grow(self, prompts: int, slots: int, columns: int, length: int = 0) -> None:
        """Make room for this many slots, columns of keys and window positions, which this many prompts need."""
        self.kv = _grown(self.kv, prompts, {2: slots, 3: columns})
        self.edges = _grown(self.edges, prompts, {0: slots})
        self.rows = _grown(self.rows, prompts, {0: slots, 1: length})

    def copy(self, old: Tensor, new: Tensor) -> None:
        """Copy what the slots old [n] have into the slots new [n]."""
        self.rows[new], self.edges[new] = self.rows[old], self.edges[old]
        for layer in self.kv:  # one layer at a time, because a copy of all layers needs much memory
            layer[:, new] = layer[:, old]

    def put(self, slot: Tensor, hidden: Hidden, column: Tensor, place: Tensor) -> None:
        """Store the keys and values of a forward in slot [R] at column [R, S], and its states and features at window
        positions place [R, S]. Negative ones are left out."""
        row, inner = (column >= 0).nonzero(as_tuple=True)
        at = slot[row], column[row, inner]
        for stored, pair in zip(self.kv, hidden.kept or (), strict=True):
            for half, values in zip(stored, pair, strict=True):
                half[at] = values[row, inner]
        row, inner = (place >= 0).nonzero(as_tuple=True)
        self.rows[slot[row], place[row, inner]] = _joined(hidden)[row, inner]
        if hidden.edge is not None:
            self.edges[slot] = hidden.edge


class Cache:
    """The contexts of the rows of a batch of prompts. The subclasses say what a context is and how it is computed."""

    _names: Callable[..., tuple[Tensor, ...]]  # (pool, start) -> name, parent and has_states [P, N] of `RowContext`
    _cost: Callable[..., tuple[int, list[int], int]]  # forwards of a prompt and of each new context, their positions
    _compute: Callable[..., None]  # (pool, start, targets) -> None
    _context: Callable[..., Context]  # (prompt, slot, first) [R] -> what a forward from position first on reads

    def __init__(self, model: Model, prompts: Prompts, settings: Settings, contexts: int, body: Any) -> None:
        """contexts: the most contexts of a prompt that are needed at a time."""
        self.model, self.body, self.contexts = model, body, contexts
        self.block, self.limit = int(settings.block_length or 0), settings.max_tokens_per_forward
        self.kept = min(self.limit, KEPT_BYTES // bytes_per_token(model, settings))  # tokens of a forward that is kept
        self.shifted = getattr(model, "shifted", False)  # only shifted models need edges
        self.grid = self.block if settings.cache == "exact" else 1  # forwards begin at multiples of this number
        self.most = 1 << 40 if settings.cache == "prefix" else self.block  # the most positions per row of a forward
        self.shelf = Shelf(model)
        self.slots: list[dict[int, int | None]] = []  # of each prompt's contexts; None: only another rank has it
        self.join(prompts)

    def join(self, prompts: Prompts) -> None:
        """Make room for more prompts. `prompts` are those of this cache, maybe with more padding, then the new ones."""
        self._describe(prompts)
        total, length = prompts.window.shape
        self.slots += [{} for _ in range(total - len(self.slots))]
        self.shelf.grow(total, total * self.contexts, self.columns, length)

    def part(self, index: Tensor, prompts: Prompts) -> Cache:
        """Return a cache that continues with these prompts only."""
        cache = copy(self)
        cache.slots = [self.slots[p] for p in index.tolist()]
        cache._describe(prompts)
        return cache

    def context_names(self, pool: Pool, start: Tensor) -> Tensor:
        """Return the names [P, N] of the contexts of the rows of a pool."""
        return self._names(pool, start)[0]

    def run(
        self, pool: Pool, start: Tensor, chosen: Tensor, running: Tensor, here: Tensor | None = None
    ) -> tuple[Hidden, Tensor]:
        """Return states and features [R, L, D] of R rows, and the cost of the step. (p, i) = chosen[r] is a row that
        this rank runs. Only positions of the block and those before it have a meaning.

        start [P]: the window position at which the block of each prompt begins.
        running [P, N] bool: the rows that are not complete, whose contexts are kept.
        here [P, N] bool: the rows that this rank runs, now or when their states change (None: all).
        cost [4, P], as if one process ran all rows of a prompt: how many rows went through the body to compute
        contexts, how many positions these rows had, how many rows these would have been if equal rows ran apart, and
        how many positions a row has that runs with its context.
        """
        table, length = self._table(pool, start, running, here), pool.tokens.shape[2]
        rows = [(p, table[p][i]) for p, i in chosen.tolist()]
        wanted: list[dict[int, RowContext]] = []
        for seen, slots in zip(table, self.slots, strict=True):
            kept = (row for row in seen if row.running and (row.here or slots.get(row.name) is not None))
            wanted.append({row.name: row for row in kept})
        for p, row in rows:
            wanted[p].setdefault(row.name, row)
        costs = self._compute_missing(pool, start, table, wanted)
        cost = torch.tensor(costs, device=start.device)  # before the forward, because the host waits for the copy
        facts = [(self.slots[p][row.name], int(row.has_states)) for p, row in rows]
        slot, has_states = torch.tensor(facts, device=start.device).view(-1, 2).long().unbind(1)
        # One more position, in which forwards write what is outside the window.
        gathered = torch.nn.functional.pad(self.shelf.rows[slot, :length], (0, 0, 0, 1))
        behind = torch.arange(length + 1, device=start.device) >= start[chosen[:, :1]]
        gathered.masked_fill_((behind & (has_states == 0)[:, None])[..., None], 0)
        run, width = [r for r, (_, row) in enumerate(rows) if not row.has_states], max(costs[3])
        for at in torch.tensor(run, device=start.device).split(max(1, self.limit // width)) if run else ():
            prompt, row = chosen[at].unbind(1)
            context = self._context(prompt, slot[at], self._first(self.before[prompt] + start[prompt]))
            tokens, own, place = self._segment(pool, prompt, row, context.first, width)
            target = torch.where((place >= 0) & own, place, length)
            gathered[at[:, None], target] = _joined(self.body(tokens, own, context))
        states, *features = gathered[:, :length].split(self.shelf.width, -1)  # the features may be the states
        return Hidden(states, *(features or [states])), cost

    def _describe(self, prompts: Prompts) -> None:
        """Find out the lengths of these prompts."""
        self.prompts = prompts
        self.padding = (~prompts.attention_mask).sum(-1)  # [P]
        self.before = prompts.window[:, 0] - self.padding  # [P] the number of tokens of each prompt
        self.end = prompts.positions.amax(-1) + 1  # [P] the number of tokens of a row
        self.aligned = self._first(self.before)  # [P] the number of tokens before the first block
        self.columns = prompts.tokens.shape[1]  # how many positions the keys and values in a slot have
        facts = torch.stack([self.before, self.aligned, self.end], -1)
        self.lengths: list[list[int]] = facts.tolist()  # the same for the host

    def _first(self, place: Any) -> Any:
        """Return the position in the row at which a forward begins, given where in the row the block begins."""
        return place // self.grid * self.grid

    def _table(self, pool: Pool, start: Tensor, running: Tensor, here: Tensor | None) -> list[list[RowContext]]:
        """Return what the host knows of the rows [P][N]. This method waits for the device."""
        here = torch.ones_like(running) if here is None else here
        facts = torch.stack([start[:, None].expand_as(running), running, *self._names(pool, start), here], -1)
        return [[RowContext(i, *row) for i, row in enumerate(rows)] for rows in facts.tolist()]

    def _hashes(self, pool: Pool, unread: Tensor) -> Tensor:
        """Return hashes [P, E, N] of rows with masks in place of what is unread [P, E, L]."""
        tokens = pool.tokens[:, None].masked_fill(unread[:, :, None], self.model.mask_id)
        return hash_tokens(tokens, pool.positions[:, None, None])

    def _compute_missing(
        self, pool: Pool, start: Tensor, table: list[list[RowContext]], wanted: list[dict[int, RowContext]]
    ) -> list[list[int]]:
        """Compute the contexts that are wanted and have no slot, and return the cost of the step. If a prompt has new
        contexts, it loses those that no row needs any more. What another rank has is not new, and not counted again."""
        costs: list[tuple[int, ...]] = []
        targets: list[Target] = []
        copies: list[tuple[int, int]] = []
        free = [*set(range(len(self.shelf.edges))).difference(*(own.values() for own in self.slots))]
        for p, (rows, needed) in enumerate(zip(table, wanted, strict=True)):
            slots, running = self.slots[p], [row for row in rows if row.running]
            before, aligned, end = self.lengths[p]
            first = self._first(before + rows[0].start)
            blocks, width = (first - aligned) // self.block, min(self.most, end - first)
            new = {row.name for row in running} - slots.keys()
            equal = [[row for row in running if row.name == name] for name in new]
            reads, forwards, tokens = self._cost(p, equal, blocks, width)
            apart = sum(count * len(same) for count, same in zip(forwards, equal, strict=True))
            costs.append((reads + sum(forwards), tokens, reads + apart, width))
            if new or any(slots.get(name) is None for name in needed):
                kept, copied, missing = self._place(p, needed, blocks, free)
                self.slots[p] = dict.fromkeys([row.name for row in running] if new else slots) | kept
                targets, copies = targets + missing, copies + copied
        if copies:
            self.shelf.copy(*torch.tensor(copies, device=start.device).unbind(1))
        if targets:
            self._compute(pool, start, targets)
        return [list(numbers) for numbers in zip(*costs, strict=True)]

    def _place(
        self, p: int, needed: dict[int, RowContext], blocks: int, free: list[int]
    ) -> tuple[dict[int, int], list[tuple[int, int]], list[Target]]:
        """Return slots for the contexts that a prompt needs, copies of slots to make, and what is to be computed."""
        targets, copies = [], []
        own = {name: slot for name, slot in self.slots[p].items() if slot is not None}
        kept = {name: own.pop(name) for name in needed if name in own}
        missing = {name: row for name, row in needed.items() if name not in kept}
        # The first child of a context takes over its slot, unless the context is still needed. Others copy it.
        source: dict[int, int | None] = {name: (own | kept).get(row.parent) for name, row in missing.items()}
        heirs = {own.pop(row.parent): name for name, row in missing.items() if row.parent in own}
        free += own.values()
        for name, row in missing.items():
            parent = source[name]
            if parent is not None and heirs.get(parent) == name:
                kept[name] = parent
            else:
                kept[name] = free.pop()
                copies += [] if parent is None else [(parent, kept[name])]
            targets.append((p, row.row, kept[name], 0 if parent is None else blocks - 1, blocks))
        return kept, copies, targets

    def _segment(self, pool: Pool, prompt: Tensor, row: Tensor, first: Any, width: int) -> tuple[Tensor, ...]:
        """Return `width` tokens [R, S] of each row from the position first [R] on, which of them exist, and their
        window positions, which are negative for tokens of the prompt."""
        place = (first - self.before[prompt])[:, None] + torch.arange(width, device=prompt.device)
        given, last = self.prompts.tokens[prompt], (self.end - self.before)[prompt, None] - 1
        column = (self.prompts.window[:, :1][prompt] + place).clamp(0, given.shape[1] - 1)
        answers = pool.tokens[prompt, row].gather(1, place.clamp(0, pool.tokens.shape[2] - 1))
        return torch.where(place < 0, given.gather(1, column), answers), place <= last, place


class ExactCache(Cache):
    """Contexts of whole blocks. The prompts have a shelf of their own, with one slot for all prompts that are equal."""

    def __init__(self, model: Model, *rest: Any) -> None:
        self.given = Shelf(model)
        self.given_slots: dict[tuple[int, ...], int] = {}  # by the tokens before the first block
        super().__init__(model, *rest)

    def _describe(self, prompts: Prompts) -> None:
        super()._describe(prompts)
        self.columns = max(self._first(end - 1) - aligned for _, aligned, end in self.lengths)  # no last blocks
        rows = zip(prompts.tokens.tolist(), self.padding.tolist(), self.lengths, strict=True)
        self.tokens = [tuple(row[padding:][:aligned]) for row, padding, (_, aligned, _) in rows]
        new = {tokens: p for p, tokens in enumerate(self.tokens) if tokens and tokens not in self.given_slots}
        self.given_slots = {tokens: self.given_slots[tokens] for tokens in self.given_slots.keys() & set(self.tokens)}
        if new:
            self._read_prompts(new)
        self.given_slot = torch.tensor([self.given_slots.get(x, 0) for x in self.tokens], device=self.end.device)  # [P]

    def _read_prompts(self, new: dict[tuple[int, ...], int]) -> None:
        """Run the whole blocks of prompts, and store their keys and values. `new` has the indices of the prompts."""
        longest, device = max(map(len, new)), self.end.device
        self.given.grow(len(self.tokens), len(self.given_slots) + len(new), longest)
        free = set(range(len(self.given.edges))).difference(self.given_slots.values())
        self.given_slots |= zip(new, free, strict=False)
        place, padded = torch.arange(longest, device=device), min(map(len, new)) < longest
        numbers = torch.tensor([(p, self.given_slots[tokens]) for tokens, p in new.items()], device=device)
        for some in numbers.split(max(1, self.kept // longest)):
            # The rows have the aligned prompts, padded on the left to the longest of them.
            part, slot = some.unbind(1)
            column = place - (longest - self.aligned[part, None])
            tokens = self.prompts.tokens[part].gather(1, (self.padding[part, None] + column).clamp_min(0))
            tokens = tokens.masked_fill(column < 0, self.model.mask_id)
            hidden = self.body(tokens, column >= 0 if padded else None, Context(keep=True))
            self.given.put(slot, hidden, column, torch.full_like(column, -1))

    def _names(self, pool: Pool, start: Tensor) -> tuple[Tensor, ...]:
        before = (self._first(self.before + start) - self.block - self.before).clamp_min(0)
        place = torch.arange(pool.tokens.shape[2], device=start.device)
        edges = torch.stack([start, before], -1)[..., None]
        name, parent = (self._hashes(pool, place >= edges) + edges).unbind(1)
        return name, parent, torch.zeros_like(name)

    def _cost(self, prompt: int, new: list[list[RowContext]], blocks: int, width: int) -> tuple[int, list[int], int]:
        slots, aligned = self.slots[prompt], self.lengths[prompt][1]
        reads = int(bool(new) and not slots and aligned > 0)
        forwards = [min(1, blocks) if rows[0].parent in slots else blocks for rows in new]
        return reads, forwards, reads * aligned + sum(forwards) * self.block

    def _compute(self, pool: Pool, start: Tensor, targets: list[Target]) -> None:
        """Run the finished blocks of rows, one block after the other, and store their keys, values and states."""
        while targets := [target for target in targets if target[3] < target[4]]:
            for some in torch.tensor(targets, device=start.device).split(max(1, self.kept // self.block)):
                prompt, row, slot, done, _ = some.unbind(1)
                first = self.aligned[prompt] + done * self.block
                tokens, _, place = self._segment(pool, prompt, row, first, self.block)
                hidden = self.body(tokens, None, self._context(prompt, slot, first)._replace(keep=True))
                column = place + (self.before - self.aligned)[prompt, None]
                self.shelf.put(slot, hidden, column, place)
            targets = [(p, i, slot, done + 1, blocks) for p, i, slot, done, blocks in targets]

    def _context(self, prompt: Tensor, slot: Tensor, first: Tensor) -> Context:
        aligned, edge = self.aligned[prompt], self.shelf.edges[slot] if self.shifted else None
        stores: tuple[Store, ...] = (Store(self.shelf.kv, slot, first - aligned),)
        if self.given_slots:
            given = self.given_slot[prompt]
            stores = Store(self.given.kv, given, aligned), *stores
            if edge is not None:
                edge = torch.where((first > aligned)[:, None], edge, self.given.edges[given])
        return Context(first, stores, edge)


class ApproximateCache(Cache):
    """Contexts of forwards of whole rows with masks in the block. `settings.cache` is "prefix" or "dual"."""

    def _inside(self, pool: Pool, start: Tensor) -> Tensor:
        """Return which window positions [P, L] are in the block."""
        place = torch.arange(pool.tokens.shape[2], device=start.device)
        return (place >= start[:, None]) & (place < start[:, None] + self.block)

    def _names(self, pool: Pool, start: Tensor) -> tuple[Tensor, ...]:
        row_hash = self._hashes(pool, self._inside(pool, start)[:, None])[:, 0]
        name, has_states = row_hash + start[:, None], row_hash == pool.row_hash
        return name, name, has_states  # no context has another one as its parent

    def _cost(self, prompt: int, new: list[list[RowContext]], blocks: int, width: int) -> tuple[int, list[int], int]:
        # A row whose states come from the forward of its context already counts as a row that runs with the context.
        forwards = [int(not any(row.has_states for row in rows)) for rows in new]
        return 0, forwards, len(new) * self.lengths[prompt][2] - (len(new) - sum(forwards)) * width

    def _compute(self, pool: Pool, start: Tensor, targets: list[Target]) -> None:
        """Run whole rows with masks in the block, and store their keys, values and states."""
        size, inside = self.prompts.tokens.shape[1], self._inside(pool, start)
        padded = any(end < size for _, _, end in self.lengths)
        for some in torch.tensor(targets, device=start.device).split(max(1, self.kept // size)):
            prompt, row, slot, *_ = some.unbind(1)
            batch, answers = self.prompts.take(prompt), pool.tokens[prompt, row]
            tokens = batch.fill(answers.masked_fill(inside[prompt], self.model.mask_id)[:, None])[:, 0]
            hidden = self.body(tokens, batch.attention_mask if padded else None, Context(keep=True))
            column = torch.arange(size, device=slot.device) - self.padding[prompt, None]
            place = torch.where(column < self.before[prompt, None], -1, column - self.before[prompt, None])
            self.shelf.put(slot, hidden, column, place)

    def _context(self, prompt: Tensor, slot: Tensor, first: Tensor) -> Context:
        hole = None if self.most > self.block else torch.stack([first, first + self.block], 1)
        length = first if hole is None else self.end[prompt]
        edge = self.shelf.rows[slot, first - self.before[prompt], : self.shelf.width] if self.shifted else None
        return Context(first, (Store(self.shelf.kv, slot, length, hole),), edge)


def _joined(hidden: Hidden) -> Tensor:
    return hidden.states if hidden.features is hidden.states else torch.cat(hidden[:2], -1)


def _grown(old: Tensor, prompts: int, sizes: dict[int, int]) -> Tensor:
    """Return a tensor with the values of `old` and at least these sizes, by dimension. Raise an error if there is no
    memory for what this many prompts need."""
    shape = [max(size, sizes.get(dimension, 0)) for dimension, size in enumerate(old.shape)]
    if shape == list(old.shape):
        return old
    try:
        new = old.new_zeros(shape)
    except torch.OutOfMemoryError as error:
        if prompts > 1:  # `jobs` tries again with fewer prompts
            raise
        fact = f"needs {math.prod(shape) * old.element_size() / 2**30:.1f} GiB, which are not free on {old.device}"
        raise D5P4Error(f"{fact}; ask for fewer or shorter answers, or use cache='none'", option="cache") from error
    new[tuple(slice(size) for size in old.shape)] = old
    return new
