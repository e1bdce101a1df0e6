"""The pool: the partial answers (candidates) from which each decoding step chooses, for P prompts.

The pool also hides how rows are spread over ranks (`decode.beams`). Its small tensors describe all N rows of a prompt.
Only `tokens`, `logprob` and `revealed` are limited to the n rows that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..ops.ties import first_equal, occurrence
from ..project import Children, distinct_children
from ..rng import hash_tokens, mix
from ..types import Choice
from .beams import Beams, Seats

HELD = ("tokens", "logprob", "revealed")


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return m rows of each prompt, [P, m, ...], given x [P, N, ...]. index [P, m] says which of the N rows."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


def _state_of(name: str, pool: Pool) -> Tensor:
    return pool.state[name]


@dataclass(frozen=True)
class Ends:
    """Which positions of a row are still to be decoded, and where its text ends."""

    mask_id: int
    ids: Tensor | None  # the end-of-text ids, or None if the model has none
    stop: bool  # whether positions behind the end of the text stay masked

    def after(self, tokens: Tensor, appended: Tensor) -> Tensor:
        """Return a bool like tokens [P, ..., L] that is True behind the first end-of-text token after the prompt.

        appended [P] is the number of window positions that follow the prompt. The others are holes, and an end-of-text
        token in a hole ends nothing.
        """
        if self.ids is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        length = tokens.shape[-1]
        behind = torch.arange(length, device=tokens.device) >= length - appended[:, None]
        behind = behind.view(len(behind), *[1] * (tokens.ndim - 2), length)
        end = torch.isin(tokens, self.ids) & behind
        return end.cumsum(-1) > end

    def open(self, tokens: Tensor, appended: Tensor) -> Tensor:
        """Return a bool like `tokens` that is True at masked positions, with `stop` only before the end of the text."""
        masked = tokens == self.mask_id
        return masked & ~self.after(tokens, appended) if self.stop else masked


@dataclass(frozen=True)
class Pool:
    """N candidates for each of P prompts. This process holds the tokens of n of the N candidates."""

    tokens: Tensor  # [P, n, L] the tokens of the held candidates
    logprob: Tensor  # [P, n, L] the log-probability of each token when it was revealed; 0 where masked
    revealed: Tensor  # [P, n, L] the index of the step that revealed each token; -1 where masked
    row_hash: Tensor  # [P, N]
    tie: Tensor  # [P, N] a hash of the lineage (see `Chosen.branch`), which decides between candidates of equal value
    group: Tensor  # [P, N]
    source: Tensor  # [P, N] the index of each row's parent in the previous pool
    positions: Tensor  # [P, L] the window positions, counted from the first real token
    appended: Tensor  # [P] how many window positions follow the prompt
    ends: Ends
    beams: Beams
    state: dict[str, Tensor] = field(default_factory=dict)  # [P, N] values that a method keeps for each row

    @staticmethod
    def start(
        positions: Tensor, appended: Tensor, rows: int, k: int, dtype: torch.dtype, ends: Ends, beams: Beams
    ) -> Pool:
        """Return the first pool, with `rows` masked rows per prompt in k contiguous groups."""
        prompts, length = positions.shape
        tokens = torch.full((prompts, rows // beams.size, length), ends.mask_id, device=positions.device)
        row_hash = hash_tokens(tokens[:, :1], positions[:, None]).expand(prompts, rows)
        place = torch.arange(rows, device=tokens.device).expand(prompts, rows)
        return Pool(
            tokens=tokens,
            logprob=torch.zeros(tokens.shape, dtype=dtype, device=tokens.device),
            revealed=torch.full_like(tokens, -1),
            row_hash=row_hash,
            tie=mix(row_hash, place),
            group=place // (rows // k),
            source=place,
            positions=positions,
            appended=appended,
            ends=ends,
            beams=beams,
        )

    @property
    def size(self) -> int:
        """The number N of rows per prompt."""
        return self.row_hash.shape[1]

    @cached_property
    def opened(self) -> Tensor:
        """Which positions of all rows are open, [P, N, L] bool."""
        return self.beams.gather(self.ends.open(self.tokens, self.appended))

    @cached_property
    def complete(self) -> Tensor:
        """Which rows have no open position, [P, N] bool."""
        return ~self.opened.any(-1)

    def last_masked(self, step: int | None) -> Tensor:
        """Return the positions [P, n, L] that were masked at the last forward of each complete row: those that `step`
        revealed or, if it is None, the last step of each row that revealed a position."""
        return self.revealed == (self.revealed.amax(-1, keepdim=True) if step is None else step)

    def facts(self, block: int) -> Tensor:
        """Return the numbers of `schedule.Facts` for every prompt, [P, 3]."""
        length = self.tokens.shape[-1]
        place = torch.arange(length, device=self.tokens.device)
        first = torch.where(self.opened.any(1), place, length).amin(-1)
        start = (first // block * block)[:, None]
        inside = ((place >= start) & (place < start + block))[:, None]
        masked = (self.opened & inside).sum(-1).amax(-1)
        return torch.stack([first, masked, self.opened.sum((1, 2))], -1)

    @property
    def repeats(self) -> Tensor:
        """Which rows [P, N] are equal to an earlier row of their pool."""
        return first_equal(self.row_hash) != torch.arange(self.size, device=self.row_hash.device)

    def keep(self, prompts: Tensor) -> Pool:
        """Return a pool of only those prompts whose indices are in `prompts`."""
        return self._each(lambda x, _: x[prompts])

    @staticmethod
    def join(pools: list[Pool], prompts: list[Tensor]) -> Pool:
        """Return one pool of the prompts of several pools. prompts[i] are the places of the prompts of pools[i]."""
        order = torch.cat(prompts).argsort()
        return pools[0]._each(lambda _, value: torch.cat([value(pool) for pool in pools])[order])

    def _each(self, change: Callable[[Tensor, Callable[[Pool], Tensor]], Tensor]) -> Pool:
        """Return a pool in which `change(x, value)` replaces every tensor x. value(pool) is that tensor of a pool."""
        names = [f.name for f in fields(self) if f.name not in ("ends", "beams", "state")]
        tensors: dict[str, Any] = {name: change(getattr(self, name), attrgetter(name)) for name in names}
        state = {name: change(x, partial(_state_of, name)) for name, x in self.state.items()}
        return replace(self, **tensors, state=state)

    def prune(self, kept: Tensor) -> Pool:
        """Return a pool of the rows kept [P, K], each in a group of its own."""
        everybody = self.whole()
        shared: dict[str, Any] = {name: pick(getattr(everybody, name), kept) for name in ("row_hash", "tie", "source")}
        own: dict[str, Any] = {name: self.beams.own(pick(getattr(everybody, name), kept)).contiguous() for name in HELD}
        state = {name: pick(values, kept) for name, values in self.state.items()}
        group = torch.arange(kept.shape[1], device=kept.device).expand(kept.shape)
        return replace(self, **shared, **own, group=group, state=state)

    def whole(self) -> Pool:
        """Return the pool with the tokens of all N rows in this process."""
        tensors: dict[str, Any] = {name: self.beams.gather(getattr(self, name)) for name in HELD}
        return replace(self, **tensors)

    def choose(self, choice: Choice) -> Chosen:
        """Return the parents that a selector chose from this pool."""
        seats = self.beams.seats(choice.parents, self.size)
        row_hash, tie, group = (pick(x, choice.parents) for x in (self.row_hash, self.tie, self.group))
        tokens, logprob, revealed = (seats.here(getattr(self, name)) for name in HELD)
        number = occurrence(row_hash, tie)
        return Chosen(self, choice.parents, seats, row_hash, tie, group, number, tokens, logprob, revealed)


@dataclass(frozen=True)
class Chosen:
    """m chosen parents of each prompt. This process holds the tokens of q parents for each of G prompts (`beams`)."""

    pool: Pool
    parents: Tensor  # [P, m] indices into the pool
    seats: Seats
    row_hash: Tensor  # [P, m]
    tie: Tensor  # [P, m]
    group: Tensor  # [P, m]
    number: Tensor  # [P, m] the number of each parent among equal parents
    tokens: Tensor  # [G, q, L]
    logprob: Tensor  # [G, q, L]
    revealed: Tensor  # [G, q, L]

    def stream(self, seed: Tensor, key: Tensor, step: int) -> Tensor:
        """Return the random stream [G, q] of each parent at this step."""
        return self.seats.of(mix(seed[:, None], key[:, None], step, self.row_hash, self.number))

    def open(self) -> Tensor:
        """Return which positions of the parents are open, [G, q, L] bool."""
        return self.pool.ends.open(self.tokens, self.pool.appended[self.seats.prompt])

    def distinct(self, children: Children, keep: int) -> Children:
        """Keep each parent's first `keep` drawn children that no parent of the prompt has kept yet."""
        seats, beams = self.seats, self.pool.beams
        positions = self.pool.positions[seats.prompt]
        names = beams.everyone(hash_tokens(children.tokens, positions[:, None, None]), seats)
        kept = seats.of(distinct_children(names, self.tie, keep))
        index = kept[..., None].expand(*kept.shape, children.tokens.shape[-1])
        return children._replace(tokens=children.tokens.gather(2, index), logprob=children.logprob.gather(2, index))

    def finish(self, children: Children) -> Children:
        """Let a parent whose first child is complete have only this child: the child's copies fill its other places.

        The copies are equal rows, so that they cost no forward, and every selector stays valid.
        """
        ends, appended = self.pool.ends, self.pool.appended[self.seats.prompt]
        done = ~ends.open(children.tokens[:, :, :1], appended).any(-1, keepdim=True)
        tokens, logprob = (torch.where(done, x[:, :, :1], x) for x in (children.tokens, children.logprob))
        return children._replace(tokens=tokens, logprob=logprob)

    def branch(self, children: Children, step: int, regroup: bool) -> Pool:
        """Return the next pool, which consists of the children [G, q, C, L] that the ranks have drawn.

        With `regroup`, the children of each parent form a group. Otherwise a child stays in the group of its parent.
        """
        beams, device = self.pool.beams, children.tokens.device
        prompts, parents = self.row_hash.shape
        count = children.tokens.shape[2]
        new = children.tokens != self.tokens[:, :, None]
        tokens, logprob, revealed = (
            beams.settle(rows, self.seats).flatten(1, 2)
            for rows in (
                children.tokens,
                torch.where(new, children.logprob, self.logprob[:, :, None]),
                torch.where(new, step, self.revealed[:, :, None]),
            )
        )
        row_hash = beams.gather(hash_tokens(tokens, self.pool.positions[:, None]))
        mother = torch.arange(parents, device=device).repeat_interleave(count).expand(prompts, -1)
        place = torch.arange(count, device=device).repeat(parents)
        return replace(
            self.pool,
            tokens=tokens,
            logprob=logprob,
            revealed=revealed,
            row_hash=row_hash,
            tie=mix(row_hash, self.row_hash.gather(1, mother), self.number.gather(1, mother), place),
            group=mother if regroup else self.group.gather(1, mother),
            source=self.parents.gather(1, mother),
            state={name: pick(values, self.parents).gather(1, mother) for name, values in self.pool.state.items()},
        )
