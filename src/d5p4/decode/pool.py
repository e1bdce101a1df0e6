"""The pool: the partial answers (candidates) from which each decoding step chooses, for P prompts.

The pool also hides how rows are spread over ranks (`decode.beams`). Its small tensors describe all N rows of a prompt.
Only `tokens`, `logprob` and `revealed` are limited to the n rows that this process holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.ties import first_equal, occurrence
from ..options import Settings
from ..project import Draw, Parents, distinct_children, projection
from ..project.reveal import Scheduled
from ..rng import SELECT, hash_tokens, mix
from ..types import Choice, Head, Model, block_of
from .beams import Beams, Seats
from .schedule import Step, Watch

if TYPE_CHECKING:
    from .rows import WindowHidden
    from .texts import Prompts
    from .view import Look

OWN = ("tokens", "logprob", "revealed")


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Return m rows of each prompt, [P, m, ...], given x [P, N, ...]. index [P, m] says which of the N rows."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))


@dataclass(frozen=True)
class Call:
    """What all prompts of a decode call share."""

    model: Model
    head: Head  # the model's head with the options of the call
    settings: Settings
    beams: Beams
    end_ids: Tensor  # the end-of-text ids, maybe none
    watch: Watch = field(default_factory=Watch)

    def ends(self, tokens: Tensor, appended: Tensor) -> Tensor:
        """Return a bool like tokens [P, ..., L] that is True at end-of-text tokens after the prompt.

        appended [P] is the number of window positions that follow the prompt. The others are holes, and an end-of-text
        token in a hole ends nothing.
        """
        length = tokens.shape[-1]
        behind = torch.arange(length, device=tokens.device) >= length - appended[:, None]
        return torch.isin(tokens, self.end_ids) & behind.view(len(behind), *[1] * (tokens.ndim - 2), length)

    def after_end(self, tokens: Tensor, appended: Tensor) -> Tensor:
        """Return a bool like `tokens` that is True behind the first end-of-text token after the prompt."""
        ends = self.ends(tokens, appended)
        return ends.cumsum(-1) > ends

    def open(self, tokens: Tensor, appended: Tensor) -> Tensor:
        """Return a bool like `tokens` that is True at masked positions, with `stop` only before the end of the text."""
        masked = tokens == self.model.mask_id
        return masked & ~self.after_end(tokens, appended) if self.settings.stop else masked

    def counted(self, tokens: Tensor, appended: Tensor, shown: bool) -> Tensor | None:
        """Return a bool like `tokens` that is True at positions that scores count, or None if all count: with `stop` or
        `shown`, the positions up to the end of the text."""
        cut = len(self.end_ids) and (shown or self.settings.stop)
        return ~self.after_end(tokens, appended) if cut else None


@dataclass(frozen=True)
class Pool:
    """N candidates for each of P prompts. This process holds the tokens of n of the N candidates."""

    call: Call
    tokens: Tensor  # [P, n, L] the tokens of this process's candidates
    logprob: Tensor  # [P, n, L] the log-probability of each token when it was revealed; 0 where masked
    revealed: Tensor  # [P, n, L] the index of the step that revealed each token; -1 where masked
    row_hash: Tensor  # [P, N]
    tie: Tensor  # [P, N] a hash of the lineage (see `Branching`), which decides between candidates of equal value
    group: Tensor  # [P, N]
    source: Tensor  # [P, N] the index of each row's parent in the previous pool
    names: Tensor  # [P] the numbers by which callbacks and errors name the prompts
    seed: Tensor  # [P]
    key: Tensor  # [P]
    positions: Tensor  # [P, L] the window positions, counted from the first real token
    appended: Tensor  # [P] how many window positions follow the prompt
    state: dict[str, Tensor] = field(default_factory=dict)  # [P, N] values that a method keeps for each row
    awake: Tensor | None = None  # [P, N] the rows of a tree that are run or complete; the others sleep. None: all rows
    lost: Tensor | None = None  # [P] the largest value of the rows that a tree has dropped

    @staticmethod
    def start(call: Call, prompts: Prompts, names: Tensor, seed: Tensor, key: Tensor) -> Pool:
        """Return the first pool, with masked rows in k contiguous groups."""
        positions, rows = prompts.positions, call.settings.pool_size + call.settings.reserve
        shape = (len(positions), rows // call.beams.size, positions.shape[1])
        tokens = torch.full(shape, call.model.mask_id, device=positions.device)
        row_hash = hash_tokens(tokens[:, :1], positions[:, None]).expand(-1, rows)
        place = torch.arange(rows, device=tokens.device).expand_as(row_hash)
        return Pool(
            call,
            tokens=tokens,
            logprob=torch.zeros_like(tokens, dtype=torch.promote_types(call.head.weight.dtype, torch.float32)),
            revealed=torch.full_like(tokens, -1),
            row_hash=row_hash,
            tie=mix(row_hash, place),
            group=place // (rows // call.settings.groups),
            source=place,
            names=names,
            seed=seed,
            key=key,
            positions=positions,
            appended=prompts.appended,
        )

    @property
    def size(self) -> int:
        """The number N of rows per prompt."""
        return self.row_hash.shape[1]

    @cached_property
    def open(self) -> Tensor:
        """Which positions of all rows are open, [P, N, L] bool. Sleeping rows have none."""
        opened = self.call.beams.gather(self.call.open(self.tokens, self.appended))
        return opened if self.awake is None else opened & self.awake[..., None]

    @cached_property
    def complete(self) -> Tensor:
        """Which rows have no open position, [P, N] bool."""
        return ~self.open.any(-1)

    @property
    def progress(self) -> Tensor:
        """The share [P] of positions that are not open."""
        return 1 - self.open.sum((1, 2)) / (self._rows * self.open.shape[-1])

    @property
    def _rows(self) -> Tensor:
        """The number [P] of rows that do not sleep."""
        return torch.full_like(self.key, self.size) if self.awake is None else self.awake.sum(-1)

    def facts(self, block: int) -> Tensor:
        """Return the numbers of `schedule.Facts` for every prompt, [P, F]. Blocks are counted from the start of the
        window or, for a block-causal model, from the first token of the row."""
        length = self.tokens.shape[-1]
        place = torch.arange(length, device=self.tokens.device)
        first = torch.where(self.open.any(1), place, length).amin(-1)
        number = (self.positions if block_of(self.call.model) else place.expand(len(first), -1)) // block
        here = number.gather(1, first.clamp_max(length - 1)[:, None])
        masked = (self.open & (number == here)[:, None]).sum(-1).amax(-1)
        done = self._rows - self.open.any(-1).sum(-1)
        edges = (number < here).sum(-1), (number <= here).sum(-1)
        return torch.stack([first, masked, self.open.sum((1, 2)), self._rows, done, *edges], -1)

    @property
    def repeats(self) -> Tensor:
        """Which rows [P, N] are equal to an earlier row of their pool."""
        return first_equal(self.row_hash) != torch.arange(self.size, device=self.row_hash.device)

    def keys(self, step: int) -> Tensor:
        """Return the random streams [P] of the method at a step."""
        return mix(self.seed, self.key, SELECT, step)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, without those in `state`."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def keep(self, prompts: Tensor) -> Pool:
        """Return a pool of only those prompts whose indices are in `prompts`."""
        return Pool.join([self], prompts)

    @staticmethod
    def join(pools: Sequence[Pool], prompts: Tensor) -> Pool:
        """Return one pool of the given prompts, which are indices into the prompts of all pools one after the other."""
        parts = [pool.tensors() for pool in pools]
        tensors: dict[str, Any] = {name: torch.cat([part[name] for part in parts])[prompts] for name in parts[0]}
        state = {name: torch.cat([x.state[name] for x in pools])[prompts] for name in pools[0].state}
        return replace(pools[0], **tensors, state=state)

    def whole(self) -> Pool:
        """Return the pool with the tokens of all N rows in this process."""
        tensors: dict[str, Any] = {name: self.call.beams.gather(getattr(self, name)) for name in OWN}
        return replace(self, **tensors)


class Branching:
    """Makes the next pool: the children of the chosen parents."""

    completes = True  # whether a parent whose first child is complete has only this child

    def __init__(
        self,
        call: Call,
        reveals: Sequence[int] = (),
    ) -> None:
        """reveals: how many positions a tree reveals per step, given the number of open ones (see `Scheduled`)."""
        settings = call.settings
        reveal, start = settings.reveal_spec, settings.start_temperature
        self.project = projection(settings.order, settings.spec.children)
        rule = reveal.build(settings) if reveal.adaptive else None
        if rule is None and reveals:
            rule = Scheduled(torch.tensor(reveals, device=call.end_ids.device))
        self.draw = Draw(
            call.head,
            call.model.mask_id,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.order,
            settings.order_temperature,
            settings.order_spec.build(settings),
            last_ids=call.end_ids if settings.eos == "last" and len(call.end_ids) else None,
            rule=rule,
            statistics=reveal.statistics,
            start=None if settings.start != "entropy" else settings.temperature if start is None else start,
            reserve=settings.reserve if reveal.adaptive or max(reveals, default=1) > 1 else 0,
        )

    def __call__(
        self,
        pool: Pool,
        hidden: WindowHidden,
        step: Step,
        choices: Sequence[Choice],
        places: Sequence[Tensor] | None,
        view: Look,
    ) -> tuple[Pool, Choice]:
        """Return the next pool and the choice of its parents. If there are several choices, choices[i] is the choice
        for the prompts places[i]."""
        if places is None:
            return self._children(pool, hidden, step, choices[0]), choices[0]
        pools = []
        for choice, at in zip(choices, places, strict=True):
            chosen = choice._replace(parents=choice.parents[at])
            pools.append(self._children(pool.keep(at), hidden.part(at), step.of(at), chosen))
        following = Pool.join(pools, torch.cat(list(places)).argsort())
        return following, Choice(following.source, 1)

    def _parents(self, pool: Pool, hidden: WindowHidden, step: Step, choice: Choice) -> tuple[Seats, Parents]:
        """Return the chosen parents that this rank holds, and which of all parents they are."""
        call, seats = pool.call, pool.call.beams.seats(choice.parents, pool.size)
        tokens, appended = seats.here(pool.tokens), pool.appended[seats.prompt]
        stream = mix(pool.seed[:, None], pool.key[:, None])
        if not call.settings.spec.tree:
            row_hash, tie = pick(pool.row_hash, choice.parents), pick(pool.tie, choice.parents)
            stream = mix(pool.seed[:, None], pool.key[:, None], step.index, row_hash, occurrence(row_hash, tie))
        state = {name: seats.of(pick(values, choice.parents)) for name, values in pool.state.items()}
        stream = seats.of(stream.expand(choice.parents.shape))
        place = seats.here(hidden.slot), pool.positions[seats.prompt], stream, call.open(tokens, appended)
        rows = (lambda x: call.open(x, appended)), (lambda x: call.ends(x, appended))
        return seats, Parents(tokens, hidden.states, *place, state, *rows)

    def drawing(self, pool: Pool, choice: Choice, parents: Parents, step: Step) -> Draw:
        """Return how the tokens of a step are drawn. `parents` are those of the choice that this process holds."""
        return self.draw

    def _children(self, pool: Pool, hidden: WindowHidden, step: Step, choice: Choice) -> Pool:
        """Return the children of the chosen parents. The rank that holds a parent makes the children of that parent."""
        call, settings, beams = pool.call, pool.call.settings, pool.call.beams
        row_hash, tie = pick(pool.row_hash, choice.parents), pick(pool.tie, choice.parents)
        number = occurrence(row_hash, tie)  # the number of each parent among equal parents
        seats, parents = self._parents(pool, hidden, step, choice)
        tokens, logprob, revealed = (seats.here(getattr(pool, name)) for name in OWN)
        positions, appended = parents.positions, pool.appended[seats.prompt]
        count = 4 * settings.w if settings.distinct else choice.children
        draw = self.drawing(pool, choice, parents, step)
        children = self.project(parents, step.of(seats.prompt), draw, count)
        owner = torch.stack([seats.prompt[:, None].expand_as(seats.row), seats.of(choice.parents)], 2).flatten(0, 1)
        call.watch.expect_finite(children.finite.flatten(), pool.names, owner, step.index)
        if children.comparable is not None:
            reason = "returned NaN for an open position; it must return numbers, and larger ones come first"
            error = D5P4Error(reason, option="order", value=settings.order)
            call.watch.expect(children.comparable, lambda holds: error)
        if settings.distinct:
            hashes = beams.everyone(hash_tokens(children.tokens, positions[:, None, None]), seats)
            children = children.take(seats.of(distinct_children(hashes, tie, choice.children)))
        if self.completes and not step.exact:
            # A parent whose first child is complete has only this child. Its copies fill the other places, so that
            # every selector stays valid. They are equal rows and cost no forward.
            done = ~call.open(children.tokens[:, :, :1], appended).any(-1)
            children = children.take(torch.arange(choice.children, device=done.device) * ~done)
        new = children.tokens != tokens[:, :, None]
        own = (
            children.tokens,
            torch.where(new, children.logprob, logprob[:, :, None]),
            torch.where(new, step.index, revealed[:, :, None]),
        )
        tokens, logprob, revealed = (beams.settle(rows, seats).flatten(1, 2) for rows in own)
        child_hash = beams.gather(hash_tokens(tokens, pool.positions[:, None]))
        place = torch.arange(child_hash.shape[1], device=child_hash.device)
        width = child_hash.shape[1] // choice.parents.shape[1]
        mother = (place // width).expand_as(child_hash)  # the index of each row's parent in `choice`
        source = choice.parents.gather(1, mother)
        tie = mix(child_hash, row_hash.gather(1, mother), number.gather(1, mother), place % width)
        regroup = choice.parents.shape[1] == settings.groups
        kept = {name: beams.everyone(values, seats).flatten(1) for name, values in children.state.items()}
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
