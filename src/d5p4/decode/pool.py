"""The pool: the partial answers (candidates) from which each decoding step chooses, for P prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..constraint import Constraint, Matchers, Vocabulary
from ..errors import D5P4Error
from ..ops.ties import first_equal
from ..options import Settings
from ..rng import SELECT, hash_tokens, mix
from ..types import Head, Model, block_of
from .schedule import Checks

if TYPE_CHECKING:
    from .texts import Prompts

ROWS = ("tokens", "logprob", "revealed", "row_hash", "tie", "group", "source")


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return m rows of each prompt, [P, m, ...], given x [P, N, ...]. index [P, m] says which of the N rows."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))


def joined_rows(values: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """Return the tensors [P, ...] of several groups of prompts as one. Shorter ones are filled up with zeros, and so is
    what a group does not have. sizes: P of each group."""
    known = [x for x in values if x is not None]
    shape = [max(sides) for sides in zip(*(x.shape[1:] for x in known), strict=True)]
    result = known[0].new_zeros(sum(sizes), *shape)
    for x, part in zip(values, result.split(list(sizes)), strict=True):
        if x is not None:
            part[tuple(slice(side) for side in x.shape)] = x
    return result


@dataclass(frozen=True)
class Call:
    """What all prompts of a decode call share."""

    model: Model
    head: Head  # the model's head with the options of the call
    settings: Settings
    end_ids: Tensor  # the end-of-text ids, maybe none
    scorer: Callable[..., Any] | None = None  # for best-of-n
    extra: int = 0  # how many of the last window positions belong to no answer
    matchers: Matchers | None = None  # of the constraint, if there is one
    checks: Checks = field(default_factory=Checks)

    @staticmethod
    def make(model: Model, settings: Settings, scorer: Callable[..., Any] | None = None) -> Call:
        """Return a call with the options of `settings`."""
        matchers = None if settings.form is None else Matchers(Constraint(Vocabulary.of(model), *settings.form))
        head = replace(model.head, fixed=settings.deterministic)
        head = head.ban(model.eos_ids if settings.eos == "never" else ())
        _ = head.drawable  # counted now, because counting later would wait for the device
        end_ids = torch.tensor(model.eos_ids, dtype=torch.int64, device=head.weight.device)
        return Call(model, head, settings, end_ids, scorer, (block_of(model) or 1) - 1, matchers)

    @cached_property
    def early(self) -> bool:
        """Whether rows may be complete before the last step."""
        return self.settings.adaptive or bool(self.settings.stop)

    def ends(self, tokens: Tensor, pool: Pool) -> Tensor:
        """Return a bool like tokens [P, ..., L] that is True at end-of-text tokens after the prompt.

        The window positions before `pool.first` are holes, and an end-of-text token in a hole ends nothing.
        """
        return torch.isin(tokens, self.end_ids) & starting_at(pool.first, tokens)

    def after_end(self, tokens: Tensor, pool: Pool) -> Tensor:
        """Return a bool like `tokens` that is True behind the first end-of-text token after the prompt, and at window
        positions that belong to no answer."""
        ends = self.ends(tokens, pool)
        behind = ends.cumsum(-1) > ends
        return behind if pool.end is None else behind | starting_at(pool.end, tokens)

    def open(self, tokens: Tensor, pool: Pool) -> Tensor:
        """Return a bool like `tokens` that is True at masked positions, with `stop` only before the end of the text.
        Unless all rows reveal the same number of positions, nothing is open once the answer is complete."""
        masked, settings = tokens == self.model.mask_id, self.settings
        if settings.stop:
            ends = self.ends(tokens, pool)
            masked = masked & (ends.cumsum(-1) <= ends)
        if pool.end is not None and self.early:
            masked = masked & (masked & ~starting_at(pool.end, tokens)).any(-1, keepdim=True)
        return masked

    def eligible(self, opened: Tensor, positions: Tensor) -> Tensor:
        """Return which open positions [P, ..., L] the next step may reveal, given positions [P, L]: all, or only the
        first one of a block if the model reveals it before the others (see `types.Model`)."""
        block, place = self.settings.block_length, torch.arange(opened.shape[-1], device=opened.device)
        if block is None or not getattr(self.model, "next_token_first", False):
            return opened
        inner = (positions if block_of(self.model) else place.expand_as(positions)) % block
        first = place - inner  # the first position of each block, which may be in the prompt
        waits = ((inner > 0) & (first >= 0) & (positions > inner))[:, None]
        return opened & ~(waits & opened.gather(-1, first.clamp_min(0)[:, None].expand_as(opened)))

    def counted(self, tokens: Tensor, pool: Pool, shown: bool) -> Tensor | None:
        """Return a bool like `tokens` that is True at positions that scores count, or None if all count: those of the
        answer and, with `stop` or `shown`, only those up to the end of the text."""
        if len(self.end_ids) and (shown or self.settings.stop):
            return ~self.after_end(tokens, pool)
        return None if pool.end is None else ~starting_at(pool.end, tokens).expand(tokens.shape)


def starting_at(place: Tensor, tokens: Tensor) -> Tensor:
    """Return a bool [P, ..., L] that is True from the window positions place [P] on, to be used with tokens
    [P, ..., L]."""
    number = torch.arange(tokens.shape[-1], device=tokens.device)
    return number >= place.view(-1, *[1] * (tokens.ndim - 1))


@dataclass(frozen=True)
class Pool:
    """N candidates for each of P prompts."""

    tokens: Tensor  # [P, N, L]
    undecided: Tensor  # [P, N, L] bool, the open positions (see `Call.open`), also those of sleeping rows
    logprob: Tensor  # [P, N, L] the log-probability of each token when it was revealed; 0 where masked
    revealed: Tensor  # [P, N, L] the index of the step that revealed each token; -1 where masked
    row_hash: Tensor  # [P, N]
    tie: Tensor  # [P, N] a hash of the lineage (see `search.base`), which decides between candidates of equal value
    group: Tensor  # [P, N]
    source: Tensor  # [P, N] the index of each row's parent in the previous pool
    names: Tensor  # [P] the numbers by which callbacks and errors name the prompts
    seed: Tensor  # [P]
    key: Tensor  # [P]
    step: Tensor  # [P] how many steps each prompt has taken
    positions: Tensor  # [P, L] the window positions, counted from the first real token
    first: Tensor  # [P] the first window position that follows the prompt
    end: Tensor | None = None  # [P] the window positions from this one on belong to no answer; None: there are none
    state: dict[str, Tensor] = field(default_factory=dict)  # [P, N] values that a method keeps for each row
    awake: Tensor | None = None  # [P, N] the rows of a tree that are run or complete; the others sleep. None: all rows
    masks: Tensor | None = None  # [P, N, W] the tokens that a constraint allows next, since `Search.settle`
    lost: Tensor | None = None  # [P] the largest value of the rows that a tree has dropped
    memory: dict[str, Any] = field(default_factory=dict)  # [P, ...] values that a selector keeps for each prompt

    @staticmethod
    def start(call: Call, prompts: Prompts, names: Tensor, seed: Tensor, key: Tensor) -> Pool:
        """Return the first pool, with masked rows in k contiguous groups."""
        positions, rows = prompts.positions, call.settings.pool_size + call.settings.reserve
        # A position that is not decoded has a token that is no mask, so it is never open.
        tokens = torch.where(positions < 0, int(call.model.mask_id == 0), call.model.mask_id)
        tokens = tokens[:, None].repeat(1, rows, 1)
        row_hash = hash_tokens(tokens[:, :1], positions[:, None]).expand(-1, rows)
        place = torch.arange(rows, device=tokens.device).expand_as(row_hash)
        return Pool(
            tokens=tokens,
            undecided=tokens == call.model.mask_id,
            logprob=torch.zeros_like(tokens, dtype=torch.promote_types(call.head.weight.dtype, torch.float32)),
            revealed=torch.full_like(tokens, -1),
            row_hash=row_hash,
            tie=mix(row_hash, place),
            group=place // (rows // call.settings.groups),
            source=place,
            names=names,
            seed=seed,
            key=key,
            step=torch.zeros_like(key),
            positions=positions,
            first=prompts.first,
            end=prompts.end,
        )

    @property
    def size(self) -> int:
        """The number N of rows per prompt."""
        return self.row_hash.shape[1]

    @cached_property
    def open(self) -> Tensor:
        """Which positions of all rows are open, [P, N, L] bool. Sleeping rows have none."""
        return self.undecided if self.awake is None else self.undecided & self.awake[..., None]

    @cached_property
    def complete(self) -> Tensor:
        """Which rows have no open position, [P, N] bool."""
        return ~self.open.any(-1)

    def progress(self, dtype: torch.dtype) -> Tensor:
        """Return the share [P] of positions that are not open."""
        return 1 - self.open.sum((1, 2)).to(dtype) / (self._rows * (self.positions >= 0).sum(-1))

    @property
    def _rows(self) -> Tensor:
        """The number [P] of rows that do not sleep."""
        return torch.full_like(self.key, self.size) if self.awake is None else self.awake.sum(-1)

    def facts(self, call: Call) -> Tensor:
        """Return the numbers of `schedule.Facts` for every prompt, [P, F]. Blocks are counted from the start of the
        window or, for a block-causal model, from the first token of the row."""
        length = self.tokens.shape[-1]
        block = call.settings.block_length or length
        place = torch.arange(length, device=self.tokens.device)
        first = torch.where(self.open.any(1), place, length).amin(-1)
        number = (self.positions if block_of(call.model) else place.expand(len(first), -1)) // block
        number = number.masked_fill(self.positions < 0, 1 << 62)  # behind all blocks
        here = number.gather(1, first.clamp_max(length - 1)[:, None])
        masked = (self.open & (number == here)[:, None]).sum(-1).amax(-1)
        done = self._rows - self.open.any(-1).sum(-1)
        counts = (number < here).sum(-1), (number <= here).sum(-1), (self.positions >= 0).sum(-1)
        return torch.stack([first, masked, self.open.sum((1, 2)), self._rows, done, *counts], -1)

    @property
    def repeats(self) -> Tensor:
        """Which rows [P, N] are equal to an earlier row of their pool."""
        return first_equal(self.row_hash) != torch.arange(self.size, device=self.row_hash.device)

    def keys(self) -> Tensor:
        """Return the random streams [P] of the method at this step."""
        return mix(self.seed, self.key, SELECT, self.step)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, without those in `state` and `memory`."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def keep(self, prompts: Tensor) -> Pool:
        """Return a pool of only those prompts whose indices are in `prompts`."""
        return self.map(lambda value: value[prompts])

    def fit(self, length: int, blank: int) -> Pool:
        """Return the pool with windows of this length. Positions behind a window have the token `blank`."""
        size = self.tokens.shape[-1]
        if size == length:
            return self
        values = {"tokens": blank, "undecided": 0, "logprob": 0, "revealed": -1, "positions": -1}
        pad = torch.nn.functional.pad
        rows: dict[str, Any] = {n: pad(getattr(self, n), (0, length - size), value=x) for n, x in values.items()}
        return replace(self, **rows, end=torch.full_like(self.key, size) if self.end is None else self.end)

    @staticmethod
    def join(pools: Sequence[Pool]) -> Pool:
        """Return a pool with the prompts of all these pools. What a pool does not have is 0."""
        one, sizes = pools[0], [len(pool.key) for pool in pools]

        def joined(values: Sequence[Any]) -> Any:
            return joined_rows(values, sizes) if any(isinstance(x, Tensor) for x in values) else values[0]

        if any(pool.size != one.size for pool in pools):
            raise D5P4Error("the pools of this method change their size, so no prompt can join")
        if any(pool.end is not None for pool in pools):
            length = one.tokens.shape[-1]
            pools = [replace(x, end=torch.full_like(x.key, length) if x.end is None else x.end) for x in pools]
        tensors = {name: joined([getattr(pool, name) for pool in pools]) for name in pools[0].tensors()}
        names = dict.fromkeys(name for pool in pools for name in pool.memory)
        memory = {name: joined([pool.memory.get(name) for pool in pools]) for name in names}
        return replace(one, **tensors, state={n: joined([x.state[n] for x in pools]) for n in one.state}, memory=memory)

    def take(self, index: Tensor) -> Pool:
        """Return the rows with the indices [P, m] of this pool."""
        rows: dict[str, Any] = {name: pick(getattr(self, name), index) for name in ROWS}
        return replace(self, **rows, state={name: pick(values, index) for name, values in self.state.items()})

    def map(self, change: Callable[[Tensor], Tensor]) -> Pool:
        """Return a pool with changed tensors."""
        tensors: dict[str, Any] = {name: change(value) for name, value in self.tensors().items()}
        memory = {name: change(x) if isinstance(x, Tensor) else x for name, x in self.memory.items()}
        return replace(self, **tensors, state={n: change(x) for n, x in self.state.items()}, memory=memory)
