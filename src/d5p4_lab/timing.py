"""Measures the time and the peak memory of a call. The whole lab uses these functions.

On a CPU, `timed` and `measured` count only the CPU time of our own thread, so other users of the machine do not
distort comparisons. All other functions measure wall time and wait for the device.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d5p4.provenance import machine

Result = TypeVar("Result")


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return the result of a call and its wall time in seconds."""
    wait_for(device)
    began = time.perf_counter()
    result = call()
    wait_for(device)
    return result, time.perf_counter() - began


def fastest(call: Callable[[], Result], device: torch.device, repeats: int = 3) -> tuple[Result, float]:
    """Return the result of the last of `repeats` calls, and the seconds of the fastest call."""
    results = [wall(call, device) for _ in range(repeats)]
    return results[-1][0], min(seconds for _, seconds in results)


def median_ms(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Return the median of `times_ms`."""
    return statistics.median(times_ms(call, device, budget))


def times_ms(call: Callable[[], Any], device: torch.device, budget: float) -> list[float]:
    """Return the ms of 3 to 50 calls after a warm-up. There are as many calls as fit into `budget` seconds."""
    call()
    count = min(50, max(3, int(budget / wall(call, device)[1])))
    if device.type != "cuda":
        return [1e3 * wall(call, device)[1] for _ in range(count)]
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, stop in marks:
        start.record()
        call()
        stop.record()
    wait_for(device)
    return [start.elapsed_time(stop) for start, stop in marks]


def graph_ms(call: Callable[[], Any], device: torch.device, budget: float, calls: int) -> float:
    """Capture `calls` calls in one CUDA graph, and return the median time of the graph in ms divided by `calls`."""
    return median_ms(captured(call, calls), device, budget) / calls


def captured(call: Callable[[], Any], calls: int = 1) -> Callable[[], None]:
    """Capture `calls` calls in one CUDA graph, and return a function that replays the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            call()
    return graph.replay


def peak_gb(call: Callable[[], Any], device: torch.device) -> float | None:
    """Return the peak memory, in GB, that one call and its results need beyond the current use; None on a CPU."""
    call()  # this call allocates the workspaces of libraries, which must not be counted
    if device.type != "cuda":
        return None
    with Held(device) as meter:
        call()
    return meter.peak / 1e9


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return the result of a call and its time in ms: wall time on CUDA, otherwise the CPU time of our own thread."""
    if device.type == "cuda":
        result, seconds = wall(call, device)
        return result, 1e3 * seconds
    began = time.thread_time()
    result = call()
    return result, 1e3 * (time.thread_time() - began)


def in_new_process(call: Callable[..., Result], *arguments: Any) -> Result:
    """Return call(*arguments) from a new process. Repeats inside one process are not independent of each other."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def clock(device: torch.device) -> str:
    """Return the name of the processor that `timed` measures: the GPU of this machine, or "one CPU thread"."""
    return machine(device) if device.type == "cuda" else "one CPU thread"


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one CPU thread inside the block, because `timed` does not count the work of other threads."""
    threads = torch.get_num_threads()
    if device.type != "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measured(call: Callable[[], Result], device: torch.device) -> tuple[Result, float, float]:
    """Run `call` twice. Return the first result, the ms of the second run, and the peak GB that the first run added."""
    with Held(device) as meter:
        result = call()
    return result, timed(call, device)[1], meter.peak / 1e9


class Held(TorchDispatchMode):
    """Counts the peak bytes of the tensors created inside the block.

    On CUDA the allocator counts the bytes. Elsewhere we count the tensors that operations return, so we miss temporary
    memory inside an operation.
    """

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
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (place := x.untyped_storage().data_ptr()) not in self.known | inputs:
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
