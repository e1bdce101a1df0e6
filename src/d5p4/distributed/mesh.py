"""A mesh arranges the ranks of a job in `data` groups of `rows` ranks each.

The groups divide the prompts. The ranks of a group, which have consecutive numbers and so are usually on the same host,
divide the rows of each forward. Groups work independently: they take the numbers of their batches from a counter in the
store (a small key-value server that all ranks can reach), and wait for each other only at the end.

A rank that dies closes its connections, and torch.distributed limits how long a rank waits for a rank that hangs. In
both cases the ranks that wait raise `RankLost`. A rank that stops with an error first writes its reason into the store.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..decode.ranks import ALONE, Ranks
from ..errors import D5P4Error, NonFiniteLogits
from ..models.load import choose_device

TIMEOUT = 1800.0  # seconds
WORD = "ranks.word"  # the files by which ranks check that they see the same folder have names that begin like this
PATIENCE = 20.0  # all ranks must see a file at most this many seconds after rank 0 has made it
_calls = count()  # numbers the calls of `connect`; all ranks count alike, as each calls it equally often
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
    tensors on the GPU by the process group `fast` (NCCL) if it is given.

    All ranks make the same calls in the same order, and vote before each exchange: a rank that has failed (out of
    memory, logits that are not finite) reports its error in the vote, and all ranks raise that error.
    """

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


class Mesh:
    """The mesh of a single process. For several processes, `connect` returns the subclass `ConnectedMesh`."""

    data = rows = world = 1
    rank = 0
    ranks: Ranks = ALONE
    device: torch.device | None = None  # the device for this rank's model, or None if the caller may choose

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def leader(self) -> bool:
        """Whether this rank writes for its group."""
        return self.ranks.rank == 0

    def ticket(self, name: str) -> int:
        """Return the next number 0, 1, 2, ... of a counter that all groups share. A number is never returned twice."""
        return self.count(name, 1) - 1

    def count(self, name: str, more: int = 0) -> int:
        """Add `more` to a counter that all groups share, and return its new value."""
        self._counts[name] = self._counts.get(name, 0) + more
        return self._counts[name]

    def share(self, value: Any) -> Any:
        """Return, on all ranks, the value that rank 0 passes to this method. All ranks must call the method."""
        return value

    def meet(self) -> None:
        """Wait until all ranks have called this method."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank stops because of an error."""

    def close(self) -> None:
        """Wait until all ranks have called this method, then disconnect. The mesh cannot be used afterwards."""

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)


class ConnectedMesh(Mesh):
    """The mesh of several processes. Each process has its own object of this class."""

    def __init__(self, data: int, rows: int, timeout: float, device: str | None) -> None:
        super().__init__()
        self.data, self.rows, self.world, self.rank = data, rows, data * rows, _number("RANK", 0)
        self.device: torch.device = _own_device(device)
        self._wait = timedelta(seconds=timeout)
        self._everyone: dist.ProcessGroup | None = None
        self._alone = not dist.is_initialized()  # otherwise the caller has other process groups
        with self._exchange():
            self._store = dist.PrefixStore(f"d5p4/{next(_calls)}", _store(self.rank, self.world, self._wait))
            if self._alone:
                places: dict[str, Any] = {"store": self._store, "rank": self.rank, "world_size": self.world}
                dist.init_process_group("gloo", timeout=self._wait, **places)
            self._everyone = dist.new_group(None, self._wait, "gloo")
            if rows > 1:
                self.ranks = self._group()

    def _group(self) -> ConnectedRanks:
        own_gpus = self.device.type == "cuda" and _number("LOCAL_WORLD_SIZE", self.world) <= torch.cuda.device_count()
        groups = []
        for start in range(0, self.world, self.rows):  # every rank must create all groups, in the same order
            members = list(range(start, start + self.rows))
            host = dist.new_group(members, self._wait, "gloo")
            groups.append((members, host, dist.new_group(members, self._wait, "nccl") if own_gpus else None))
        members, host, fast = groups[self.rank // self.rows]
        return ConnectedRanks(members, self.rank % self.rows, host, fast)

    def ticket(self, name: str) -> int:
        if self.rows == 1:
            return super().ticket(name)
        with self.ranks.together():
            return self.ranks.agree_on(self.count(name, 1) - 1 if self.leader else None)

    def count(self, name: str, more: int = 0) -> int:
        with self._exchange():
            reason = self._reason()
            if not reason:
                return self._store.add(f"count/{name}", more if self.leader else 0)
        raise self._stopped(reason)

    def share(self, value: Any) -> Any:
        values = [value]
        with self._exchange():
            dist.broadcast_object_list(values, 0, self._everyone)
        return values[0]

    def meet(self) -> None:
        with self._exchange():
            dist.barrier(self._everyone)

    def fail(self, error: BaseException) -> None:
        if self._everyone is None:
            return
        reason = f"rank {self.rank} gave up: {str(error) or type(error).__name__}"
        with suppress(RuntimeError):  # the store raises this error if its process has ended
            self._store.compare_set("failed", "", reason)
        self._leave(grace=1)

    def close(self) -> None:
        self.meet()
        self._leave()

    def _leave(self, grace: float = 0) -> None:
        """Disconnect. Rank 0, whose process may run the store, gives other ranks some seconds to read the reason."""
        if self._everyone is not None:
            dist.destroy_process_group(None if self._alone else self._everyone)
            self._everyone = None
            time.sleep(grace if self.first else 0)

    def _reason(self) -> str:
        return self._store.get("failed").decode() if self._store.check(["failed"]) else ""

    def _stopped(self, reason: str) -> RankLost:
        return RankLost(f"{reason} (so rank {self.rank} stops too)", reported=True)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = ""
            if "Timed out" not in str(error):  # after a timeout, the store's process may be the one that hangs
                with suppress(RuntimeError, AttributeError):  # this rank may not have reached the store
                    reason = self._reason()
            self._leave(grace=1)
            fact = f"rank {self.rank} stops, because another rank has died or hangs"
            lost = RankLost(f"{fact} ({in_short(error)}); {CURE}")
            raise self._stopped(reason) if reason else lost from error


def check_shared(folder: Path, mesh: Mesh, option: str) -> None:
    """Raise an error if not all ranks see the same folder. The error names the `option`. All ranks must call this."""
    if mesh.world == 1:
        return
    file = folder / f"{WORD}.{mesh.share(secrets.token_hex(8))}"
    if mesh.first:
        file.touch()
    mesh.meet()
    until = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > until:
            fact = f"rank {mesh.rank} does not see what rank 0 writes into {folder}"
            raise D5P4Error(f"{fact}; {option} must be on a file system that all hosts share")
        time.sleep(0.1)
    mesh.meet()
    if mesh.first:
        file.unlink(missing_ok=True)


def connect(mesh: tuple[int, int] | None = None, timeout: float = TIMEOUT, device: str | None = None) -> Mesh:
    """Return the mesh of this job. Under torchrun it has all ranks, and otherwise only this process.

    mesh     (data, rows), whose product is the number of ranks. The default is (number of ranks, 1)
    timeout  the job ends if a rank waits for the others for longer than this number of seconds
    device   "cuda" or "cpu". The default is this rank's GPU, or the CPU if there is no GPU

    Ranks exchange large tensors by NCCL if every rank of a host has its own GPU. Otherwise they use gloo, which copies
    tensors through the memory of the host.
    """
    if not timeout > 0:
        raise D5P4Error(f"timeout={timeout:g} must be a positive number of seconds")
    world = _number("WORLD_SIZE", 1)
    data, rows = mesh if mesh is not None else (world, 1)
    if data < 1 or rows < 1:
        raise D5P4Error(f"mesh={data},{rows} must be two whole numbers of at least 1")
    if data * rows != world:
        fact = f"mesh={data},{rows} needs {data * rows} ranks, but there are {world}"
        raise D5P4Error(f"{fact}; set their number with torchrun --nproc-per-node")
    return Mesh() if world == 1 else ConnectedMesh(data, rows, timeout, device)


@cache
def _store(rank: int, world: int, wait: timedelta) -> dist.Store:
    """Return the store that torchrun names. If torchrun does not run it, rank 0 does, until its process ends."""
    try:
        return next(dist.rendezvous("env://", rank, world, timeout=wait))[0]
    except ValueError as error:
        fact = f"rank {rank} does not know where the store is ({in_short(error)})"
        raise D5P4Error(f"{fact}; start with torchrun") from error


def _own_device(wanted: str | None) -> torch.device:
    if wanted not in (None, "cuda") or not torch.cuda.is_available():
        return choose_device(wanted or "cpu")
    device = torch.device("cuda", _number("LOCAL_RANK", 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    try:
        return int(value) if value else default
    except ValueError:
        raise D5P4Error(f"the environment has {name}={value!r}, which is not a number; start with torchrun") from None
