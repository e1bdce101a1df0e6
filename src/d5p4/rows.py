"""Runs each distinct row through the model once.

Equal rows of a prompt have equal hidden states. So only one of the equal rows goes through the body, and the other
rows use its states. A row that was already in the previous pool (an ancestral child that equals its parent) reuses the
states of that pool. Both savings change the cost, but never the results. Only the hidden states of window positions are
kept.

The rounding of a row may depend on the shape of the forward. With `Prompts.fixed`, all forwards therefore have the same
shape and an attention mask. A forward with too few rows is filled up with copies of a row.

Classifier-free guidance with scale g combines the conditional logits l_c and the unconditional logits l_u. The head is
affine, so l_u + g (l_c - l_u) = head(h_u + g (h_c - h_u)), and guidance can act on the hidden states h. Guidance thus
costs a second pass through the body, but not through the head. g = 1 turns guidance off. LLaDA's own scale is g - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .beams import ALONE, Beams
from .ops.precision import working_dtype
from .ops.ties import first_equal
from .replay import Replay
from .types import Model


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


def rows_of_forward(max_tokens: int, length: int) -> int:
    """Return the largest number of rows of this length in a forward. `Prompts.fixed`: every forward has this many."""
    return max(1, max_tokens // length)


def _needs_mask(prompts: Prompts) -> bool:
    return prompts.fixed or not bool(prompts.attention_mask.all())


class RowRunner:
    """Runs the rows of the pools of a batch of prompts through the body."""

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        max_tokens: int,
        share: bool = True,
        reuse: bool = True,
        beams: Beams = ALONE,
    ) -> None:
        """`share`: whether equal rows run only once. `reuse`: whether the states of a pool are kept for the next pool,
        where a child may equal its parent. `beams`: how rows are spread over ranks. Each rank runs its own rows."""
        self.model, self.max_tokens, self.share, self.reuse, self.beams = model, max_tokens, share, reuse, beams
        recordable = share and not prompts.fixed and prompts.tokens.is_cuda and getattr(model, "recordable", False)
        self.body = Replay(model) if recordable else model.body
        self.prompts, self.masked = prompts, _needs_mask(prompts)
        self._last: tuple[Tensor, WindowHidden] | None = None

    def run(self, answers: Tensor, row_hash: Tensor) -> WindowHidden:
        """Return the hidden states of answers [P, n, L], which are the rows that this rank holds. row_hash [P, N] holds
        the hashes of all rows of the pools. This method waits for the device, because the size of the forward depends
        on the number of distinct rows."""
        own_hash = self.beams.own(row_hash)
        first = first_equal(own_hash)
        stored = self._stored(first)
        owner = stored.nonzero()
        slot = (stored.flatten().cumsum(0) - 1).view_as(first).gather(1, first)
        if self._last is None:
            states, features = self._forward(answers, owner)
        else:
            old_hash, old = self._last
            equal = own_hash[:, :, None] == self.beams.own(old_hash)[:, None, :]
            known = stored & equal.any(-1)
            fresh = stored & ~known
            states, features = self._forward(answers, fresh.nonzero())
            if len(states) < len(owner):
                known_slot = old.slot.gather(1, equal.to(torch.uint8).argmax(-1))[known]
                order = torch.cat([fresh.flatten().nonzero()[:, 0], known.flatten().nonzero()[:, 0]]).argsort()
                states = torch.cat([states, old.states[known_slot]])[order]
                one_tensor = old.features is old.states
                features = states if one_tensor else torch.cat([features, old.features[known_slot]])[order]
        hidden = WindowHidden(states, features, owner, slot, self._fresh(row_hash))
        if self.reuse:
            self._last = (row_hash, hidden)
        return hidden

    def _stored(self, first: Tensor) -> Tensor:
        """Return bool [P, N], True at rows whose hidden states are stored: the first of each set of equal rows."""
        everyone = torch.arange(first.shape[1], device=first.device)
        return first == everyone if self.share else torch.ones_like(first, dtype=torch.bool)

    def _fresh(self, row_hash: Tensor) -> Tensor:
        """Return, for each prompt, how many distinct rows of its pool were not in its previous pool."""
        stored = self._stored(first_equal(row_hash))
        if self._last is not None:
            stored &= ~(row_hash[:, :, None] == self._last[0][:, None, :]).any(-1)
        return stored.sum(-1)

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

    def keep(self, index: Tensor) -> None:
        """Continue with these prompts only."""
        self.prompts = self.prompts.take(index)
        self.masked = _needs_mask(self.prompts)
        if self._last is not None:
            row_hash, old = self._last
            self._last = (row_hash[index], replace(old, slot=old.slot[index]))


def guidance_at(step: int, guidance: float, window: tuple[int, int] | None) -> float:
    """Return the guidance scale of a step. Outside of the window [start, stop) of steps, the scale is 1."""
    inside = window is None or window[0] <= step < window[1]
    return guidance if inside else 1.0


def guide(conditional: Tensor, unconditional: Tensor, g: float) -> Tensor:
    """Apply guidance to the states. The result is at least float32, because g magnifies rounding errors."""
    c, u = (x.to(working_dtype(conditional.dtype)) for x in (conditional, unconditional))
    return u + g * (c - u)
