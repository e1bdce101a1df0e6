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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..ops.precision import working_dtype
from ..ops.ties import first_equal
from ..types import Model
from .pool import Pool
from .replay import Replay


@dataclass(frozen=True)
class Prompts:
    """P prompts that are ready to decode: left-padded rows with the mask id at their window positions."""

    tokens: Tensor  # [P, T]
    attention_mask: Tensor  # [P, T] bool
    window: Tensor  # [P, L] the positions in the row that are to be decoded, ascending
    appended: Tensor  # [P] how many window positions follow the prompt; the others are holes in the prompt
    fixed: bool = field(default=False, kw_only=True)  # whether all forwards have the same number of rows

    @property
    def positions(self) -> Tensor:
        """The window positions [P, L], counted from the first real token."""
        padding = (~self.attention_mask).sum(-1, keepdim=True)
        return self.window - padding

    def fill(self, answers: Tensor) -> Tensor:
        """Put answers [P, N, L] into the window positions of the prompts, and return the rows [P, N, T]."""
        shape = (*answers.shape[:2], self.tokens.shape[1])
        window = self.window[:, None].expand(answers.shape)
        return self.tokens[:, None].expand(shape).scatter(2, window, answers)

    def without_prompt(self, mask_id: int) -> Prompts:
        """Return the unconditional rows for guidance, in which a mask replaces every token that is not padding."""
        return replace(self, tokens=self.tokens.masked_fill(self.attention_mask, mask_id))

    def take(self, index: Tensor) -> Prompts:
        tokens, attention_mask, window, appended = self.tokens, self.attention_mask, self.window, self.appended
        return Prompts(tokens[index], attention_mask[index], window[index], appended[index], fixed=self.fixed)


@dataclass(frozen=True)
class WindowHidden:
    """The hidden states at the window positions of the U distinct rows of all pools."""

    states: Tensor  # [U, L, D]
    features: Tensor  # [U, L, D]
    owner: Tensor  # [U, 2] for each distinct row: the prompt's index, and the row's index among this rank's rows
    slot: Tensor  # [P, n] the index, among the U distinct rows, of each row that this rank holds
    fresh: Tensor  # [P] how many rows of the whole pool went through the model
    passes: Tensor | int = 1  # [P] how often a row goes through the model: twice with guidance


def rows_of_forward(max_tokens: int, length: int) -> int:
    """Return the largest number of rows of this length in a forward. `Prompts.fixed`: every forward has this many."""
    return max(1, max_tokens // length)


def _needs_mask(prompts: Prompts) -> bool:
    return prompts.fixed or not bool(prompts.attention_mask.all())


class RowRunner:
    """Runs the rows of the pools of a batch of prompts through the body."""

    def __init__(self, model: Model, prompts: Prompts, max_tokens: int, share: bool = True, reuse: bool = True) -> None:
        """`share`: whether equal rows run only once. `reuse`: whether a row of the previous pool may come again."""
        self.model, self.max_tokens, self.share, self.reuse = model, max_tokens, share, reuse
        recordable = share and not prompts.fixed and prompts.tokens.is_cuda and getattr(model, "recordable", False)
        self.body = Replay(model) if recordable else model.body
        self.prompts, self.masked = prompts, _needs_mask(prompts)
        self._last: tuple[Tensor, WindowHidden, Tensor | None] | None = None

    def run(self, pool: Pool, active: Tensor | None = None, complete: Tensor | None = None) -> WindowHidden:
        """Return the hidden states of the rows that this rank holds. This method waits for the device, because the
        size of the forward depends on the number of distinct rows.

        active [P] bool: the prompts to run (default: all). complete [P, N] bool: the rows that are not run, because
        they keep the states of their last forward (default: none).
        """
        beams = pool.beams
        if self._last is None:
            complete = None
        elif complete is not None and self._last[2] is not None:
            complete = complete & self._last[2][:, None]
        own_hash = beams.own(pool.row_hash)
        first = first_equal(own_hash)
        own_complete = None if complete is None else beams.own(complete)
        stored = self._stored(first, own_complete, active)
        slot = (stored.flatten().cumsum(0) - 1).view_as(first)
        shared = slot.gather(1, first)
        slot = shared if self.share else slot if own_complete is None else torch.where(own_complete, shared, slot)
        known = self._known(pool, own_hash, stored, complete)
        if known is None:
            owner = stored.nonzero()
            states, features = self._forward(pool.tokens, owner)
        else:
            states, features, owner = self._join(pool, stored, *known)
        hidden = WindowHidden(states, features, owner, slot, self._fresh(pool.row_hash, complete, active))
        self._last = (pool.row_hash, hidden, active)
        return hidden

    def final(self, pool: Pool) -> WindowHidden:
        """Return the states of complete rows at their last forward: those of their parents. Equal rows are not shared,
        because their parents may differ."""
        assert self._last is not None
        _, old, _ = self._last
        everyone = torch.ones_like(pool.row_hash, dtype=torch.bool)
        states, features, slot = pool.beams.fetch(old.states, old.features, old.slot, pool.source, everyone)
        index = slot.flatten()
        one_tensor, states = features is states, states[index]
        features = states if one_tensor else features[index]
        owner = torch.ones_like(slot, dtype=torch.bool).nonzero()
        nothing = torch.zeros(len(slot), dtype=torch.int64, device=slot.device)
        return WindowHidden(
            states, features, owner, torch.arange(len(index), device=slot.device).view_as(slot), nothing
        )

    def _stored(self, first: Tensor, complete: Tensor | None, active: Tensor | None) -> Tensor:
        """Return bool [P, N], True at rows whose hidden states are stored: the first of each set of equal rows."""
        stored = first == torch.arange(first.shape[1], device=first.device)
        if not self.share:
            stored = torch.ones_like(stored) if complete is None else stored | ~complete
        return stored if active is None else stored & active[:, None]

    def _known(
        self, pool: Pool, own_hash: Tensor, stored: Tensor, complete: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return which stored rows [P, n] need no forward, and the slots [P, n] of their states in the old states and
        features, which come with them. Return None if all rows need a forward."""
        if self._last is None or (complete is None and not (self.reuse and self.share)):
            return None
        old_hash, old, seen = self._last
        beams, known, place = pool.beams, torch.zeros_like(stored), torch.zeros_like(own_hash)
        states, features = old.states, old.features
        if self.reuse and self.share:
            equal = own_hash[:, :, None] == beams.own(old_hash)[:, None, :]
            equal = equal if seen is None else equal & seen[:, None, None]
            known, place = equal.any(-1), old.slot.gather(1, equal.to(torch.uint8).argmax(-1))
        if complete is not None:
            # Equal complete rows of one prompt must have equal states, also if their parents differ or are on different
            # ranks: they take the states of the equal row in the old pool or, without one, of the first one's parent.
            same = pool.row_hash[:, :, None] == old_hash[:, None, :]
            parent = pool.source.gather(1, first_equal(pool.row_hash))
            source = torch.where(same.any(-1), same.to(torch.uint8).argmax(-1), parent)
            states, features, inherited = beams.fetch(states, features, old.slot, source, complete)
            done = beams.own(complete)
            known, place = known | done, torch.where(done, inherited, place)
        return stored & known, place, states, features

    def _join(
        self, pool: Pool, stored: Tensor, known: Tensor, place: Tensor, old_states: Tensor, old_features: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return states and features [U, L, D] and the owners [U, 2] of all stored rows, known and fresh ones."""
        fresh = stored & ~known
        fresh_rows, owner = fresh.nonzero(), stored.nonzero()
        states, features = self._forward(pool.tokens, fresh_rows)
        if len(fresh_rows) < len(owner):
            known_rows = known.nonzero()
            slots = place[known_rows[:, 0], known_rows[:, 1]]
            width = stored.shape[1]
            order = torch.cat([rows[:, 0] * width + rows[:, 1] for rows in (fresh_rows, known_rows)]).argsort()
            one_tensor = old_features is old_states and features is states
            states = torch.cat([states, old_states[slots]])[order]
            features = states if one_tensor else torch.cat([features, old_features[slots]])[order]
        return states, features, owner

    def _fresh(self, row_hash: Tensor, complete: Tensor | None, active: Tensor | None) -> Tensor:
        """Return, for each prompt, how many distinct rows of its pool were not in its previous pool."""
        stored = self._stored(first_equal(row_hash), complete, active)
        if self._last is not None and self.reuse and self.share:
            old_hash, _, seen = self._last
            known = (row_hash[:, :, None] == old_hash[:, None, :]).any(-1)
            stored &= ~(known if seen is None else known & seen[:, None])
        return (stored if complete is None else stored & ~complete).sum(-1)

    def _forward(self, answers: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return states and features [R, L, D] of R rows. Row r holds the answer answers[p, i], (p, i) = chosen[r]."""
        if not len(chosen):
            weight = self.model.head.weight
            nothing = weight.new_zeros(0, answers.shape[2], weight.shape[1])
            return nothing, nothing
        size = rows_of_forward(self.max_tokens, self.prompts.tokens.shape[1])
        states, features = [], []
        for part in chosen.split(size):
            count = len(part)
            if self.prompts.fixed and count < size:
                part = torch.cat([part, part[:1].expand(size - count, 2)])
            prompt, row = part.unbind(1)
            batch = self.prompts.take(prompt)
            tokens = batch.fill(answers[prompt, row][:, None])[:, 0]
            hidden = self.body(tokens, batch.attention_mask if self.masked else None)
            window = batch.window[:count, :, None].expand(-1, -1, hidden.states.shape[-1])
            states.append(hidden.states[:count].gather(1, window))
            same = hidden.features is hidden.states
            features.append(states[-1] if same else hidden.features[:count].gather(1, window))
        joined = torch.cat(states)
        return joined, joined if features[0] is states[0] else torch.cat(features)

    def part(self, index: Tensor) -> RowRunner:
        """Return a runner that continues with these prompts only."""
        runner = copy(self)
        runner.prompts = self.prompts.take(index)
        runner.masked = _needs_mask(runner.prompts)
        if self._last is not None:
            row_hash, old, seen = self._last
            last = row_hash[index], replace(old, slot=old.slot[index]), None if seen is None else seen[index]
            runner._last = last
        return runner


class Rows:
    """Runs rows with and, where a prompt has guidance, without their prompts, and applies guidance to the states."""

    def __init__(self, model: Model, prompts: Prompts, max_tokens: int, share: bool, reuse: bool) -> None:
        self.conditional, self.unconditional = (
            RowRunner(model, rows, max_tokens, share, reuse)
            for rows in (prompts, prompts.without_prompt(model.mask_id))
        )
        self.scales: list[float] = []  # the guidance scale of each prompt at the last step

    def run(self, pool: Pool, scales: Sequence[float], complete: Tensor | None = None) -> WindowHidden:
        """Return the hidden states of a pool. `scales` has the guidance scale of each prompt, 1 for no guidance."""
        self.scales, g = list(scales), max(scales)
        active = None
        if min(scales) < g:  # this tensor is made before the forward, because making it waits for the device
            active = torch.tensor([scale != 1 for scale in scales], device=pool.tokens.device)
        hidden = self.conditional.run(pool, complete=complete)
        if g == 1:
            return hidden
        free = self.unconditional.run(pool, active, complete)
        fresh = hidden.fresh + free.fresh
        if active is None:
            return replace(hidden, states=guide(hidden.states, free.states, g), fresh=fresh, passes=2)
        guided = active[hidden.owner[:, 0]]  # the rows of `free` are these rows, in the same order
        other = free.states[(guided.cumsum(0) - 1).clamp_min(0)]
        states = torch.where(guided[:, None, None], guide(hidden.states, other, g), hidden.states)
        return replace(hidden, states=states, fresh=fresh, passes=1 + active.to(torch.int64))

    def final(self, pool: Pool) -> WindowHidden:
        """Return the hidden states of complete rows at their last forward, with the guidance of the last step."""
        hidden = self.conditional.final(pool)
        if all(scale == 1 for scale in self.scales):
            return hidden
        scale = torch.tensor(self.scales, device=pool.tokens.device)[hidden.owner[:, 0], None, None]
        free = self.unconditional.final(pool)
        states = torch.where(scale != 1, guide(hidden.states, free.states, max(self.scales)), hidden.states)
        return replace(hidden, states=states)

    def part(self, index: Tensor) -> Rows:
        """Return the rows of these prompts only."""
        rows = copy(self)
        rows.conditional, rows.unconditional = self.conditional.part(index), self.unconditional.part(index)
        rows.scales = [self.scales[i] for i in index.tolist()] if self.scales else []
        return rows


def guide(conditional: Tensor, unconditional: Tensor, g: float) -> Tensor:
    """Apply guidance to the states. The result is at least float32, because g magnifies rounding errors."""
    c, u = (x.to(working_dtype(conditional.dtype)) for x in (conditional, unconditional))
    return u + g * (c - u)
