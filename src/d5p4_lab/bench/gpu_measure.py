"""What `gpu.py` measures and how: sizes, a stopwatch for one device, a model with random weights."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from d5p4.models.llada import LLaDA
from d5p4.ops import kernels
from d5p4.types import Hidden
from d5p4_lab.bench.gpu_report import number
from d5p4_lab.bench.large_checkpoint import CONFIG

SMALL_OP = 20  # calls in one CUDA graph, so that launching a graph is not what is timed
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One size: P prompts with pools of k groups of w, L answer positions, vocabulary V, width D."""

    k: int
    w: int
    prompts: int
    length: int
    vocabulary: int
    width: int

    @property
    def size(self) -> int:
        """N."""
        return self.k * self.w

    @property
    def rows(self) -> int:
        """Answer positions of all candidates."""
        return self.prompts * self.size * self.length

    @property
    def head_operations(self) -> float:
        return 2.0 * self.rows * self.vocabulary * self.width

    def __str__(self) -> str:
        return f"{self.k}×{self.w}, P {self.prompts}, L {self.length}, V {self.vocabulary}, D {self.width}"


@dataclass(frozen=True)
class Plan:
    """Which sizes are measured."""

    base: Point
    points: tuple[Point, ...]  # of the operations
    growth: Mapping[str, tuple[Point, ...]]  # of the whole step, by what grows
    solver: tuple[tuple[int, int, int], ...]  # groups, children, prompts
    valued: tuple[tuple[int, int, int], ...]  # of those, the sizes whose sets are compared
    mmr: tuple[tuple[int, int, int], ...]
    problems: int  # of the solver's quality, a size
    config: Mapping[str, Any]  # of the model
    forwards: tuple[tuple[int, int], ...]  # rows, tokens
    counts: tuple[int, int]  # forwards of 1..this many rows, of this many tokens
    steps: int  # of a decode that are watched
    temperatures: tuple[float, ...]  # tried for duplicates
    prompt: int = 128
    matrix: int = 8192
    copied: int = 1 << 32
    budget: float = 0.3  # seconds for the repetitions of one measurement


def make_plan() -> Plan:
    base = Point(6, 10, 1, 256, 126464, 4096)
    owt = Point(8, 4, 1, 1024, 50258, 768)
    tiny = replace(base, k=4, w=4, length=128)
    pools = [(4, 4), (8, 4), (6, 10)]
    return Plan(
        base=base,
        points=(base, replace(base, k=8, w=4), replace(tiny, prompts=16), owt, replace(owt, prompts=16, length=128)),
        growth={
            "n": tuple(replace(base, k=k, w=w) for k, w in (*pools, (8, 16))),
            "L": tuple(replace(base, length=length) for length in (128, 256, 512)),
            "V": tuple(replace(base, vocabulary=v) for v in (32000, 50258, 126464)),
            "P": tuple(replace(base, prompts=p) for p in (1, 4, 16, 64)),
            "P of 4×4, L 128": tuple(replace(tiny, prompts=p) for p in (1, 16, 64)),
        },
        solver=(
            *((k, w, 1) for k, w in (*pools, (4, 64), (16, 16), (64, 4), (32, 32), (64, 32), (64, 64))),
            *((k, w, p) for p in (16, 64) for k, w in pools),
        ),
        valued=((4, 4, 1), (6, 10, 1), (32, 32, 1), (64, 32, 1)),
        mmr=(*((k, w, 1) for k, w in (*pools, (16, 16), (32, 32), (64, 32))), *((k, w, 64) for k, w in pools)),
        problems=64,
        config=CONFIG,
        forwards=((60, 384), (42, 384), (16, 384), (8, 384), (4, 384), (1, 384), (60, 128)),
        counts=(60, 128),
        steps=8,
        temperatures=(0.3, 0.2, 0.15),  # of logits of variance 1: 2 to 45 distinct rows of 60
    )


def make_small_plan() -> Plan:
    base = Point(2, 3, 1, 6, 97, 16)
    two = replace(base, prompts=2)
    config = CONFIG | {
        "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "mlp_hidden_size": 32, "vocab_size": 97,
        "embedding_size": 97, "mask_token_id": 96, "eos_token_id": 95, "pad_token_id": 95, "max_sequence_length": 64,
    }  # fmt: skip
    return Plan(
        base=base,
        points=(base, two),
        growth={"n": (base, replace(base, w=4)), "P": (base, two)},
        solver=((2, 3, 1), (4, 4, 2)),
        valued=((2, 3, 1),),
        mmr=((2, 3, 1), (4, 4, 2)),
        problems=16,
        config=config,
        forwards=((6, 10), (1, 10)),
        counts=(6, 10),
        steps=4,
        temperatures=(0.5, 0.1),
        prompt=4,
        matrix=64,
        copied=1 << 16,
        budget=0.002,
    )


class Bench:
    """Measures on one device. `rate` and `bandwidth` are the machine's own, filled in by the section `machine`."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.device = plan, torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.rate = self.sustained = self.bandwidth = float("nan")  # operations and bytes a second

    @cached_property
    def model(self) -> LLaDA:
        return random_model(self.plan.config, self.device, self.dtype)

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
        """Random numbers [shape], made in place: nothing else of that size exists meanwhile."""
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0, scale, generator=self.generator(seed))

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give back what nothing refers to any more."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def wall_ms(self, fn: Callable[[], Any]) -> float:
        """One call, from the host's side."""
        self.sync()
        began = time.perf_counter()
        fn()
        self.sync()
        return (time.perf_counter() - began) * 1e3

    def event_ms(self, fn: Callable[[], Any]) -> float:
        """Median of as many calls as the budget allows, after one that warms up."""
        fn()
        count = min(50, max(3, int(self.plan.budget * 1e3 / self.wall_ms(fn))))
        if not self.cuda:
            return statistics.median(self.wall_ms(fn) for _ in range(count))
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, stop in marks:
            start.record()
            fn()
            stop.record()
        self.sync()
        return statistics.median(start.elapsed_time(stop) for start, stop in marks)

    def graph_ms(self, fn: Callable[[], Any], calls: int) -> float:
        """Median time of one of `calls` calls captured in one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fn()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                fn()
        return self.event_ms(graph.replay) / calls

    def peak_gb(self, fn: Callable[[], Any]) -> float | None:
        """Memory that one call takes beyond what is held now, its results included; None where nobody counts."""
        fn()  # workspaces of the libraries are not the operation's
        if not self.cuda:
            return None
        self.sync()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        self.sync()
        return (torch.cuda.max_memory_allocated() - held) / 1e9

    def measure(self, row: Row, name: str, fn: Callable[[], Any], calls: int = 0) -> None:
        """Fill in `name`_ms and `name`_gb. calls > 0: `name`_graph_ms too, so many calls in one CUDA graph."""
        try:
            row[f"{name}_gb"] = self.peak_gb(fn)
            row[f"{name}_ms"] = self.event_ms(fn)
        except Exception as error:
            row.setdefault("errors", {})[name] = one_line(error)
            calls = 0
        if calls and self.cuda and row[f"{name}_ms"] < 500:
            try:
                row[f"{name}_graph_ms"] = self.graph_ms(fn, calls)
            except Exception as error:
                row.setdefault("errors", {})[f"{name} in a graph"] = one_line(error)
        if self.cuda:
            torch.cuda.empty_cache()

    def versus(
        self,
        what: str,
        size: Any,
        ours: Callable[[], Any],
        paper: Callable[[], Any] | None = None,
        *,
        floor: float | None = None,
        calls: int = 1,
        paper_calls: int = 0,
        plain: bool = True,
    ) -> Row:
        """One operation in three versions. The eager ones go first: a failed capture may spoil torch's generator."""
        row: Row = {"what": what, "size": str(size), "floor_ms": floor}
        if paper is not None:
            self.measure(row, "baseline", paper, paper_calls)
        if plain:
            with kernels.off():
                self.measure(row, "plain", ours)
        self.measure(row, "ours", ours, calls)
        show(row)
        return row

    def read_ms(self, count: float, each: int = 0) -> float:
        """The floor of reading so many numbers of `each` bytes (the model's dtype by default)."""
        return count * (each or self.dtype.itemsize) / self.bandwidth * 1e3

    def multiply_ms(self, operations: float) -> float:
        return operations / self.rate * 1e3


def random_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> LLaDA:
    """A model of this shape with normal weights of variance 1 / fan-in, made where it will run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LLaDA(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    model.settle(dtype)
    model.attach("random", None, {})
    return model


class Counted:
    """A model that counts the rows its body is given. A replayed forward is not counted, so `recordable` says whether
    there may be any."""

    def __init__(self, model: Any, recordable: bool = False) -> None:
        self.model, self.rows = model, 0
        self.recordable = recordable and model.recordable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        self.rows += len(tokens)
        return self.model.body(tokens, attention_mask)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def show(row: Row) -> None:
    """One line while measuring."""
    shown = (f"{key} {number(value)}" for key, value in row.items() if value is not None and value != [])
    print("  " + ", ".join(shown), flush=True)
