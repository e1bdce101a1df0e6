"""Spreads the rows of one prompt's pool over R ranks. `d5p4.decode.beams` says which rank holds which rows.

Hidden states stay on the rank that computed them. For the similarity, each rank receives one slice of the features of
every distinct row and computes the N x N products of these slices, which are then summed over ranks. The first rank
broadcasts its choice of parents. If the method does not divide the pool into groups, children may move to other ranks.

All ranks make the same calls in the same order, and vote before each exchange: a rank that has failed (out of memory,
logits that are not finite) reports its error in the vote, and all ranks raise that error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..decode.beams import Beams, LocalParents
from ..errors import D5P4Error, NonFiniteLogits
from ..ops.gram import pool_products, slice_borders, to_cosine
from ..ops.precision import working_dtype
from ..ops.ties import first_equal
from ..types import Choice

CURE = "finished work is kept: start the same command again"
KNOWN = "known_to_all_ranks"  # an error has this attribute if a vote has already told it to all ranks


class RankLost(D5P4Error):
    """Another rank has died, hangs or has stopped. `reported` says whether that rank itself prints the reason."""

    def __init__(self, reason: str, reported: bool = False) -> None:
        super().__init__(reason)
        self.reported = reported


def in_short(error: BaseException) -> str:
    """Return the first line of an error's message, without a leading "[...]"."""
    return re.sub(r"^\[[^\]]*\]:?\s*", "", str(error).strip().partition("\n")[0])[:160]


class SpreadBeams(Beams):
    """Spreads each pool over `ranks`. The ranks exchange tensors on the host by the process group `host` (gloo), and
    tensors on the GPU by the process group `fast` (NCCL) if it is given."""

    def __init__(
        self,
        ranks: list[int],
        rank: int,
        host: dist.ProcessGroup,
        fast: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks, self.size, self.rank = ranks, len(ranks), rank
        self._host, self._fast = host, fast

    def check(self, k: int, pool_size: int, **refused: Any) -> None:
        for name, value in (("k", k), ("pool", pool_size)):
            if value % self.size:
                raise D5P4Error(f"{name}={value} must be a multiple of {self.size}, the number of ranks in a group")
        for name, value in refused.items():
            if value:
                raise D5P4Error(f"{name} needs the whole pool in one process; leave it out, or use one rank per group")

    def own(self, everybody: Tensor) -> Tensor:
        return everybody.tensor_split(self.size, 1)[self.rank]

    def gather(self, rows: Tensor) -> Tensor:
        moved, group = self._ready(rows)
        parts = [torch.empty_like(moved) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(parts, moved, group)
        return torch.cat(parts, 1).to(rows.device)

    def alike(self, values: Tensor, row_hash: Tensor) -> Tensor:
        return values.gather(1, first_equal(row_hash))

    def local(self, parents: Tensor, rows: int) -> LocalParents:
        prompts, count = parents.shape
        if count % self.size:
            raise D5P4Error(f"the method chose {count} parents, which is not a multiple of the {self.size} ranks")
        own_rows, own_columns = rows // self.size, count // self.size
        column = torch.arange(count, device=parents.device)
        holder = parents // own_rows
        if bool((holder == column // own_columns).all()):
            column = column[self.rank * own_columns : (self.rank + 1) * own_columns].expand(prompts, -1)
            row = self.own(parents) - self.rank * own_rows
            return LocalParents(torch.arange(prompts, device=parents.device), column, row, True, (prompts, count))
        prompt, column = (holder == self.rank).nonzero(as_tuple=True)
        row = parents[prompt, column] - self.rank * own_rows
        return LocalParents(prompt, column[:, None], row[:, None], False, (prompts, count))

    def everyone(self, drawn: Tensor, local: LocalParents) -> Tensor:
        if local.keeps_children:
            return self.gather(drawn)
        children = drawn.new_zeros(*local.everybody, *drawn.shape[2:])
        children[local.prompt[:, None], local.column] = drawn
        return self._all_reduce(children)

    def redistribute(self, drawn: Tensor, local: LocalParents) -> Tensor:
        return drawn if local.keeps_children else self.own(self.everyone(drawn, local)).contiguous()

    def cosine(self, features: Tensor, slot: Tensor, row_hash: Tensor) -> Tensor:
        first = first_equal(row_hash)
        holders, distinct_slot = _distinct_rows(first, self.size)
        borders, grain = slice_borders(features, row_hash.shape[1], self.size)
        mine = features[slot[holders[self.rank]]].flatten(1)
        widths = [stop - start for start, stop in zip(borders, borders[1:], strict=False)]
        slices = torch.cat([part.flatten() for part in mine.split(widths, 1)])
        width, counts = widths[self.rank], [len(prompts) for prompts, _ in holders]
        received = self._all_to_all(slices, [len(mine) * part for part in widths], [count * width for count in counts])
        products = self._all_reduce(pool_products(received.view(sum(counts), 1, width), distinct_slot, grain))
        pool = torch.arange(len(first), device=first.device).view(-1, 1, 1)
        cosine = to_cosine(products[pool, first[:, :, None], first[:, None, :]], first)
        return cosine.to(working_dtype(features.dtype))

    def fetch(
        self, states: Tensor, features: Tensor, slot: Tensor, source: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        before, now = slot.shape[1], source.shape[1] // self.size  # rows per rank in the previous pool and in this one
        place = slot.gather(1, (self.own(source) - self.rank * before).clamp(0, before - 1))
        moved = wanted & (source // before != torch.arange(source.shape[1], device=slot.device) // now)
        prompt, row = moved.nonzero(as_tuple=True)
        if not len(prompt):
            return states, features, place
        local = source[prompt, row] - self.rank * before
        mine = (local >= 0) & (local < before)
        sent = slot[prompt, local.clamp(0, before - 1)]

        def bring(x: Tensor) -> Tensor:
            rows = torch.where(mine[:, None, None], x[sent], 0).to(working_dtype(x.dtype))
            return torch.cat([x, self._all_reduce(rows).to(x.dtype)])

        here = row // now == self.rank
        place[prompt[here], row[here] % now] = len(states) + here.nonzero()[:, 0]
        brought = bring(states)
        return brought, brought if features is states else bring(features), place

    def agree(self, choice: Choice) -> Choice:
        parents, children = self.agree_on((choice.parents.cpu(), choice.children))
        return Choice(parents.to(choice.parents.device), children)

    def agree_on(self, value: Any) -> Any:
        values = [value]
        with self._exchange():
            dist.broadcast_object_list(values, self.ranks[0], self._host)
        return values[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
            self._vote(None)  # waits for all ranks, and raises the error of a rank that failed
        except Exception as error:
            if not isinstance(error, RankLost) and not getattr(error, KNOWN, False):
                self._vote(error)
            raise

    def _vote(self, error: Exception | None) -> None:
        """Report the error of this rank, or None. All ranks raise the error of the first rank that reports one."""
        failed = torch.tensor([0 if error is None else 1])
        failures: list[Any] = [None] * self.size
        with self._connected():
            dist.all_reduce(failed, dist.ReduceOp.MAX, self._host)
            if not int(failed):
                return
            sent = None if error is None else _for_other_ranks(error, self.ranks[self.rank])
            dist.all_gather_object(failures, sent, self._host)
        rank, (kind, given) = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
        shared = error if rank == self.rank and error is not None else kind(*given)
        setattr(shared, KNOWN, True)
        raise shared from (None if shared is error else error)

    def _all_reduce(self, x: Tensor) -> Tensor:
        moved, group = self._ready(x)
        with self._exchange():
            dist.all_reduce(moved, group=group)
        return moved.to(x.device)

    def _all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        moved, group = self._ready(x)
        result = moved.new_empty(sum(receive))
        sent, received = moved.view(torch.uint8), result.view(torch.uint8)  # older versions of gloo lack some dtypes
        bytes_in, bytes_out = ([moved.element_size() * count for count in counts] for counts in (receive, send))
        with self._exchange():
            dist.all_to_all_single(received, sent, bytes_in, bytes_out, group)
        return result.to(x.device)

    def _ready(self, x: Tensor) -> tuple[Tensor, dist.ProcessGroup]:
        """Return x, and the process group that can send x. For gloo, x is first copied to the host."""
        if x.is_cuda and self._fast is not None:
            return x.contiguous(), self._fast
        return x.cpu().contiguous(), self._host

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Vote whether a rank has failed. If no rank has failed, run the block, which is a collective operation."""
        self._vote(None)
        with self._connected():
            yield

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            fact = f"the exchange between ranks {' and '.join(map(str, self.ranks))} failed"
            reason = f"{fact}, so one of them has died or hangs ({in_short(error)}); {CURE}"
            raise RankLost(reason) from error


def _distinct_rows(first: Tensor, ranks: int) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """List the distinct rows of all pools, ordered by rank. Of equal rows, only the first is in the list.

    `first` [P, N] holds, for each row, the index of the first equal row in the same pool. Return, for each rank, the
    prompts and local indices of its distinct rows; and, for each row, the place [P, N] of its equal in the list.
    """
    prompts, size = first.shape
    is_first = (first == torch.arange(size, device=first.device)).view(prompts, ranks, -1).transpose(0, 1)
    place = (is_first.flatten().cumsum(0) - 1).view(ranks, prompts, -1).transpose(0, 1).reshape(prompts, size)
    return [rows.nonzero(as_tuple=True) for rows in is_first], place.gather(1, first)


def _for_other_ranks(error: Exception, rank: int) -> tuple[type[Exception], tuple[Any, ...]]:
    """Return the class and the arguments of the error that other ranks raise if this one happened on rank `rank`."""
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError, (f"rank {rank}: {error}",)
    if isinstance(error, NonFiniteLogits):
        return NonFiniteLogits, (str(error), error.prompts)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, D5P4Error):
        return D5P4Error, (reason,)
    return RuntimeError, (f"rank {rank} failed: {reason}",)
