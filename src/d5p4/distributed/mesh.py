"""A mesh arranges the ranks of a job in `data` groups of `beam` ranks each.

The groups divide the prompts. The ranks of a group, which have consecutive numbers and so are usually on the same host,
divide the rows of each pool. Groups work independently: they take the numbers of their batches from a counter in the
store (a small key-value server that all ranks can reach), and wait for each other only at the end.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..decode.beams import ALONE, Beams
from ..errors import D5P4Error
from ..models.load import choose_device
from .spread import SpreadBeams
from .watchdog import CURE, RankLost, Watchdog, failure_key, in_short

PIECE = 1 << 20  # larger values are split into pieces of this many bytes; the store takes at most 8 MiB
POLL, POLL_MOST = 0.02, 0.5  # a rank that waits asks the store at first every 0.02 s, and later every 0.5 s
WORD = "ranks.word"  # the files by which ranks check that they see the same folder have names that begin like this
PATIENCE = 20.0  # all ranks must see a file at most this many seconds after rank 0 has made it
_calls = count()  # numbers the calls of `connect`; all ranks count alike, as each calls it equally often


class Mesh:
    """The mesh of a single process. For several processes, `connect` returns the subclass `Ranks`."""

    data = beam = world = 1
    rank = 0
    beams: Beams = ALONE
    device: torch.device | None = None  # the device for this rank's model, or None if the caller may choose
    watchdog: Watchdog | None = None

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def leader(self) -> bool:
        """Whether this rank writes for its group."""
        return self.beams.rank == 0

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

    def beat(self) -> None:
        """Report that this rank makes progress. The job ends if a rank reports none for longer than the timeout."""

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


class Ranks(Mesh):
    """The mesh of several processes. Each process has its own object of this class."""

    watchdog: Watchdog

    def __init__(self, data: int, beam: int, rank: int, store: dist.Store, watchdog: Watchdog, name: str) -> None:
        super().__init__()
        self.data, self.beam, self.rank, self.world = data, beam, rank, data * beam
        self._store, self.watchdog, self._name = store, watchdog, name
        self._shared = self._met = 0
        self._left = False

    def ticket(self, name: str) -> int:
        if self.beam == 1:
            return super().ticket(name)
        with self.beams.together():
            return self.beams.agree_on(self.count(name, 1) - 1 if self.leader else None)

    def count(self, name: str, more: int = 0) -> int:
        self._look_for_failures()
        return self._ask(self._store.add, f"{self._name}/count/{name}", more if self.leader else 0)

    def share(self, value: Any) -> Any:
        key, self._shared = f"{self._name}/share/{self._shared}", self._shared + 1
        if self.first:
            data = pickle.dumps(value)
            for start in range(0, len(data), PIECE):
                self._ask(self._store.set, f"{key}/{start}", data[start : start + PIECE])
            self._ask(self._store.set, key, str(len(data)))
            return value
        self._wait_for(lambda: self._store.check([key]))
        size = int(self._ask(self._store.get, key))
        return pickle.loads(b"".join(self._ask(self._store.get, f"{key}/{start}") for start in range(0, size, PIECE)))

    def meet(self) -> None:
        key, self._met = f"{self._name}/meet/{self._met}", self._met + 1
        self._ask(self._store.add, key, 1)
        self._wait_for(lambda: self._store.add(key, 0) == self.world)

    def beat(self) -> None:
        self.watchdog.beat()

    def fail(self, error: BaseException) -> None:
        if self._left:
            return
        reason = f"rank {self.rank} gave up: {str(error) or type(error).__name__}"
        with suppress(RuntimeError):  # the store raises this error if its process has ended
            self._store.compare_set(failure_key(self._name), "", reason)
        self._leave()

    def close(self) -> None:
        self.meet()
        self._leave()

    def _leave(self) -> None:
        """Leave the mesh. Rank 0, whose process may run the store, waits up to 5 seconds for the other ranks."""
        if self._left:
            return
        self._left = True
        self.watchdog.close()
        if self.beam > 1 and dist.is_initialized():
            dist.destroy_process_group()
        with suppress(RuntimeError):
            left = self._store.add(f"{self._name}/left", 1)
            until = time.monotonic() + 5
            while self.first and left < self.world and time.monotonic() < until:
                time.sleep(POLL)
                left = self._store.add(f"{self._name}/left", 0)

    def _wait_for(self, reached: Any) -> None:
        pause = POLL
        with self.watchdog.waiting():
            while not self._ask(reached):
                self._look_for_failures()
                time.sleep(pause)
                pause = min(POLL_MOST, 1.2 * pause)

    def _look_for_failures(self) -> None:
        key = failure_key(self._name)
        if self._ask(self._store.check, [key]):
            reason = self._ask(self._store.get, key).decode()
            raise RankLost(f"{reason} (so rank {self.rank} stops too)", reported=True)

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except RuntimeError as error:
            raise RankLost(f"rank 0, which runs the store, does not answer ({in_short(error)}); {CURE}") from error


def at_work(mesh: Mesh) -> AbstractContextManager[None]:
    """Return a context for work of any length that cannot report its progress, such as loading a model."""
    return mesh.watchdog.waiting() if mesh.watchdog else nullcontext()


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


def connect(mesh: tuple[int, int] | None = None, timeout: float = 600.0, device: str | None = None) -> Mesh:
    """Return the mesh of this job. Under torchrun it has all ranks, and otherwise only this process.

    mesh     (data, beam), whose product is the number of ranks. The default is (number of ranks, 1)
    timeout  the job ends if a rank makes no progress for this number of seconds
    device   "cuda" or "cpu". The default is this rank's GPU, or the CPU if there is no GPU

    Ranks exchange large tensors by NCCL if every rank of a host has its own GPU. Otherwise they use gloo, which copies
    tensors through the memory of the host.
    """
    if not timeout > 0:
        raise D5P4Error(f"timeout={timeout:g} must be a positive number of seconds")
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    data, beam = mesh if mesh is not None else (world, 1)
    if data < 1 or beam < 1:
        raise D5P4Error(f"mesh={data},{beam} must be two whole numbers of at least 1")
    if data * beam != world:
        fact = f"mesh={data},{beam} needs {data * beam} ranks, but there are {world}"
        raise D5P4Error(f"{fact}; set their number with torchrun --nproc-per-node")
    if world == 1:
        return Mesh()
    place = _own_device(device)
    # The store still has the keys of earlier calls and of earlier starts by torchrun, so each call has its own prefix.
    name = f"d5p4/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"
    wait = timedelta(seconds=timeout + 30)  # longer than the watchdog's timeout, so that its message comes first

    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 29500)

    def client() -> dist.TCPStore:
        return dist.TCPStore(host, port, timeout=wait)

    try:
        store = client() if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else _served(host, port)
    except RuntimeError as error:
        reason = f"rank {rank} cannot reach the store at {host}:{port}, which torchrun names ({in_short(error)})"
        raise RankLost(reason) from error
    ranks = Ranks(data, beam, rank, store, Watchdog(client, rank, world, timeout, name), name)
    ranks.device = place
    ranks.meet()  # wait, because the store could end before the last rank has connected to it
    if beam > 1:
        ranks.beams = _spread(ranks, dist.PrefixStore(name, store), place, wait)
    return ranks


def _spread(mesh: Ranks, store: dist.Store, device: torch.device, wait: timedelta) -> SpreadBeams:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=mesh.rank, world_size=mesh.world, timeout=wait)
    own_gpus = device.type == "cuda" and _number("LOCAL_WORLD_SIZE", mesh.world) <= torch.cuda.device_count()
    groups = []
    for start in range(0, mesh.world, mesh.beam):  # every rank must create all groups, in the same order
        members = list(range(start, start + mesh.beam))
        host = dist.new_group(members, wait, "gloo")
        groups.append((members, host, dist.new_group(members, wait, "nccl") if own_gpus else None))
    members, host, fast = groups[mesh.rank // mesh.beam]
    return SpreadBeams(members, mesh.rank % mesh.beam, host, fast, mesh.watchdog)


@cache
def _served(host: str, port: int) -> dist.TCPStore:
    """Start the store in this process. The store runs until the process ends."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)


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
