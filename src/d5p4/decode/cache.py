"""Keeps keys and values of positions that later forwards only read, so that a step runs one block per row.

exact    for block-causal models. A finished block never changes, so its keys and values are exact. The prompt is stored
         once for all rows of all prompts that are equal, and the finished blocks once for all rows that share them
prefix   for models with full attention, an approximation: a whole-row forward is made when a block begins, with masks
         in the block, and the positions before the block keep its keys and values. The rest of the row is run
dual     as prefix, but all positions outside the block keep their keys and values. Only the block is run

A *context* is what a row reads but does not run. A context depends on the prompt and on the tokens before the block
(exact) or outside the block (prefix and dual). Its name is the start of the block and a hash of these tokens. Rows with
the same context share one slot of a store, so inside a block nothing is copied. When a prompt goes to its next block, a
child context takes over the slot of its parent, and only further children of the same parent copy it. Then one forward
of the finished block, in which no token is masked, *commits* the block: its keys, values and states are stored. A
context that is missing (a row of a tree woke up, or a row came from another rank) is computed again, block by block.

Every decode call has its own cache, so a cache never meets changed weights. With guidance, the rows with the prompt and
the rows without it have separate caches.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..options import Settings
from ..rng import hash_tokens
from ..types import Context, Hidden, Model, Store

if TYPE_CHECKING:
    from .pool import Pool
    from .texts import Prompts

CACHE_BYTES = 8 << 30
"""About how many bytes the caches of a decode call may have, if it decodes several prompts. A single prompt may need
more."""

KEPT_BYTES = 1 << 30  # a forward that returns its keys and values has at most this many bytes of them

Body = Callable[[Tensor, Tensor | None, Context | None], Hidden]


def bytes_per_token(model: Model, settings: Settings) -> int:
    """Return the bytes that the caches of a call need per token of a row."""
    layers, heads, width = shape_of(model)
    halves = 1 if settings.guidance == 1 else 2
    return 2 * layers * heads * width * model.head.weight.element_size() * halves


def shape_of(model: Model) -> tuple[int, int, int]:
    """Return the number of layers, the number of key heads per layer and the width of a head."""
    return model.cache_shape  # type: ignore[attr-defined]


class Cost(NamedTuple):
    """What a step costs, per prompt, counted as if one process had all rows of the prompt."""

    rows: list[int]  # rows that go through the body to compute contexts
    tokens: list[int]  # positions of these rows
    nominal: list[int]  # rows that would go through the body to compute contexts if equal rows ran apart
    width: list[int]  # positions of a row that runs with its context


class Target(NamedTuple):
    """A context that is to be computed."""

    prompt: int  # the index of its prompt in the batch
    row: int  # the index of a row of this process that has the context
    slot: int
    done: int  # how many blocks of its slot are already right
    blocks: int  # how many blocks the context has


Name = tuple[int, int]
"""The name of a context of a prompt: the window position at which the block begins, and a hash of tokens."""


class RowContext(NamedTuple):
    """What the host knows of a row of a pool."""

    name: Name  # of its context
    running: bool  # whether the row is not complete
    has_states: bool  # whether the forward that computes the context also gives the states of the row


class Cache:
    """The contexts of the rows of a batch of prompts."""

    def __init__(self, model: Model, prompts: Prompts, settings: Settings, contexts: int, body: Body) -> None:
        """contexts: the most contexts of a prompt that this process needs at a time."""
        self.model, self.exact, self.dual = model, settings.cache == "exact", settings.cache == "dual"
        self.prompts, self.body, self.limit = prompts, body, settings.max_tokens_per_forward
        self.block = int(settings.block_length or 0)
        self.padding = (~prompts.attention_mask).sum(-1)  # [P]
        self.before = prompts.window[:, 0] - self.padding  # [P] the number of tokens of each prompt
        self.aligned = self.before // self.block * self.block if self.exact else torch.zeros_like(self.before)
        self.end = prompts.attention_mask.sum(-1)  # [P] the number of tokens of a row
        facts = torch.stack([self.before, self.aligned, self.end])
        self.lengths: list[list[int]] = facts.T.tolist()  # per prompt: tokens, aligned tokens, tokens of a row
        self.numbers = list(range(len(self.lengths)))  # the numbers of these prompts in the whole call
        self.slots: dict[int, dict[Name, int]] = {}  # by number of the prompt
        self.known: dict[int, set[Name]] = {}  # the contexts of all ranks, by number of the prompt
        self.unread = {number: aligned for number, (_, aligned, _) in enumerate(self.lengths)}  # tokens not yet counted
        total, length = prompts.window.shape
        longest = max(aligned for _, aligned, _ in self.lengths)
        columns = prompts.tokens.shape[1]
        if self.exact:  # the last block is never stored
            columns = max((end - aligned - 1) // self.block * self.block for _, aligned, end in self.lengths)
        weight = model.head.weight
        layers, heads, width = shape_of(model)
        size = 2 * layers * heads * width * (total * contexts * columns + total * longest)
        size += total * contexts * (length + 1) * weight.shape[1]
        _check_memory(size * weight.element_size(), weight.device, total)
        self.free = list(range(total * contexts))
        self.kv = weight.new_empty(layers, 2, total * contexts, columns, heads, width)
        self.states = weight.new_zeros(total * contexts, length, weight.shape[1])
        self.features: Tensor | None = None  # made when a forward first returns features that are not its states
        self.edges = weight.new_zeros(total * contexts, weight.shape[1])
        self.shifted = getattr(model, "shifted", False)  # only shifted models need edges
        self.kept = min(self.limit, KEPT_BYTES // bytes_per_token(model, settings))  # tokens of a forward that is kept
        self.prompt_kv: Tensor | None = None  # [layers, 2, distinct prompts, C, K, d]
        self.prompt_edges: Tensor | None = None
        self.prompt_slot = torch.zeros_like(self.before)  # [P]
        if longest:
            self._read_prompts(longest)

    def part(self, index: Tensor, prompts: Prompts) -> Cache:
        """Return a cache that continues with these prompts only. Slots of other prompts become free."""
        cache, chosen = copy(self), index.tolist()
        cache.prompts = prompts
        for name in ("padding", "before", "aligned", "end", "prompt_slot"):
            setattr(cache, name, getattr(self, name)[index])
        cache.lengths, cache.numbers = [self.lengths[i] for i in chosen], [self.numbers[i] for i in chosen]
        cache.slots = {number: own for number, own in self.slots.items() if number in cache.numbers}
        gone = [slot for number, own in self.slots.items() if number not in cache.slots for slot in own.values()]
        cache.free = self.free + gone
        return cache

    def run(self, pool: Pool, start: Tensor, chosen: Tensor, running: Tensor) -> tuple[Hidden, Tensor]:
        """Return states and features [R, L, D] of R rows, and `Cost` as a tensor [4, P]. (p, i) = chosen[r] is a row
        of this process. Only positions of the block and those before it have a meaning.

        start [P]: the window position at which the block of each prompt begins.
        running [P, N] bool: the rows of all ranks that are not complete, whose contexts are kept.
        """
        beams, names = pool.call.beams, self._hashes(pool, start)
        names = beams.gather(names)
        # The name of an approximate context is the hash of the row with masks in the block.
        has_states = torch.zeros_like(running) if self.exact else names == pool.row_hash
        facts = torch.stack([start[:, None].expand_as(names), names, running.long(), has_states.long()], 2).tolist()
        table = [
            [RowContext((begin, name), bool(alive), bool(done)) for begin, name, alive, done in row] for row in facts
        ]
        cost, count = self._count(pool, start, table), pool.tokens.shape[1]
        table = [row[beams.rank * count : (beams.rank + 1) * count] for row in table]  # the rows of this process
        rows = [(p, i, table[p][i]) for p, i in chosen.tolist()]
        # For each prompt, a row for every context that is needed.
        wanted = [{row.name: i for i, row in enumerate(seen) if row.running} for seen in table]
        for p, i, row in rows:
            wanted[p].setdefault(row.name, i)
        self._ensure(pool, start, wanted)
        slot = torch.tensor([self.slots[self.numbers[p]][row.name] for p, _, row in rows], device=chosen.device).long()
        costs = torch.tensor(cost, device=chosen.device)  # before the forward, because the host waits for the copy
        place = [r for r, (_, _, row) in enumerate(rows) if not row.has_states]
        if len(place) == len(rows) > 0:
            return self._run_rows(pool, chosen, slot, start, max(cost.width)), costs
        hidden = self._stored(slot)
        if place:
            index = torch.tensor(place, device=chosen.device)
            part = self._run_rows(pool, chosen[index], slot[index], start, max(cost.width))
            for values, new in zip(hidden[:2], part[:2], strict=True):
                values[index] = new
        return hidden, costs

    def _hashes(self, pool: Pool, start: Tensor) -> Tensor:
        """Return the hashes [P, n] of the contexts of this process's rows in blocks that begin at start [P]."""
        place = torch.arange(pool.tokens.shape[2], device=start.device)
        inside = place >= start[:, None]
        if not self.exact:
            inside = inside & (place < start[:, None] + self.block)
        return hash_tokens(pool.tokens.masked_fill(inside[:, None], self.model.mask_id), pool.positions[:, None])

    def _blocks(self, prompt: int, start: int) -> int:
        """Return how many blocks are between the aligned end of a prompt and the window position `start`."""
        before, aligned, _ = self.lengths[prompt]
        return (before + start - aligned) // self.block if self.exact else 0

    def _parents(self, pool: Pool, start: Tensor) -> tuple[list[int], Tensor]:
        """Return the start of each prompt's previous block, and the hashes [P, n] of the contexts there."""
        blocks = (self.before + start - self.aligned) // self.block
        previous = (self.aligned + (blocks - 1) * self.block - self.before).clamp_min(0)
        return previous.tolist(), self._hashes(pool, previous)

    def _width(self, prompt: int, start: int) -> int:
        """Return the number of positions per row in a forward of the block that begins at window position `start`."""
        before, aligned, end = self.lengths[prompt]
        first = aligned + self._blocks(prompt, start) * self.block if self.exact else before + start
        return min(self.block, end - first) if self.exact or self.dual else end - first

    def _count(self, pool: Pool, start: Tensor, table: list[list[RowContext]]) -> Cost:
        """Return what a step costs. A context costs forwards only if it is not in `known`, the contexts of the pool at
        the step at which a context was last computed."""
        width = [self._width(p, row[0].name[0]) for p, row in enumerate(table)]
        cost = Cost([0] * len(table), [0] * len(table), [0] * len(table), width)
        current = [{row.name: i for i, row in enumerate(seen) if row.running} for seen in table]
        known = [self.known.get(number, set()) for number in self.numbers]
        if all(names.keys() <= old for names, old in zip(current, known, strict=True)):
            return cost
        begin, hashes = self._parents(pool, start)
        behind = pool.call.beams.gather(hashes).tolist()
        for p, (number, names, old) in enumerate(zip(self.numbers, current, known, strict=True)):
            new = names.keys() - old
            if not new:
                continue
            unread = self.unread.pop(number, 0)
            cost.rows[p], cost.nominal[p] = (int(unread > 0),) * 2
            for name in new:
                equal = [row for row in table[p] if row.running and row.name == name]
                if self.exact:
                    blocks = self._blocks(p, name[0])
                    forwards = min(1, blocks) if (begin[p], behind[p][names[name]]) in old else blocks
                    cost.tokens[p] += forwards * self.block
                else:  # a row that the same forward runs counts as a row that runs with its context
                    has_states = any(row.has_states for row in equal)
                    forwards = 0 if has_states else 1
                    cost.tokens[p] += self.lengths[p][2] - cost.width[p] * has_states
                cost.rows[p] += forwards
                cost.nominal[p] += forwards * len(equal)
            cost.tokens[p] += unread
            self.known[number] = set(names)
        return cost

    def _ensure(self, pool: Pool, start: Tensor, wanted: list[dict[Name, int]]) -> None:
        """Compute the contexts that are wanted and have no slot. The prompts of these contexts lose all contexts that
        are not wanted."""
        targets, copies = [], []
        parents: tuple[list[int], list[list[int]]] | None = None
        for p, names in enumerate(wanted):
            own = self.slots.setdefault(self.numbers[p], {})
            missing = [name for name in names if name not in own]
            if not missing:
                continue
            if parents is None:
                begin, hashes = self._parents(pool, start)
                parents = begin, hashes.tolist()
            kept = {name: slot for name, slot in own.items() if name in names}
            source = {name: own.get((parents[0][p], parents[1][p][names[name]])) for name in missing}
            source = {name: slot if self._blocks(p, name[0]) else None for name, slot in source.items()}
            # The first child of a context takes over its slot, and others copy it. Slots without a child become free.
            heirs = {slot: name for name, slot in reversed(source.items()) if slot is not None}
            self.free += [slot for name, slot in own.items() if name not in kept and slot not in heirs]
            for name in missing:
                parent, blocks = source[name], self._blocks(p, name[0])
                if parent is not None and heirs[parent] == name and parent not in kept.values():
                    kept[name] = parent
                else:
                    kept[name] = self.free.pop()
                    copies += [] if parent is None else [(parent, kept[name])]
                targets.append(Target(p, names[name], kept[name], blocks - 1 if parent is not None else 0, blocks))
            self.slots[self.numbers[p]] = kept
        if copies:
            old, new = torch.tensor(copies, device=start.device).unbind(1)
            for stored in (self.states, self.edges, self.features):
                if stored is not None:
                    stored[new] = stored[old]
            for layer in self.kv:  # one layer at a time, because a copy of all layers needs much memory
                layer[:, new] = layer[:, old]
        while targets := [target for target in targets if target.done < max(target.blocks, not self.exact)]:
            numbers = torch.tensor(targets, device=start.device)
            size = self.block if self.exact else self.prompts.tokens.shape[1]
            for (some,) in _split(numbers, most=self.kept // size):
                self._commit(pool, *some[:, :4].unbind(1)) if self.exact else self._refresh(pool, start, some)
            targets = [target._replace(done=target.done + 1) for target in targets]

    def _read_prompts(self, longest: int) -> None:
        """Run the whole blocks of the prompts, and store their keys and values, once for equal prompts."""
        place = torch.arange(longest, device=self.before.device)
        # The rows have the aligned prompts, padded on the left to the longest of them.
        column = (self.padding + self.aligned)[:, None] - longest + place
        real = place >= longest - self.aligned[:, None]
        tokens = self.prompts.tokens.gather(1, column.clamp_min(0)).masked_fill(~real, self.model.mask_id)
        _, self.prompt_slot = torch.unique(torch.cat([tokens, real.long()], 1), dim=0, return_inverse=True)
        distinct = {slot: p for p, slot in enumerate(self.prompt_slot.tolist())}
        layers, _, _, _, *shape = self.kv.shape
        self.prompt_kv = self.kv.new_empty(layers, 2, len(distinct), longest, *shape)
        self.prompt_edges = self.edges.new_zeros(len(distinct), self.edges.shape[1])
        read = [p for p in distinct.values() if self.lengths[p][1]]
        padded = any(self.lengths[p][1] < longest for p in read)
        for (part,) in _split(torch.tensor(read, device=place.device), most=self.kept // longest):
            hidden = self.body(tokens[part], real[part] if padded else None, Context(keep=True))
            taken = (longest - self.aligned[part])[:, None] + place  # positions are stored without the padding
            _store(self.prompt_kv, self.prompt_slot[part], place.expand_as(taken), hidden, taken)
            if hidden.edge is not None:
                self.prompt_edges[self.prompt_slot[part]] = hidden.edge

    def _commit(self, pool: Pool, prompt: Tensor, row: Tensor, slot: Tensor, done: Tensor) -> None:
        """Run the finished block number `done` of each row, and store its keys, values and states."""
        first = self.aligned[prompt] + done * self.block
        tokens, _, place = self._segment(pool, prompt, row, first, self.block)
        context = Context(first, self._stores(prompt, slot, first), self._edge(prompt, slot, done), keep=True)
        hidden = self.body(tokens, None, context)
        column = (done * self.block)[:, None] + torch.arange(self.block, device=slot.device)
        _store(self.kv, slot, column, hidden)
        self._keep_states(hidden, slot, place)
        if hidden.edge is not None:
            self.edges[slot] = hidden.edge

    def _refresh(self, pool: Pool, start: Tensor, targets: Tensor) -> None:
        """Run whole rows with masks in the block, and store their keys, values and states."""
        prompt, row, slot = targets[:, :3].unbind(1)
        place = torch.arange(pool.tokens.shape[2], device=slot.device).expand(len(slot), -1)
        begin = start[prompt][:, None]
        inside = (place >= begin) & (place < begin + self.block)
        batch = self.prompts.take(prompt)
        tokens = batch.fill(pool.tokens[prompt, row].masked_fill(inside, self.model.mask_id)[:, None])[:, 0]
        padded = any(end < tokens.shape[1] for _, _, end in self.lengths)
        hidden = self.body(tokens, batch.attention_mask if padded else None, Context(keep=True))
        column = torch.arange(tokens.shape[1], device=slot.device).expand_as(tokens)
        _store(self.kv, slot, column, hidden, self.padding[prompt][:, None] + column if padded else None)
        window = batch.window[:, :, None].expand(-1, -1, hidden.states.shape[-1])
        self._keep_states(map_hidden(lambda x: x.gather(1, window), hidden), slot, place)

    def _stored(self, slot: Tensor) -> Hidden:
        """Return the states and features [R, L, D] of the forwards that computed the contexts in slot [R]."""
        states = self.states[slot]
        return Hidden(states, states if self.features is None else self.features[slot])

    def _run_rows(self, pool: Pool, chosen: Tensor, slot: Tensor, start: Tensor, width: int) -> Hidden:
        """Run rows from the start of the block on, and return the states and features [R, L, D] of the window."""
        if len(chosen) * width > self.limit and len(chosen) > 1:
            parts = [
                self._run_rows(pool, some, where, start, width)
                for some, where in _split(chosen, slot, most=self.limit // width)
            ]
            return map_hidden(lambda *x: torch.cat(x), *parts)
        prompt, row = chosen.unbind(1)
        begin = start[prompt]
        first, hole = self.before[prompt] + begin, None
        if self.exact:
            done = (first - self.aligned[prompt]) // self.block
            first, edge = self.aligned[prompt] + done * self.block, self._edge(prompt, slot, done)
        else:
            edge = self.states[slot, begin] if self.shifted else None
            hole = torch.stack([first, first + self.block], 1) if self.dual else None
        tokens, own, place = self._segment(pool, prompt, row, first, width)
        stores = self._stores(prompt, slot, first) if hole is None else (Store(self.kv, slot, self.end[prompt], hole),)
        hidden = self.body(tokens, own, Context(first, stores, edge))
        length = self.states.shape[1]
        target = torch.where((place >= 0) & (place < length), place, length)[..., None]
        behind = (torch.arange(length + 1, device=slot.device) >= begin[:, None])[..., None]

        def whole(stored: Tensor, values: Tensor) -> Tensor:
            rows = torch.nn.functional.pad(stored, (0, 0, 0, 1))
            rows = rows.masked_fill(behind, 0) if self.exact else rows
            return rows.scatter(1, target.expand(values.shape), values)[:, :length]

        return map_hidden(whole, self._stored(slot), hidden)

    def _segment(
        self, pool: Pool, prompt: Tensor, row: Tensor, first: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `width` tokens [R, S] of each row from the position first [R] on, which of them exist, and their
        window positions, which are negative for tokens of the prompt."""
        place = (first - self.before[prompt])[:, None] + torch.arange(width, device=first.device)
        answers, last = pool.tokens[prompt, row], pool.tokens.shape[2] - 1
        tokens = answers.gather(1, place.clamp(0, last))
        if self.exact:  # the first block of an answer may begin with tokens of the prompt
            column = self.prompts.window[:, :1][prompt] + place
            given = self.prompts.tokens[prompt].gather(1, column.clamp(0, self.prompts.tokens.shape[1] - 1))
            tokens = torch.where(place < 0, given, tokens)
        return tokens, place <= last, place

    def _stores(self, prompt: Tensor, slot: Tensor, first: Tensor) -> tuple[Store, ...]:
        """Return the stores of all positions before first [R]."""
        answer = Store(self.kv, slot, first - self.aligned[prompt])
        if self.prompt_kv is None:
            return (answer,)
        return Store(self.prompt_kv, self.prompt_slot[prompt], self.aligned[prompt]), answer

    def _edge(self, prompt: Tensor, slot: Tensor, done: Tensor) -> Tensor | None:
        """Return the edges [R, D] of the last tokens before block number `done`, counted from the aligned prompt."""
        if not self.shifted:
            return None
        edge = self.edges[slot]
        if self.prompt_edges is None:
            return edge
        return torch.where((done > 0)[:, None], edge, self.prompt_edges[self.prompt_slot[prompt]])

    def _keep_states(self, hidden: Hidden, slot: Tensor, place: Tensor) -> None:
        """Store states and features at the window positions place [R, S]. Negative positions are left out."""
        row, column = (place >= 0).nonzero(as_tuple=True)
        at = slot[row], place[row, column]
        self.states[at] = hidden.states[row, column]
        if hidden.features is not hidden.states:
            if self.features is None:
                self.features = torch.zeros_like(self.states, dtype=hidden.features.dtype)
            self.features[at] = hidden.features[row, column]


def _store(kv: Tensor, slot: Tensor, column: Tensor, hidden: Hidden, taken: Tensor | None = None) -> None:
    """Store the keys and values of a forward in slot [R] at column [R, C]. `taken` [R, C]: which columns of the forward
    they are; those past the last one have no meaning."""
    assert hidden.kept is not None
    for layer, pair in enumerate(hidden.kept):
        for half, values in enumerate(pair):
            if taken is not None:
                index = taken.clamp_max(values.shape[1] - 1)[:, :, None, None]
                values = values.gather(1, index.expand(-1, -1, *values.shape[2:]))
            kv[layer, half, slot[:, None], column] = values


def map_hidden(function: Callable[..., Tensor], *hidden: Hidden) -> Hidden:
    """Apply a function to the states and to the features. If these are one tensor, so is the result."""
    states = function(*(x.states for x in hidden))
    if all(x.features is x.states for x in hidden):
        return Hidden(states, states)
    return Hidden(states, function(*(x.features for x in hidden)))


def _split(*tensors: Tensor, most: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(max(1, most)) for x in tensors), strict=True))


def _check_memory(size: int, device: torch.device, prompts: int) -> None:
    """Raise an error if a cache of this many bytes does not fit on the device."""
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    fact = f"needs {size / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on {device}"
    if size > free and prompts > 1:  # `jobs` tries again with fewer prompts
        raise torch.OutOfMemoryError(f"the cache of {prompts} prompts {fact}")
    if size > free:
        raise D5P4Error(f"{fact}; ask for fewer or shorter answers, or use cache='none'", option="cache")
