"""Divides the forwards of a call among the ranks of a group (see `decode.rows`). This module sends tensors.

All ranks make the same calls in the same order, and vote before each exchange: a rank that has failed (out of memory,
logits that are not finite) reports its error in the vote, and all ranks raise that error.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..decode.ranks import Ranks
from ..errors import D5P4Error, NonFiniteLogits

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


class ConnectedRanks(Ranks):
    """The processes with the numbers `ranks`. They exchange tensors on the host by the process group `host` (gloo), and
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

    def join(self, own: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        joined, most = [], max(counts)
        with self._exchange():
            for x in own:
                rows = x.reshape(len(x), x.shape[1:].numel()).view(torch.uint8)  # versions of gloo lack some dtypes
                moved, group = self._ready(torch.nn.functional.pad(rows, (0, 0, 0, most - len(x))))
                parts = [torch.empty_like(moved) for _ in counts]
                dist.all_gather(parts, moved, group)
                whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
                joined.append(whole.to(x.device).view(x.dtype).view(-1, *x.shape[1:]))
        return joined

    def agree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        own = [x.contiguous().view(-1).view(torch.uint8) for x in tensors]
        moved, group = self._ready(torch.cat(own))
        with self._exchange():
            dist.broadcast(moved, self.ranks[0], group)
        parts = moved.to(own[0].device).split([len(x) for x in own])
        return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]

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
