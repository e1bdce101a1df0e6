"""How long a call takes and what it holds, so that it can be compared on a machine that others use too."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d5p4.provenance import machine

Result = TypeVar("Result")


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What a call returns, and its ms: of the clock on CUDA, elsewhere of our own thread's work."""
    if device.type != "cuda":
        began = time.thread_time()
        result = call()
        return result, 1e3 * (time.thread_time() - began)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize(device)
    return result, 1e3 * (time.perf_counter() - began)


def clock(device: torch.device) -> str:
    """What `timed` times, in words."""
    return machine(device) if device.type == "cuda" else "one CPU thread"


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU: work in other threads would not be counted."""
    threads = torch.get_num_threads()
    if device.type != "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measured(call: Callable[[], Result], device: torch.device) -> tuple[Result, float, float]:
    """Result, ms, and peak GB above what was held; the first call warms up and is where memory is counted."""
    with Held(device) as held:
        result = call()
    return result, timed(call, device)[1], held.peak / 1e9


class Held(TorchDispatchMode):
    """The peak of the bytes that tensors made inside hold: as the allocator counts on CUDA, else as operations return
    them (what an operation needs inside itself is not seen)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.now, self.peak, self.before = device, 0, 0, 0
        self.known: set[int] = set()

    def __enter__(self) -> Held:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
            return self
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device) - self.before
        else:
            super().__exit__(*reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (place := x.untyped_storage().data_ptr()) not in self.known | given:
                self._count(x, place)
        return result

    def _count(self, x: Tensor, place: int) -> None:
        size = x.untyped_storage().nbytes()
        self.known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(x, self._free, place, size)

    def _free(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size
