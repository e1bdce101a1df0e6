"""Time and memory of everything after the forward, of the forward itself and of whole steps, against a plain baseline.

    python benchmarks/gpu.py [--sections machine,vocab,...] [--device cpu --small] [--out FILE] [--figure FILE]
    python benchmarks/gpu.py --draw-only      the tables and the figure again, from the JSON

Each operation is compared with the baseline (`paper_baseline.py`), with its plain torch version, and with its floor:
bytes over the copy bandwidth or operations over the bf16 matrix rate, both measured in the same run. Times are medians
in ms, of CUDA events or, for ours, inside a CUDA graph. Memory is the peak above what was held before, as the allocator
counted it, in GB of 10^9 bytes. The sections of several calls meet in one JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import d5p4  # noqa: E402
from d5p4 import provenance  # noqa: E402
from d5p4.kernel import additive, build  # noqa: E402
from d5p4.models.load import choose_device  # noqa: E402
from d5p4.ops import kernels  # noqa: E402
from d5p4.ops.gram import pool_gram  # noqa: E402
from d5p4.ops.mmr import mmr as fast_mmr  # noqa: E402
from d5p4.ops.partition_map import partition_map  # noqa: E402
from d5p4.ops.sample import draw, draw_logits  # noqa: E402
from d5p4.ops.vocab import row_stats, vocab_stats  # noqa: E402
from d5p4.quality import normalise  # noqa: E402
from d5p4.rng import mix, uniform  # noqa: E402
from d5p4_lab.bench import paper_baseline as baseline  # noqa: E402
from d5p4_lab.bench.gpu_measure import (  # noqa: E402
    SMALL_OP,
    Bench,
    Counted,
    Plan,
    Point,
    Row,
    make_plan,
    make_small_plan,
    one_line,
    show,
)
from d5p4_lab.bench.gpu_page import fill  # noqa: E402
from d5p4_lab.bench.gpu_report import figure, report, targets  # noqa: E402
from d5p4_lab.bench.solver_quality import KERNELS, instances  # noqa: E402

BETA, ALPHA = 10.0, 10.0


class Inputs:
    """Hidden rows, head, ties and keys of one step at one point; logits when first asked for."""

    def __init__(self, bench: Bench, point: Point, prompt: int = 0, masked: float = 1.0) -> None:
        """`prompt`: positions before the answer, which only the baseline looks at; `masked`: share that is scored."""
        self.point, self.bench = point, bench
        pools, length, width = point.prompts * point.size, point.length, point.width
        self.weight = bench.normal(point.vocabulary, width, scale=width**-0.5, seed=1)
        self.banned = torch.zeros(point.vocabulary, dtype=torch.bool, device=bench.device)
        self.banned[-1] = True
        self.states = bench.normal(pools, length, width, scale=0.2**0.5, seed=2)
        self.states += bench.normal(length, width, scale=0.8**0.5, seed=3)  # what all rows share
        self.prompt_states = bench.normal(point.size, prompt, width, seed=4) if prompt else None
        generator = bench.generator(5)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-(2**62), 2**62, shape, generator=generator, device=bench.device)

        self.tie, self.row_hash = integers(point.prompts, point.size), integers(point.prompts, point.size)
        self.key = integers(point.prompts, 1)
        self.slot = torch.arange(pools, device=bench.device).view(point.prompts, point.size)
        self.child = torch.arange(point.w, device=bench.device)
        order = torch.rand(pools, length, generator=generator, device=bench.device).argsort(-1)
        self.places = order[:, : max(1, int(masked * length))].sort(-1).values  # [P * N, M]
        self.whole = masked == 1

    @cached_property
    def logits(self) -> Tensor:
        """[P * N * L, V]"""
        return self.bench.normal(self.point.rows, self.point.vocabulary, seed=6)

    @cached_property
    def prompt_logits(self) -> Tensor | None:
        """[N, prompt, V], the same for every prompt."""
        if self.prompt_states is None:
            return None
        return self.bench.normal(*self.prompt_states.shape[:2], self.point.vocabulary, seed=7)

    @property
    def flat_states(self) -> Tensor:
        """[P * N * L, D]"""
        return self.states.flatten(0, 1)

    def pools(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [P * N * L, ...] as one [N, L, ...] for each prompt."""
        return x.view(self.point.prompts, self.point.size, self.point.length, -1).unbind()


def parents_of(x: Inputs, entropy: Tensor) -> Tensor:
    """The chosen rows [P, k] from entropies [P * N * M]."""
    point = x.point
    raw = -entropy.view(point.prompts, point.size, -1).mean(-1)
    quality = normalise(raw, "minmax", "entropy", point.vocabulary)
    kernel = additive(quality, pool_gram(x.states, x.slot), BETA)
    return partition_map(kernel, point.k, None, quality, x.tie)


def to_draw(x: Inputs, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Which flat rows [P * k * M] of the parents [P, k] are sampled, and their keyed uniforms [P * k * M, w]."""
    pool_row = x.slot.gather(1, parents)
    places = x.places[pool_row]  # [P, k, M]
    stream = mix(x.key, x.row_hash.gather(1, parents))
    u = uniform(stream[..., None, None], places[..., None], x.child)
    return (pool_row[..., None] * x.point.length + places).flatten(), u.flatten(0, 2)


def draw_from_logits(x: Inputs, parents: Tensor, **shape: Any) -> Tensor:
    """Tokens [P * k * M, w] of parents [P, k]."""
    rows, u = to_draw(x, parents)
    return draw_logits(x.logits, x.banned, u, rows=rows, **shape)[0]


def draw_from_states(x: Inputs, parents: Tensor) -> Tensor:
    """Tokens [P * k * M, w] of parents [P, k]."""
    rows, u = to_draw(x, parents)
    return draw(x.flat_states[rows], x.weight, None, x.banned, u)[0]


def step_from_logits(x: Inputs) -> Tensor:
    """Tokens [P * k * L, w]."""
    return draw_from_logits(x, parents_of(x, row_stats(x.logits, x.banned, ("entropy",))["entropy"]))


def step_from_states(x: Inputs) -> Tensor:
    """Tokens [P * k * M, w]; only the M masked positions are scored and drawn."""
    scored = x.states if x.whole else x.states.gather(1, x.places[..., None].expand(-1, -1, x.point.width))
    stats = vocab_stats(scored.flatten(0, 1), x.weight, None, x.banned, ("entropy",))
    return draw_from_states(x, parents_of(x, stats["entropy"]))


def baseline_from_logits(x: Inputs) -> None:
    for logits, states in zip(x.pools(x.logits), x.pools(x.flat_states), strict=True):
        baseline.step(logits, states, x.point.k, x.point.w, BETA, x.prompt_logits)


def baseline_from_states(x: Inputs) -> None:
    for states in x.pools(x.flat_states):
        prompt = None if x.prompt_states is None else x.prompt_states @ x.weight.T
        baseline.step(states @ x.weight.T, states, x.point.k, x.point.w, BETA, prompt)


def for_each(fn: Callable[..., Any], *parts: Sequence[Any]) -> None:
    """One prompt after the other, nothing kept."""
    for arguments in zip(*parts, strict=True):
        fn(*arguments)


def machine(bench: Bench) -> list[Row]:
    """Copy bandwidth and bf16 matrix rate; every floor is computed from them (the rate is that of the square)."""
    plan = bench.plan

    def bandwidth() -> float:
        source = torch.randint(256, (plan.copied,), dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        return 2e3 * plan.copied / bench.event_ms(lambda: target.copy_(source))

    def rate(rows: int, inner: int, columns: int, times: int = 1) -> float:
        left, right = bench.normal(rows, inner), bench.normal(columns, inner)

        def products() -> None:
            for _ in range(times):
                left @ right.T

        return 2e3 * times * rows * inner * columns / bench.event_ms(products)

    bench.bandwidth = bandwidth()
    bench.rate = rate(plan.matrix, plan.matrix, plan.matrix)
    bench.sustained = rate(plan.matrix, plan.matrix, plan.matrix, times=400 if bench.cuda else 4)  # for half a second
    row = {
        "what": provenance.machine(bench.device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "driver": driver_version() if bench.cuda else None,
        "python": platform.python_version(),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "bandwidth_tbs": bench.bandwidth / 1e12,
        "rate_tflops": bench.rate / 1e12,
        "sustained_tflops": bench.sustained / 1e12,
        "head_rate_tflops": rate(plan.base.rows, plan.base.width, plan.base.vocabulary) / 1e12,
    }
    show(row)
    return [row]


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def vocab(bench: Bench) -> list[Row]:
    """Entropies of all positions, through the streamed head and from logits in memory."""
    return [row for point in bench.plan.points for row in _vocab(bench, point)]


def _vocab(bench: Bench, point: Point) -> list[Row]:
    x = Inputs(bench, point)
    streamed = partial(vocab_stats, x.flat_states, x.weight, None, x.banned, ("entropy",))
    paper = partial(for_each, lambda states: baseline.quality(states @ x.weight.T), x.pools(x.flat_states))
    floor = bench.multiply_ms(point.head_operations)
    first = bench.versus("entropy, streamed head", point, streamed, paper, floor=floor)
    stored = partial(row_stats, x.logits, x.banned, ("entropy",))
    paper = partial(for_each, baseline.quality, x.pools(x.logits))
    floor = bench.read_ms(x.logits.numel())
    return [first, bench.versus("entropy, logits in memory", point, stored, paper, floor=floor)]


def sample(bench: Bench) -> list[Row]:
    """w draws at every position of the parents, keyed uniforms included; the baseline draws at the prompt's too."""
    return [row for point in bench.plan.points for row in _sample(bench, point)]


def _sample(bench: Bench, point: Point) -> list[Row]:
    x = Inputs(bench, point, bench.plan.prompt)
    parents = torch.arange(0, point.size, point.w, device=bench.device).repeat(point.prompts, 1)  # first of each group

    def paper(logits: Tensor, chosen: Tensor) -> None:
        baseline.sample(torch.cat([x.prompt_logits[chosen], logits[chosen]], 1), point.w)

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
    """S of the pools from their hidden rows."""
    rows = []
    for point in bench.plan.points:
        x = Inputs(bench, replace(point, vocabulary=2))
        ours, paper = (
            partial(pool_gram, x.states, x.slot),
            partial(for_each, baseline.similarity, x.pools(x.flat_states)),
        )
        floor = bench.read_ms(x.states.numel())
        rows.append(bench.versus("similarity", point, ours, paper, floor=floor, calls=SMALL_OP))
    return rows


def solver_inputs(bench: Bench, k: int, w: int, prompts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q [P, N] and S [P, N, N] in fp32, ties [P, N]."""
    quality, similarity = (x.to(bench.device).float() for x in instances(prompts, k, w, 768, 0.7, seed=0))
    tie = torch.randint(2**62, quality.shape, generator=bench.generator(), device=bench.device)
    return quality, similarity, tie


def solver(bench: Bench) -> list[Row]:
    """The set with the largest determinant, kernel given: time, and the value against greedy and our float64 solver."""
    return [_solver(bench, *size) for size in bench.plan.solver]


def _solver(bench: Bench, k: int, w: int, prompts: int) -> Row:
    quality, similarity, tie = solver_inputs(bench, k, w, prompts)
    kernel = additive(quality, similarity, BETA)
    ours = partial(partition_map, kernel, k, None, quality, tie)
    paper = partial(for_each, partial(baseline.greedy_map, k=k), kernel)
    row = bench.versus(
        "partition MAP", f"{k}×{w}, P {prompts}", ours, paper, floor=bench.read_ms(kernel.numel(), 4),
        calls=SMALL_OP, paper_calls=1, plain=k * w < 4096,
    )  # fmt: skip
    row |= {"n": k * w, "prompts": prompts}
    problems = bench.plan.problems // (1 if k * w <= 1024 else 4)
    if (k, w, prompts) in bench.plan.valued:
        try:
            row |= solver_value(bench, k, w, problems)
        except Exception as error:
            row.setdefault("errors", {})["value"] = one_line(error)
    return row


def solver_value(bench: Bench, k: int, w: int, problems: int) -> Row:
    """Log determinants on random problems of 16 kinds: gain over n-start greedy, agreement with the float64 solver."""
    gain, loss, equal = [], [], []
    kinds = list(itertools.product((max(64, 2 * k), 768), (0.0, 0.7), KERNELS))
    for seed, (width, kin, (kind, beta)) in enumerate(kinds):
        quality, similarity = (x.to(bench.device) for x in instances(problems // len(kinds), k, w, width, kin, seed))
        kernel, log_gain = build(kind, quality, similarity, beta)
        narrow = None if log_gain is None else log_gain.float()
        found = partition_map(kernel.float(), k, narrow, quality.float())
        with kernels.off():
            exact = partition_map(kernel, k, log_gain, quality)
        if log_gain is not None:
            kernel = kernel * torch.exp((log_gain[:, :, None] + log_gain[:, None, :]) / 2)
        greedy = torch.stack([baseline.greedy_map(each.float(), k) for each in kernel])
        found_value, exact_value, greedy_value = (log_det(kernel, sets) for sets in (found, exact, greedy))
        gain.append(found_value - greedy_value)
        loss.append(exact_value - found_value)
        equal.append((found == exact).all(-1).double())
    return {
        "problems": len(torch.cat(gain)),
        "gain_nats": torch.cat(gain).mean().item(),
        "gain_least": torch.cat(gain).min().item(),
        "equal_share": torch.cat(equal).mean().item(),
        "largest_loss": torch.cat(loss).max().item(),
    }


def log_det(kernel: Tensor, sets: Tensor) -> Tensor:
    """[P] log determinants of kernel [P, N, N] at sets [P, k]."""
    problem = torch.arange(len(sets), device=sets.device)[:, None, None]
    return torch.linalg.slogdet(kernel[problem, sets[:, :, None], sets[:, None, :]]).logabsdet


def mmr(bench: Bench) -> list[Row]:
    """Diverse beam search by marginal relevance, similarity given."""
    rows = []
    for k, w, prompts in bench.plan.mmr:
        quality, similarity, tie = solver_inputs(bench, k, w, prompts)
        ours = partial(fast_mmr, quality, similarity, tie, k, ALPHA)
        paper = partial(for_each, partial(baseline.mmr, k=k, alpha=ALPHA), quality, similarity)
        floor = bench.read_ms(similarity.numel(), 4)
        size = f"{k}×{w}, P {prompts}"
        rows.append(bench.versus("MMR", size, ours, paper, floor=floor, calls=SMALL_OP, paper_calls=1))
    return rows


def step(bench: Bench) -> list[Row]:
    """Everything between the forward and the next pool, as one function in one CUDA graph."""
    base = bench.plan.base
    floor = bench.multiply_ms(base.head_operations)
    x = Inputs(bench, base, bench.plan.prompt)
    streamed = bench.versus(
        "step, streamed head", base, partial(step_from_states, x), partial(baseline_from_states, x), floor=floor
    )
    stored = bench.versus(
        "step, logits in memory", base, partial(step_from_logits, x), partial(baseline_from_logits, x),
        floor=bench.read_ms(base.rows * base.vocabulary),
    )  # fmt: skip
    if "baseline_ms" in stored:
        pool = x.pools(x.logits)[0], x.pools(x.flat_states)[0]
        stored["baseline_select_ms"] = bench.event_ms(partial(baseline.select, *pool, base.k, BETA))
        stored["baseline_sample_ms"] = stored["baseline_ms"] - stored["baseline_select_ms"]
        del pool
    x = Inputs(bench, base, masked=0.5)
    half = partial(step_from_states, x)
    return [stored, streamed, bench.versus("step, streamed head, half masked", base, half, floor=floor / 2)]


def growth(bench: Bench) -> list[Row]:
    """The whole step, with one thing growing at a time from the base point."""
    done: dict[Point, Row] = {}
    rows = []
    for axis, points in bench.plan.growth.items():
        for point in points:
            if point not in done:
                done[point] = _growth(bench, point)
            value = {"n": point.size, "L": point.length, "V": point.vocabulary}.get(axis, point.prompts)
            rows.append(done[point] | {"axis": axis, "value": value})
    return rows


def _growth(bench: Bench, point: Point) -> Row:
    """From hidden rows always, from logits where they fit."""
    row: Row = {"what": "step", "size": str(point)}
    row["logits_floor_ms"] = bench.read_ms(point.rows * point.vocabulary)
    row["states_floor_ms"] = bench.multiply_ms(point.head_operations)
    x = Inputs(bench, point, bench.plan.prompt)
    bench.measure(row, "states", partial(step_from_states, x), calls=1)
    if bench.cuda and point.rows * point.vocabulary * bench.dtype.itemsize > 0.7 * torch.cuda.mem_get_info()[0]:
        row["skipped"] = "logits: they do not fit"
    else:
        bench.measure(row, "baseline", partial(baseline_from_logits, x))
        bench.measure(row, "logits", partial(step_from_logits, x), calls=1)
    show(row)
    return row


def body_operations(config: Mapping[str, Any], rows: int, tokens: int) -> float:
    """Multiplications and additions of the body's matrices and of attention."""
    width, inner = config["d_model"], config["mlp_hidden_size"]
    matrices = 2 * (4 * width**2 + 3 * width * inner)
    return float(rows * tokens * config["n_layers"] * (matrices + 4 * tokens * width))


@torch.no_grad()
def body(bench: Bench) -> list[Row]:
    """The forward without the head (baseline: plain eager torch), and what a row count that is new costs."""
    plan, model, generator = bench.plan, bench.model, bench.generator()

    def tokens(rows: int, length: int) -> Tensor:
        return torch.randint(plan.config["vocab_size"], (rows, length), generator=generator, device=bench.device)

    result = []
    for rows, length in plan.forwards:
        batch = tokens(rows, length)
        floor = bench.multiply_ms(body_operations(plan.config, rows, length))
        ours, eager = partial(model.body, batch), partial(baseline.eager_body, model, batch)
        row = bench.versus("body", f"{rows} × {length}", ours, eager, floor=floor, calls=0, plain=False)
        row |= {f"{name}_share": floor / row[f"{name}_ms"] for name in ("ours", "baseline") if f"{name}_ms" in row}
        if "ours_share" in row:
            row["sustained_share"] = row["ours_share"] * bench.rate / bench.sustained
        result.append(row)
    most, length = plan.counts
    batches = [tokens(rows, length) for rows in range(1, most + 1)]
    first, again = ([bench.wall_ms(partial(model.body, batch)) for batch in batches] for _ in range(2))
    row = {
        "what": "first call of each row count", "size": f"1..{most} × {length}", "first_ms": first, "again_ms": again,
        "largest_extra_ms": max(a - b for a, b in zip(first, again, strict=True)),
    }  # fmt: skip
    return [*result, row]


def watch(bench: Bench, model: Counted, steps: int, **options: Any) -> list[Row]:
    """The first steps of a decode at the base point, one token a step: time, distinct rows, rows through the body."""
    base, records = bench.plan.base, []
    bench.sync()
    seen, began = model.rows, time.perf_counter()

    def callback(shot: d5p4.Snapshot) -> list[int] | None:
        nonlocal seen, began
        bench.sync()
        spent = time.perf_counter() - began
        distinct = len(shot.tokens[0].unique(dim=0))
        records.append({"step": shot.step, "ms": spent * 1e3, "distinct": distinct, "body_rows": model.rows - seen})
        seen, began = model.rows, time.perf_counter()
        return shot.prompts.tolist() if shot.step + 1 >= steps else None

    prompt = [(7 * i) % (bench.plan.config["vocab_size"] // 2) for i in range(bench.plan.prompt)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        d5p4.generate(model, [prompt], k=base.k, w=base.w, gen_length=base.length, seed=0, callback=callback, **options)
    return records


@torch.no_grad()
def decode(bench: Bench) -> list[Row]:
    """Whole steps with the model: the first (all rows equal), without duplicates, with about 30 % distinct rows."""
    plan, base, model = bench.plan, bench.plan.base, Counted(bench.model)
    paper: Row = {"what": "baseline step", "size": str(base)}
    bench.measure(paper, "baseline", partial(baseline_step, bench))
    if paper.get("baseline_gb") is not None:
        paper["baseline_gb"] += sum(p.numel() * p.element_size() for p in bench.model.parameters()) / 1e9
    show(paper)
    watch(bench, model, 2, order="confidence")  # warms up
    with kernels.off():
        plain = _decode(bench, model, "plain versions, every row", 3, order="confidence", savings=False)
    runs = [
        _decode(bench, model, f"{order} order, T {t:g}", plan.steps, order=order, temperature=t)
        for order, t in (("random", 1.0), *(("confidence", t) for t in (1.0, *plan.temperatures)))
    ]
    steps = [step for run in runs for step in run["steps"]]
    later = [step for step in steps if step["step"] > 0]
    padding = sum(step["body_rows"] for step in later) / sum(step["distinct"] for step in later) - 1
    return [
        paper,
        summary("no duplicates", later, 1.0, base, paper),
        summary("about 30 % distinct", later, 0.3, base, paper),
        summary("first step", [step for step in steps if step["step"] == 0], 1 / base.size, base, paper),
        plain,
        *runs,
        {"what": "padding of row counts", "size": f"{len(later)} steps", "padding_share": padding},
    ]


def baseline_step(bench: Bench) -> None:
    """Every row through the eager body, full logits, the baseline's selection and sampling."""
    base, split, model = bench.plan.base, bench.plan.prompt, bench.model
    hidden = baseline.eager_body(
        model, torch.full((base.size, split + base.length), model.mask_id, device=bench.device)
    )
    logits = hidden.states @ model.head.weight.T
    baseline.step(logits[:, split:], hidden.features[:, split:], base.k, base.w, BETA, logits[:, :split])


def _decode(bench: Bench, model: Counted, what: str, steps: int, **options: Any) -> Row:
    """One watched decode; peak memory with the weights."""
    bench.free()
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    found = watch(bench, model, steps, **options)
    row: Row = {"what": what, "size": f"{len(found) - 1} steps after the first"}
    row["ours_ms"] = statistics.median(step["ms"] for step in found[1:])
    row["distinct_share"] = statistics.mean(step["distinct"] for step in found[1:]) / bench.plan.base.size
    if bench.cuda:
        row["ours_gb"] = torch.cuda.max_memory_allocated() / 1e9
    show(row)
    return row | {"steps": found}


def summary(what: str, steps: Sequence[Row], share: float, base: Point, paper: Row) -> Row:
    """The steps whose share of distinct rows is nearest to the wanted one."""

    def distance(step: Row) -> float:
        return abs(step["distinct"] / base.size - share)

    near = [step for step in steps if distance(step) == min(map(distance, steps))]
    rows = statistics.mean(step["distinct"] for step in near)
    row: Row = {"what": what, "size": f"{len(near)} steps", "distinct_share": rows / base.size}
    row["ours_ms"] = statistics.median(step["ms"] for step in near)
    if "baseline_ms" in paper:
        row |= {"baseline_ms": paper["baseline_ms"], "speedup": paper["baseline_ms"] / row["ours_ms"]}
    show(row)
    return row


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    f.__name__: f for f in (machine, vocab, sample, gram, solver, mmr, step, growth, body, decode)
}


def run(
    plan: Plan, device: str, names: Sequence[str], out: Path, small: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """Measure the machine and the named sections and merge them into the JSON, which is written after each.

    `fresh`: results of another machine or of other sizes are replaced; otherwise they are an error.
    """
    bench = Bench(plan, device)
    old = read(out) or {}
    results: dict[str, Any] = {"base": str(plan.base), "small": small, "sections": old.get("sections", {})}
    for name in SECTIONS:
        if name not in names and name != "machine":
            continue
        print(name, flush=True)
        about = " ".join((SECTIONS[name].__doc__ or "").split())
        began, section = time.perf_counter(), {"about": about}
        try:
            section["rows"] = SECTIONS[name](bench)
        except Exception as error:  # the other sections are worth having
            traceback.print_exc()
            section["error"] = one_line(error)
        section["seconds"] = time.perf_counter() - began
        if name == "machine":
            if "error" in section:
                sys.exit(f"error: the machine could not be measured: {section['error']}")
            if old and origin(old) != origin(results | {"sections": {name: section}}):
                if not fresh:
                    sys.exit(f"error: {out} holds results of {' on '.join(map(str, origin(old)))}; "
                             "give another --out, or --fresh to replace them")  # fmt: skip
                results["sections"] = {}
        section["rates"] = {"bandwidth": bench.bandwidth, "rate": bench.rate, "sustained": bench.sustained}
        sections = results["sections"] | {name: section}
        results["sections"] = {key: sections[key] for key in SECTIONS if key in sections}
        results["targets"] = targets(results)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        bench.free()
    return results


def read(path: Path) -> dict[str, Any] | None:
    """The results in a file; None where there are none."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return results if isinstance(results, dict) and "sections" in results else None


def origin(results: Mapping[str, Any]) -> tuple[str, str | None]:
    """The sizes and the device of results; other ones must not be mixed with them."""
    rows = results["sections"].get("machine", {}).get("rows")
    return results["base"], rows[0]["what"] if rows else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="of " + ",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=ROOT / "src/d5p4_lab/results/bench/gpu.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/performance.svg")
    parser.add_argument("--page", type=Path, help="a page whose tables are made anew, such as docs/performance.md")
    parser.add_argument("--fresh", action="store_true", help="replace results of another machine or size")
    parser.add_argument("--draw-only", action="store_true", help="tables and figure from the JSON; nothing is measured")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.sections.split(",") if name.strip()]
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.draw_only:
        results = read(options.out)
        if results is None:
            parser.error(f"{options.out} holds no results of this program")
    else:
        try:
            device = choose_device(options.device)
        except d5p4.D5P4Error as error:
            parser.error(str(error))
        plan = make_small_plan() if options.small else make_plan()
        results = run(plan, str(device), names, options.out, options.small, options.fresh)
    print(report(results))
    if options.page:
        options.page.write_text(fill(options.page.read_text(encoding="utf-8"), results), encoding="utf-8")
    try:
        figure(results, options.figure)
    except ImportError:
        print(
            f"no figure, matplotlib is not installed: --draw-only makes {options.figure} from {options.out} elsewhere"
        )


if __name__ == "__main__":
    main()
