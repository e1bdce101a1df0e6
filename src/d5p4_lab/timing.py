"""How long a call takes and how much memory it holds: the only stopwatch of the lab.

`timed` and `measured` serve comparisons on a machine that others use too: on a CPU they count our own thread's work.
All other functions count time on the wall, with the device waited for.
"""

from __future__ import annotations

import statistics
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


def wait_for(device: torch.device) -> None:
    """Return when the device has finished everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What a call returns, and its seconds from the host's side."""
    wait_for(device)
    began = time.perf_counter()
    result = call()
    wait_for(device)
    return result, time.perf_counter() - began


def fastest(call: Callable[[], Result], device: torch.device, repeats: int = 3) -> tuple[Result, float]:
    """What the last of some calls returns, and the seconds of the fastest."""
    results = [wall(call, device) for _ in range(repeats)]
    return results[-1][0], min(seconds for _, seconds in results)


def median_ms(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Median of 3 to 50 calls, as many as `budget` seconds allow, after one that warms up; by CUDA events on CUDA."""
    call()
    count = min(50, max(3, int(budget / wall(call, device)[1])))
    if device.type != "cuda":
        return statistics.median(1e3 * wall(call, device)[1] for _ in range(count))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, stop in marks:
        start.record()
        call()
        stop.record()
    wait_for(device)
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def graph_ms(call: Callable[[], Any], device: torch.device, budget: float, calls: int) -> float:
    """Median time of one of `calls` calls that are captured in one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            call()
    return median_ms(graph.replay, device, budget) / calls


def peak_gb(call: Callable[[], Any], device: torch.device) -> float | None:
    """Memory that one call takes beyond what is held now, its results included; None where nobody counts it."""
    call()  # workspaces of the libraries are not the operation's
    if device.type != "cuda":
        return None
    with Held(device) as held:
        call()
    return held.peak / 1e9


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What a call returns, and its ms: of the clock on CUDA, elsewhere of our own thread's work."""
    if device.type == "cuda":
        result, seconds = wall(call, device)
        return result, 1e3 * seconds
    began = time.thread_time()
    result = call()
    return result, 1e3 * (time.thread_time() - began)


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
