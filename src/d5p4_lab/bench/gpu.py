"""Measure time and memory of the forward, of the rest of a step and of whole steps, and compare with a plain baseline.

    python -m d5p4_lab bench gpu [--sections machine,vocab,...] [--device cpu --small] [--out FILE]

Each operation is compared with the baseline (`d5p4_lab.baseline`), with its plain torch version, and with its floor.
The floor is the number of bytes divided by the copy bandwidth, or the number of operations divided by the bf16 matrix
rate. Both rates are measured in the same run. Times are medians in ms, measured with CUDA events. Our operations are
also timed inside a CUDA graph. Memory is the allocator's peak minus the use before the call, in GB of 10^9 bytes.
Several runs of this program can add sections to the same file. `COLUMNS` has the tables of docs/performance.md.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import d5p4
from d5p4.decode.measures import normalise
from d5p4.decode.replay import FEW
from d5p4.ops import kernels
from d5p4.ops.gram import pool_gram, token_kernel
from d5p4.ops.partition_map import map_inference, partition_map
from d5p4.ops.sample import draw
from d5p4.ops.vocab import logits_of, vocab_stats
from d5p4.provenance import machine as machine_name
from d5p4.rng import mix, uniform
from d5p4.search.dpp import dpp_kernel
from d5p4.search.tree import MOST_STARTS, SHORTLIST
from d5p4.types import Context, Head, Store

from .. import baseline
from ..baseline import BETA, draw_logits, row_stats
from ..tables import Row, Tables
from ..timing import captured, fastest, graph_ms, median_ms, peak_gb, times_ms, wait_for
from . import generate, one_line, rows_of, sections, show
from .random_models import CONFIG, SDAR, TINY, TINY_SDAR, quantised_model, random_model

SMALL_OP = 20  # a CUDA graph has this many calls of a small operation, so that the graph's launch hardly counts


@dataclass(frozen=True)
class Point:
    """One problem size: P prompts with pools of k groups of w rows, L answer positions, vocabulary V, width D."""

    k: int
    w: int
    prompts: int
    length: int
    vocabulary: int
    width: int

    @property
    def size(self) -> int:
        """N, the number of candidates per prompt."""
        return self.k * self.w

    @property
    def rows(self) -> int:
        """The number of answer positions of all candidates."""
        return self.prompts * self.size * self.length

    @property
    def head_operations(self) -> float:
        return 2.0 * self.rows * self.vocabulary * self.width

    def __str__(self) -> str:
        return f"{self.k}×{self.w}, P {self.prompts}, L {self.length}, V {self.vocabulary}, D {self.width}"


BASE = Point(6, 10, 1, 256, 126464, 4096)
OWT = Point(8, 4, 1, 1024, 50258, 768)
POOLS = ((4, 4), (8, 4), (6, 10))
BOXED = {"countdown": "86,28,13,31:96"}  # models in the box that every run quantises, each with a prompt


@dataclass(frozen=True)
class Plan:
    """The sizes that are measured."""

    base: Point = BASE
    points: tuple[Point, ...] = (  # the sizes at which single operations are measured
        *(BASE, replace(BASE, k=8, w=4), replace(BASE, k=4, w=4, length=128, prompts=16)),
        *(OWT, replace(OWT, prompts=16, length=128)),
    )
    solver: tuple[tuple[int, int, int], ...] = (  # each size is (groups k, children w, prompts P)
        *((k, w, 1) for k, w in (*POOLS, (4, 64), (16, 16), (64, 4), (32, 32), (64, 32), (64, 64))),
        *((k, w, prompts) for prompts in (16, 64) for k, w in POOLS),
    )
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)  # of the model
    forwards: tuple[tuple[int, int], ...] = ((60, 384), (42, 384), (16, 384), (8, 384), (4, 384), (1, 384), (60, 128))
    steps: int = 8  # measured per decode
    temperatures: tuple[float, ...] = (0.3, 0.2, 0.15)  # pools of 60 rows then have 2 to 45 distinct rows
    blocks: Mapping[str, Mapping[str, Any]] = field(  # {name: config} of the models whose blocks are measured
        default_factory=lambda: {"LLaDA-8B": CONFIG, "SDAR-8B": SDAR | {"block_length": 32}}
    )
    block_rows: tuple[int, ...] = (4, 16, 60)
    block_tokens: int = 32
    trees: tuple[int, ...] = (4, 8, 16)
    prompt: int = 128
    matrix: int = 8192
    copied: int = 1 << 32
    boxed: Mapping[str, str] = field(default_factory=lambda: BOXED | {"smol": "Name a good use for an old door."})
    wide: Mapping[str, Any] = field(default_factory=dict)  # changes of `config` whose widths can be quantised
    budget: float = 0.3  # a measurement is repeated for about this many seconds


_TINY = Point(2, 3, 1, 6, 97, 16)
SMALL = Plan(
    base=_TINY,
    points=(_TINY, replace(_TINY, prompts=2)),
    solver=((2, 3, 1), (4, 4, 2)),
    config=TINY,
    boxed=BOXED,
    wide={"d_model": 32, "mlp_hidden_size": 64},
    forwards=((6, 10), (1, 10)),
    steps=4,
    trees=(2, 3),
    temperatures=(0.5, 0.1),
    blocks={"LLaDA": TINY, "SDAR": TINY_SDAR | {"block_length": 2}},
    block_rows=(1, 2),
    block_tokens=2,
    prompt=4,
    matrix=64,
    copied=1 << 16,
    budget=0.002,
)


class Bench(sections.Bench):
    """Measures operations on one device, and its rates in operations and bytes per second."""

    plan: Plan

    @property
    def facts(self) -> Row:
        return {"base": str(self.plan.base)}

    @cached_property
    def bandwidth(self) -> float:
        source = torch.randint(256, (self.plan.copied,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2e3 * self.plan.copied / self.median_ms(lambda: target.copy_(source))

    @cached_property
    def rate(self) -> float:
        """The rate of one matrix product."""
        return self.product_rate(1)

    @cached_property
    def sustained(self) -> float:
        """The rate of products for about 0.5 s, in which a GPU comes to its power limit."""
        return self.product_rate(400 if self.cuda else 4)

    def product_rate(self, times: int) -> float:
        size = self.plan.matrix
        left, right = self.normal(size, size), self.normal(size, size)

        def products() -> None:
            for _ in range(times):
                left @ right.T

        return 2e3 * times * size**3 / self.median_ms(products)

    @cached_property
    def model(self) -> Any:
        return random_model(self.plan.config, self.device, self.dtype)

    def sole_model(self, config: Mapping[str, Any]) -> Any:
        """Return a model of this shape and free any other one, so that measured peaks include the weights of one."""
        if config != self.plan.config:
            self.__dict__.pop("model", None)
        self.free()
        return self.model if config == self.plan.config else random_model(config, self.device, self.dtype)

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
        """Return a tensor of normal random numbers, filled in place, because there is no memory for a second tensor."""
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0, scale, generator=self.generator(seed))

    def median_ms(self, call: Callable[[], Any]) -> float:
        return median_ms(call, self.device, self.plan.budget)

    def measure(self, row: Row, name: str, fn: Callable[[], Any], calls: int = 0) -> None:
        """Add `name`_ms and `name`_gb to the row; if calls > 0, also `name`_graph_ms with `calls` calls per graph."""
        try:
            row[f"{name}_gb"] = peak_gb(fn, self.device)
            row[f"{name}_ms"] = self.median_ms(fn)
        except Exception as error:
            row.setdefault("errors", {})[name] = one_line(error)
            calls = 0
        if calls and self.cuda and row[f"{name}_ms"] < 500:
            try:
                row[f"{name}_graph_ms"] = graph_ms(fn, self.device, self.plan.budget, calls)
            except Exception as error:
                row.setdefault("errors", {})[f"{name} in a graph"] = one_line(error)
        if self.cuda:
            torch.cuda.empty_cache()

    def fastest(self, row: Row, name: str, fn: Callable[[], Any], recorded: bool) -> None:
        """Add `name`_ms to the row: the least time of several calls, or of several replays of a recorded call."""
        try:
            fn()
            call = captured(fn) if recorded and self.cuda else fn
            row[f"{name}_ms"] = min(times_ms(call, self.device, self.plan.budget))
        except Exception as error:
            row.setdefault("errors", {})[name] = one_line(error)

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
        """Measure three versions. Ours is last: if its CUDA graph fails, torch's random generator may stay broken."""
        row: Row = {"what": what, "size": str(size), "floor_ms": floor}
        if paper is not None:
            self.measure(row, "baseline", paper, paper_calls)
        if plain:
            with kernels.off():
                self.measure(row, "plain", ours)
        self.measure(row, "ours", ours, calls)
        return show(row)

    def read_ms(self, count: float, itemsize: int = 0) -> float:
        """Return the ms to read `count` numbers of `itemsize` bytes. By default, the numbers have the model's dtype."""
        return count * (itemsize or self.dtype.itemsize) / self.bandwidth * 1e3

    def multiply_ms(self, operations: float) -> float:
        return operations / self.rate * 1e3


class Inputs:
    """Random inputs of a step of one size: hidden rows, head, tie hashes and keys. Logits are made on first use."""

    def __init__(self, bench: Bench, point: Point, prompt: int = 0, masked: float = 1.0) -> None:
        """prompt: number of prompt positions; only the baseline uses them. masked: share of masked answer positions."""
        self.point, self.bench = point, bench
        pools, length, width = point.prompts * point.size, point.length, point.width
        self.weight = bench.normal(point.vocabulary, width, scale=width**-0.5, seed=1)
        self.banned = torch.zeros(point.vocabulary, dtype=torch.bool, device=bench.device)
        self.banned[-1] = True
        self.states = bench.normal(pools, length, width, scale=0.2**0.5, seed=2)
        self.states += bench.normal(length, width, scale=0.8**0.5, seed=3)  # a part that all candidates share
        self.prompt_states = bench.normal(point.size, prompt, width, seed=4) if prompt else None
        generator = bench.generator(5)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-(2**62), 2**62, shape, generator=generator, device=bench.device)

        self.tie, self.row_hash = integers(point.prompts, point.size), integers(point.prompts, point.size)
        self.key = integers(point.prompts, 1)
        self.slot = torch.arange(pools, device=bench.device).view(point.prompts, point.size)
        self.child = torch.arange(point.w, device=bench.device)
        order = torch.rand(pools, length, generator=generator, device=bench.device).argsort(-1)
        self.places = order[:, : max(1, int(masked * length))].sort(-1).values  # [P * N, M] masked positions
        self.whole = masked == 1

    @cached_property
    def logits(self) -> Tensor:
        """The logits [P * N * L, V]."""
        return self.bench.normal(self.point.rows, self.point.vocabulary, seed=6)

    @cached_property
    def prompt_logits(self) -> Tensor | None:
        """The logits [N, prompt, V] at the prompt's positions. All P prompts share these logits."""
        if self.prompt_states is None:
            return None
        return self.bench.normal(*self.prompt_states.shape[:2], self.point.vocabulary, seed=7)

    @property
    def flat_states(self) -> Tensor:
        """The hidden rows [P * N * L, D]."""
        return self.states.flatten(0, 1)

    def pools(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split x [P * N * L, ...] into one tensor [N, L, ...] per prompt."""
        return x.view(self.point.prompts, self.point.size, self.point.length, -1).unbind()


def parents_of(x: Inputs, entropy: Tensor) -> Tensor:
    """Return the indices [P, k] of the chosen rows, given the entropies [P * N * M] of the masked positions."""
    point = x.point
    raw = -entropy.view(point.prompts, point.size, -1).mean(-1)
    quality = normalise(raw, "minmax", "entropy", point.vocabulary)
    kernel = dpp_kernel("additive", quality, pool_gram(x.states, x.slot), BETA)[0]
    return partition_map(kernel, point.k, None, quality, x.tie)


def to_draw(x: Inputs, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat positions [P * k * M] where the parents [P, k] get tokens, and uniform numbers [P * k * M, w]."""
    pool_row = x.slot.gather(1, parents)
    places = x.places[pool_row]  # [P, k, M]
    stream = mix(x.key, x.row_hash.gather(1, parents))
    u = uniform(stream[..., None, None], places[..., None], x.child)
    return (pool_row[..., None] * x.point.length + places).flatten(), u.flatten(0, 2)


def draw_from_logits(x: Inputs, parents: Tensor, **shape: Any) -> Tensor:
    """Draw tokens [P * k * M, w] for the parents [P, k] from logits in memory."""
    rows, u = to_draw(x, parents)
    return draw_logits(x.logits, x.banned, u, rows=rows, **shape)[0]


def draw_from_states(x: Inputs, parents: Tensor) -> Tensor:
    """Draw tokens [P * k * M, w] for the parents [P, k] from hidden rows."""
    rows, u = to_draw(x, parents)
    return draw(x.flat_states[rows], Head(x.weight, None, x.banned), u)[0]


def step_from_logits(x: Inputs) -> Tensor:
    """Select parents and draw tokens [P * k * L, w] from logits in memory."""
    return draw_from_logits(x, parents_of(x, row_stats(x.logits, x.banned, ("entropy",))["entropy"]))


def step_from_states(x: Inputs) -> Tensor:
    """Select parents and draw tokens [P * k * M, w] from hidden rows, only at the M masked positions of a row."""
    scored = x.states if x.whole else x.states.gather(1, x.places[..., None].expand(-1, -1, x.point.width))
    stats = vocab_stats(scored.flatten(0, 1), Head(x.weight, None, x.banned), ("entropy",))
    return draw_from_states(x, parents_of(x, stats["entropy"]))


def baseline_from_logits(x: Inputs) -> None:
    for logits, states in zip(x.pools(x.logits), x.pools(x.flat_states), strict=True):
        baseline.step(logits, states, x.point.k, x.point.w, BETA, x.prompt_logits)


def baseline_from_states(x: Inputs) -> None:
    for states in x.pools(x.flat_states):
        prompt = None if x.prompt_states is None else x.prompt_states @ x.weight.T
        baseline.step(states @ x.weight.T, states, x.point.k, x.point.w, BETA, prompt)


def for_each(fn: Callable[..., Any], *parts: Iterable[Any]) -> None:
    """Call `fn` with the inputs of one prompt after another, and ignore what it returns."""
    for arguments in zip(*parts, strict=True):
        fn(*arguments)


def machine(bench: Bench) -> list[Row]:
    """Measure the copy bandwidth and the bf16 rate of square matrix products. All floors follow from these rates."""
    row = {
        "what": machine_name(bench.device),
        "torch": torch.__version__,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "bandwidth_tbs": bench.bandwidth / 1e12,
        "rate_tflops": bench.rate / 1e12,
        "sustained_tflops": bench.sustained / 1e12,
    }
    return [show(row)]


def vocab(bench: Bench) -> list[Row]:
    """Measure the computation of the entropies of all positions, with the streamed head and from logits in memory."""
    return [row for point in bench.plan.points for row in _vocab(bench, point)]


def _vocab(bench: Bench, point: Point) -> list[Row]:
    x = Inputs(bench, point)
    streamed = partial(vocab_stats, x.flat_states, Head(x.weight, None, x.banned), ("entropy",))
    paper = partial(for_each, lambda states: baseline.quality(states @ x.weight.T), x.pools(x.flat_states))
    floor = bench.multiply_ms(point.head_operations)
    first = bench.versus("entropy, streamed head", point, streamed, paper, floor=floor)
    stored = partial(row_stats, x.logits, x.banned, ("entropy",))
    paper = partial(for_each, baseline.quality, x.pools(x.logits))
    floor = bench.read_ms(x.logits.numel())
    return [first, bench.versus("entropy, logits in memory", point, stored, paper, floor=floor)]


def sample(bench: Bench) -> list[Row]:
    """Measure drawing w tokens per position of the parents. The baseline also draws at the prompt's positions."""
    return [row for point in bench.plan.points for row in _sample(bench, point)]


def _sample(bench: Bench, point: Point) -> list[Row]:
    x = Inputs(bench, point, bench.plan.prompt)
    parents = torch.arange(0, point.size, point.w, device=bench.device).repeat(point.prompts, 1)  # one per group

    def paper(logits: Tensor, chosen: Tensor) -> None:
        prompt = [] if x.prompt_logits is None else [x.prompt_logits[chosen]]
        baseline.sample(torch.cat([*prompt, logits[chosen]], 1), point.w)

    floor = bench.multiply_ms(point.head_operations / point.w)
    rows = [bench.versus("draws, streamed head", point, partial(draw_from_states, x, parents), floor=floor)]
    floor = bench.read_ms(point.rows // point.w * point.vocabulary)
    stored, paper_all = partial(draw_from_logits, x, parents), partial(for_each, paper, x.pools(x.logits), parents)
    rows.append(bench.versus("draws, logits in memory", point, stored, paper_all, floor=floor))
    if point == bench.plan.base:
        for shape in ({"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.95}):
            what = "draws, logits in memory, " + " ".join(f"{key} {value}" for key, value in shape.items())
            rows.append(bench.versus(what, point, partial(stored, **shape), floor=floor))
    return rows


def gram(bench: Bench) -> list[Row]:
    """Measure the computation of the similarities S of the pools from the hidden rows."""
    rows = []
    for point in bench.plan.points:
        x = Inputs(bench, replace(point, vocabulary=2))
        ours = partial(pool_gram, x.states, x.slot)
        paper = partial(for_each, baseline.similarity, x.pools(x.flat_states))
        floor = bench.read_ms(x.states.numel())
        rows.append(bench.versus("similarity", point, ours, paper, floor=floor, calls=SMALL_OP))
    return rows


def instances(count: int, k: int, w: int, width: int = 768) -> tuple[Tensor, Tensor]:
    """Return random quality [count, kw] in [0, 1] and similarity [count, kw, kw].

    Rows are random vectors. 0.8 of their squared length is common to all, and 0.7 of the rest to siblings.
    """
    g = torch.Generator().manual_seed(0)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, width, generator=g, dtype=torch.float64), dim=-1)

    own = 0.7**0.5 * unit(count, k, 1) + 0.3**0.5 * unit(count, k, w)
    rows = 0.8**0.5 * unit(count, 1, 1) + 0.2**0.5 * own
    rows = torch.nn.functional.normalize(rows.flatten(1, 2), dim=-1)
    quality = torch.randn(count, k * w, generator=g, dtype=torch.float64)
    low, high = quality.amin(-1, keepdim=True), quality.amax(-1, keepdim=True)
    return (quality - low) / (high - low), rows @ rows.mT


def solver(bench: Bench) -> list[Row]:
    """Time the search for the set with the largest determinant.

    The search has k starts (solver "local-search"), so that new times can be compared with earlier ones. The
    experiment `scaling` compares the sets and the times of all solvers.
    """
    rows = []
    for k, w, prompts in bench.plan.solver:
        quality, similarity = (x.to(bench.device).float() for x in instances(prompts, k, w))
        tie = torch.randint(2**62, quality.shape, generator=bench.generator(), device=bench.device)
        kernel = dpp_kernel("additive", quality, similarity, BETA)[0]
        ours = partial(partition_map, kernel, k, None, quality, tie, starts="k")
        paper = partial(for_each, partial(baseline.greedy_map, k=k), kernel)
        floor = bench.read_ms(kernel.numel(), 4)
        options: dict[str, Any] = dict(calls=SMALL_OP, paper_calls=1, plain=quality.shape[1] < 4096)
        rows.append(bench.versus("partition MAP", f"{k}×{w}, P {prompts}", ours, paper, floor=floor, **options))
    return rows


def tree(bench: Bench) -> list[Row]:
    """Compare the solver of the tree, plain torch in the widest float type, with a whole step of the tree."""
    rows = []
    puzzle, numbers = "86,28,13,31:96", [*range(bench.plan.prompt)]
    for name in ("countdown", *bench.plan.blocks) if bench.cuda else ("countdown",):
        if name.startswith("LLaDA"):  # without blocks of its own
            continue
        model = bench.sole_model(bench.plan.blocks[name]) if name != "countdown" else d5p4.load(name, bench.device)
        length = 2 * bench.plan.block_tokens if name != "countdown" else None
        for k in bench.plan.trees:
            options = {"method": "tree", "k": k, "spare": 0, "diversity": 1.0, "temperature": 0.0}
            call = partial(generate, model, [puzzle if length is None else numbers], gen_length=length, **options)
            call()  # compiles the kernels
            result, seconds = fastest(call, bench.device)
            tokens = torch.randint(9, (1, SHORTLIST * k, bench.plan.block_tokens), generator=torch.Generator())
            similarity = token_kernel(tokens.to(bench.device), 0)
            solve = partial(map_inference, similarity, k, starts="k" if k <= MOST_STARTS else "one", local_search=False)
            row: Row = {"what": f"{name}, K = {k}", "step_ms": 1e3 * seconds / int(result.nfe)}
            bench.measure(row, "ours", solve, SMALL_OP)
            row["share"] = (best_ms(row) or 0.0) / row["step_ms"]
            rows.append(show(row))
        del model
    return rows


def step(bench: Bench) -> list[Row]:
    """Measure everything between a forward and the next pool, captured as one function in one CUDA graph."""
    base = bench.plan.base
    floor = bench.multiply_ms(base.head_operations)
    x = Inputs(bench, base, bench.plan.prompt)
    ours, paper = partial(step_from_states, x), partial(baseline_from_states, x)
    streamed = bench.versus("step, streamed head", base, ours, paper, floor=floor)
    ours, paper = partial(step_from_logits, x), partial(baseline_from_logits, x)
    read_floor = bench.read_ms(base.rows * base.vocabulary)
    stored = bench.versus("step, logits in memory", base, ours, paper, floor=read_floor)
    if "baseline_ms" in stored:
        pool = x.pools(x.logits)[0], x.pools(x.flat_states)[0]
        stored["baseline_select_ms"] = bench.median_ms(partial(baseline.select, *pool, base.k, BETA))
        stored["baseline_sample_ms"] = stored["baseline_ms"] - stored["baseline_select_ms"]
        del pool
    del ours, paper, x  # free the logits
    x = Inputs(bench, base, masked=0.5)
    half = partial(step_from_states, x)
    return [stored, streamed, bench.versus("step, streamed head, half masked", base, half, floor=floor / 2)]


def body_operations(config: Mapping[str, Any], rows: int, tokens: int) -> float:
    """Return the number of floating-point operations in the body's matrix products and in attention."""
    width, inner = config["d_model"], config["mlp_hidden_size"]
    matrices = 2 * (4 * width**2 + 3 * width * inner)
    return float(rows * tokens * config["n_layers"] * (matrices + 4 * tokens * width))


@torch.no_grad()
def body(bench: Bench) -> list[Row]:
    """Measure the forward without the head, in our version and in eager torch."""
    plan, model, generator = bench.plan, bench.model, bench.generator()
    result = []
    for rows, length in plan.forwards:
        batch = torch.randint(plan.config["vocab_size"], (rows, length), generator=generator, device=bench.device)
        floor = bench.multiply_ms(body_operations(plan.config, rows, length))
        ours, eager = partial(model.body, batch), partial(baseline.eager_body, model, batch)
        row = bench.versus("body", f"{rows} × {length}", ours, eager, floor=floor, calls=0, plain=False)
        row |= {f"{name}_share": floor / row[f"{name}_ms"] for name in ("ours", "baseline") if f"{name}_ms" in row}
        if "ours_share" in row:
            row["sustained_share"] = row["ours_share"] * bench.rate / bench.sustained
        result.append(row)
    return result


@torch.no_grad()
def quant(bench: Bench) -> list[Row]:
    """Compare weights of 16, 8 and 4 bits: forwards and a decode of one shape, with the peak of making the model and
    decoding, and then, for models in the box, the share of masks whose likeliest token is that of bfloat16, when every
    second token of eight answers is masked."""
    config, rows = dict(bench.plan.config) | dict(bench.plan.wide), []
    for bits in ("bfloat16", "int8", "int4"):
        bench.__dict__.pop("model", None)
        bench.free()
        make = random_model if bits == "bfloat16" else partial(quantised_model, bits=bits)
        model = make(config, bench.device, bench.dtype)
        batch = torch.randint(config["vocab_size"], (16, 2 * bench.plan.prompt), device=bench.device)
        options = {"k": 4, "gen_length": bench.plan.prompt, "steps": bench.plan.steps, "method": "tree", "seed": 1}
        decode = partial(generate, model, batch[:1, : bench.plan.prompt].tolist(), **options)
        row: Row = {"what": bits, "size": f"16 × {batch.shape[1]}"}
        row["forward_ms"], row["decode_ms"] = (bench.median_ms(call) for call in (partial(model.body, batch), decode))
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if bench.cuda else None
        rows.append(show(row))
        del model, decode
    for name, prompt in bench.plan.boxed.items():
        best: dict[str, Tensor] = {}
        for bits in ("bfloat16", "int8", "int4"):
            model = d5p4.load(name, bench.device, bits)
            if not best:
                masked = generate(model, prompt, k=8, gen_length=24, seed=1, method="independent").sequences[0].clone()
                masked[:, ::2] = model.mask_id
            states, head = model.body(masked).states[:, ::2], model.head
            best[bits] = logits_of(states, head.weight, head.bias, head.banned).argmax(-1)
            share = float((best[bits] == best["bfloat16"]).float().mean())
            rows.append(show({"what": f"{name}, {bits}", "agreement": share}))
    return rows


@torch.no_grad()
def block(bench: Bench) -> list[Row]:
    """Compare the forward of one block, which reads stored keys and values, with the forward of whole rows.

    Times are the least of several calls. Forwards that a decode would replay from a CUDA graph are replayed here, too.
    A floor is the larger of two times: the time to read the weights (and the stored keys and values) once, and the time
    of the matrix products and the attention at the matrix rate.
    """
    rows = []
    for name, config in bench.plan.blocks.items():
        model = bench.sole_model(config)
        rows += [_block(bench, name, model, count) for count in bench.plan.block_rows]
        del model
    return rows


def _block(bench: Bench, name: str, model: Any, count: int) -> Row:
    plan, generator = bench.plan, bench.generator()
    length, block, layers = plan.prompt + plan.base.length, plan.block_tokens, model.cache_shape[0]
    heads = model.config.get("n_heads", model.config.get("num_attention_heads"))
    whole = torch.randint(len(model.head.weight), (count, length), generator=generator, device=bench.device)
    part, context = whole[:, -block:].contiguous(), block_context(bench, model.cache_shape, count)
    stored = sum(store.kv.numel() for store in context.stores)
    weights = body_weights(model)

    def floor(tokens: int, read: float, numbers: int) -> float:
        operations = 2.0 * count * tokens * (weights + 2 * layers * heads * model.cache_shape[2] * read)
        return max(bench.multiply_ms(operations), bench.read_ms(weights + numbers))

    row: Row = {"what": name, "size": f"{count} × {block} of {length}", "rows": count}
    mean_read = length if model.block is None else (length + model.block) / 2  # a block-causal row reads no later block
    row["whole_floor_ms"], row["block_floor_ms"] = floor(length, mean_read, 0), floor(block, length, stored)
    row["whole_replayed"], row["block_replayed"] = whole.numel() <= FEW, part.numel() <= FEW
    bench.fastest(row, "whole", partial(model.body, whole), row["whole_replayed"])
    bench.free()
    bench.fastest(row, "block", partial(model.body, part, None, context), row["block_replayed"])
    if "errors" not in row:
        row["ratio"] = row["whole_ms"] / row["block_ms"]
    return show(row)


def block_context(bench: Bench, shape: tuple[int, int, int], rows: int) -> Context:
    """Return the context of the last block: the prompt in one slot that all rows read, and the earlier blocks of the
    answer in one slot per row."""
    plan, (layers, key_heads, width) = bench.plan, shape

    def store(slots: int, positions: int, seed: int) -> Store:
        kv = bench.normal(layers, 2, slots, positions, key_heads, width, seed=seed)
        slot = torch.arange(rows, device=bench.device) % slots
        return Store(kv, slot, torch.full((rows,), positions, device=bench.device))

    answer = plan.base.length - plan.block_tokens
    first = torch.full((rows,), plan.prompt + answer, device=bench.device)
    return Context(first, (store(1, plan.prompt, 1), store(rows, answer, 2)))


@torch.no_grad()
def answers(bench: Bench) -> list[Row]:
    """Measure whole decodes with and without stored keys and values.

    `device_ms` is the time of all kernels per step of a decode of the first block; in the rest of a step the device
    waits for the host. `plain_times` compares a decode with one plain answer that runs whole rows, `cached_times` with
    one plain answer that uses the cache.
    """
    rows = []
    for name, config in bench.plan.blocks.items():
        model = bench.sole_model(config)
        rows += _answers(bench, name, model)
        del model
    return rows


def _answers(bench: Bench, name: str, model: Any) -> list[Row]:
    plan, base = bench.plan, bench.plan.base
    prompt = [(7 * i) % (model.config["vocab_size"] // 2) for i in range(plan.prompt)]
    common = {"gen_length": base.length, "block_length": plan.block_tokens, "eos": "never", "seed": 0}
    cache = "exact" if model.block else "dual"
    one = {"method": "independent", "k": 1}
    tree = {"method": "tree", "k": 4, "cache": cache}
    pool = {"method": "d5p4", "k": base.k, "w": base.w}
    third = max(-(-base.length // 3), -(-base.length // plan.block_tokens))
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("one plain answer, whole rows", 1, one | {"cache": "none"}),
        (f"one plain answer, {cache} cache", 1, one | {"cache": cache}),
        (f"tree, K = 4, {cache} cache", 4, tree),
        (f"tree, K = 4, {cache} cache, {third} steps", 4, tree | {"steps": third}),
        (f"d5p4, {base.k} × {base.w}, {cache} cache", base.size, pool | {"cache": cache}),
        (f"d5p4, {base.k} × {base.w}, whole rows", base.size, pool | {"cache": "none"}),
    ]
    rows: list[Row] = []
    for what, count, options in cases:
        slow = count == base.size and options["cache"] == "none"
        length = max(1, plan.block_tokens // 4) if slow else base.length  # whole rows are always equally long
        given = common | options | {"gen_length": length}
        prompt_of = prompt + [1] * (base.length - length)  # rows are always equally long

        def call(given: dict[str, Any] = given, prompt_of: list[int] = prompt_of, **more: Any) -> d5p4.Result:
            return generate(model, [prompt_of], **given | more)

        bench.free()
        call(gen_length=min(length, 2 * plan.block_tokens))  # compiles the kernels
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        result, seconds = fastest(call, bench.device, 1 if count == base.size else 2)
        steps = int(result.nfe)
        row: Row = {"what": f"{name}: {what}", "steps": steps, "seconds": seconds, "ours_ms": 1e3 * seconds / steps}
        row |= {"rows": int(result.rows), "tokens_run": int(result.tokens_run)}
        if bench.cuda:
            row["ours_gb"] = torch.cuda.max_memory_allocated() / 1e9
            row["device_ms"] = device_ms(partial(call, gen_length=min(length, plan.block_tokens)))
        if rows and count < base.size:
            row["plain_times"] = seconds / rows[0]["seconds"]
            row["cached_times"] = seconds / (rows[1]["seconds"] if len(rows) > 1 else seconds)
        rows.append(show(row))
    return rows


def device_ms(call: Callable[[], d5p4.Result]) -> float:
    """Return the ms per step in which the device runs kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps = int(call().nfe)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3 / steps


def body_weights(model: Any) -> int:
    """Return the number of weights of the matrices that a forward of the body reads, without embedding and head."""
    vocabulary = len(model.head.weight)
    return sum(p.numel() for p in model.parameters() if p.ndim > 1 and len(p) != vocabulary)


def watch(bench: Bench, steps: int, **options: Any) -> list[Row]:
    """Decode the first steps at the base size. Return each step's time and number of distinct rows."""
    base, records = bench.plan.base, []
    wait_for(bench.device)
    began = time.perf_counter()

    def callback(snapshot: d5p4.Snapshot) -> list[int] | None:
        nonlocal began
        wait_for(bench.device)
        spent, distinct = time.perf_counter() - began, len(snapshot.tokens[0].unique(dim=0))
        records.append({"step": snapshot.step, "ms": spent * 1e3, "distinct": distinct})
        began = time.perf_counter()
        return snapshot.prompts.tolist() if snapshot.step + 1 >= steps else None

    prompt = [(7 * i) % (bench.plan.config["vocab_size"] // 2) for i in range(bench.plan.prompt)]
    generate(bench.model, [prompt], k=base.k, w=base.w, gen_length=base.length, seed=0, callback=callback, **options)
    return records


@torch.no_grad()
def decode(bench: Bench) -> list[Row]:
    """Measure whole steps: the first step, in which all rows are equal, and steps with 100 % and 30 % distinct rows."""
    plan, base = bench.plan, bench.plan.base
    paper: Row = {"what": "baseline step", "size": str(base)}
    bench.measure(paper, "baseline", partial(baseline_step, bench))
    if paper.get("baseline_gb") is not None:
        paper["baseline_gb"] += sum(p.numel() * p.element_size() for p in bench.model.parameters()) / 1e9
    show(paper)
    watch(bench, 2, order="confidence")  # warm up
    with kernels.off():
        plain = _decode(bench, "plain versions, every row", 3, order="confidence", savings=False)
    runs = [
        _decode(bench, f"{order} order, T {t:g}", plan.steps, order=order, temperature=t)
        for order, t in (("random", 1.0), *(("confidence", t) for t in (1.0, *plan.temperatures)))
    ]
    steps = [step for run in runs for step in run["steps"]]
    later = [step for step in steps if step["step"] > 0]
    return [
        paper,
        summary("no duplicates", later, 1.0, base, paper),
        summary("about 30 % distinct", later, 0.3, base, paper),
        summary("first step", [step for step in steps if step["step"] == 0], 1 / base.size, base, paper),
        plain,
        *runs,
    ]


def baseline_step(bench: Bench) -> None:
    """Run a step of the baseline: the body in eager torch on every row, all logits, selection and draws."""
    base, split, model = bench.plan.base, bench.plan.prompt, bench.model
    hidden = baseline.eager_body(
        model, torch.full((base.size, split + base.length), model.mask_id, device=bench.device)
    )
    logits = hidden.states @ model.head.weight.T
    baseline.step(logits[:, split:], hidden.features[:, split:], base.k, base.w, BETA, logits[:, :split])


def _decode(bench: Bench, what: str, steps: int, **options: Any) -> Row:
    """Measure one decode. The peak memory includes the weights."""
    bench.free()
    records = watch(bench, steps, **options)
    row: Row = {"what": what, "size": f"{len(records) - 1} steps after the first"}
    row["ours_ms"] = statistics.median(step["ms"] for step in records[1:])
    row["distinct_share"] = statistics.mean(step["distinct"] for step in records[1:]) / bench.plan.base.size
    if bench.cuda:
        row["ours_gb"] = torch.cuda.max_memory_allocated() / 1e9
    show(row)
    return row | {"steps": records}


def summary(what: str, steps: Sequence[Row], share: float, base: Point, paper: Row) -> Row:
    """Return the figures of those steps whose share of distinct rows is nearest to `share`."""

    nearest = min((step["distinct"] for step in steps), key=lambda rows: abs(rows / base.size - share))
    near = [step for step in steps if step["distinct"] == nearest]
    row: Row = {"what": what, "size": f"{len(near)} steps", "distinct_share": nearest / base.size}
    row["ours_ms"] = statistics.median(step["ms"] for step in near)
    if "baseline_ms" in paper:
        row |= {"baseline_ms": paper["baseline_ms"], "speedup": paper["baseline_ms"] / row["ours_ms"]}
    return show(row)


SECTIONS: sections.Sections[Bench] = {
    f.__name__: f for f in (machine, vocab, sample, gram, solver, tree, step, body, quant, block, answers, decode)
}


def best_ms(row: Row) -> float | None:
    """Return our operation's time in a CUDA graph, or its eager time if the graph was not measured."""
    return row.get("ours_graph_ms", row.get("ours_ms"))


def microseconds(ms: float | None) -> float | None:
    return None if ms is None else 1e3 * ms


def percent(key: str) -> sections.Cell:
    return lambda row: f"{row[key]:.0%}" if key in row else None


OPERATION: dict[str, sections.Cell] = {
    "what": "what",
    "size": "size",
    "ours, ms": best_ms,
    "plain torch, ms": "plain_ms",
    "paper's way, ms": "baseline_ms",
    "floor, ms": "floor_ms",
    "ours, GB": "ours_gb",
    "paper's way, GB": "baseline_gb",
}
COLUMNS: dict[str, dict[str, sections.Cell]] = {
    "step": OPERATION,
    "vocab": OPERATION,
    "sample": OPERATION,
    "gram": OPERATION,
    "solver": {
        "groups × children, prompts": "size",
        "ours, µs": lambda row: microseconds(best_ms(row)),
        "paper's way in a graph, µs": lambda row: microseconds(row.get("baseline_graph_ms")),
        "paper's way, µs": lambda row: microseconds(row.get("baseline_ms")),
        "plain torch, ms": "plain_ms",
    },
    "tree": {"model, beams": "what", "step, ms": "step_ms", "solver, ms": best_ms, "share": percent("share")},
    "body": {
        "rows × tokens": "size",
        "ours, ms": "ours_ms",
        "eager, ms": "baseline_ms",
        "the products, ms": "floor_ms",
        "share of the rate": percent("ours_share"),
        "share of the sustained rate": percent("sustained_share"),
        "eager, share": percent("baseline_share"),
        "ours, GB beyond weights": "ours_gb",
    },
    "block": {
        "model": "what",
        "rows × tokens": "size",
        "whole rows, ms": "whole_ms",
        "their floor, ms": "whole_floor_ms",
        "one block, ms": "block_ms",
        "its floor, ms": "block_floor_ms",
        "times faster": "ratio",
    },
    "answers": {
        "decode": "what",
        "steps": "steps",
        "ms per step": "ours_ms",
        "kernels, ms": "device_ms",
        "times one plain answer": "plain_times",
        "times one cached answer": "cached_times",
        "peak, GB": "ours_gb",
    },
    "decode": {
        "pool": "what",
        "measured": "size",
        "distinct rows": percent("distinct_share"),
        "ours, ms": "ours_ms",
        "paper's way, ms": "baseline_ms",
        "times faster": "speedup",
    },
}
SHOWN = ("no duplicates", "about 30 % distinct", "first step")  # the rows of `decode` on the page


def tables(results: Mapping[str, Any]) -> Tables:
    made = {name: partial(sections.table, results, name, columns) for name, columns in COLUMNS.items()}
    decoded = {row["what"]: row for row in rows_of(results, "decode")}
    page = {"sections": {"decode": {"rows": [decoded[what] for what in SHOWN if what in decoded]}}}
    return made | {"decode": partial(sections.table, page, "decode", COLUMNS["decode"])}


def make_bench(small: bool, device: torch.device) -> Bench:
    return Bench(SMALL if small else Plan(), device)


def main(arguments: Sequence[str]) -> None:
    sections.main("gpu", __doc__, SECTIONS, make_bench, tables, arguments)
