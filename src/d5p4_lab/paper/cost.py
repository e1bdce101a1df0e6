"""Measures the time and memory of each stage of a decoding step: forward, selection, sampling.

Whole steps at the paper's size come from the committed GPU benchmark (`python -m d5p4_lab bench gpu`). It times neither
the paper's *Baseline*, which draws tokens for every row of the pool, nor the paper's diverse beam search. So this
module times selection and sampling in all ways on the machine that runs the experiment: on a GPU with logits of the
paper's size, on a CPU with small ones, in float64. A *way* is one way to compute a step, such as `THEIRS` or `OURS`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from d5p4.decode.measures import normalise
from d5p4.errors import D5P4Error
from d5p4.ops.gram import pool_gram
from d5p4.ops.partition_map import partition_map
from d5p4.rng import mix, uniform
from d5p4.search.dpp import dpp_kernel

from .. import baseline, bench
from ..baseline import BETA, draw_logits, row_stats
from ..baseline import sample as draw_as_the_paper
from ..statistics import Figure, figure
from ..tables import Table, shown
from ..timing import clock, in_new_process, measured, one_thread
from .drawing import Claim, Drawing, Verdict, decided, every
from .rows import Row, Source, complete
from .setup import Experiment, Setup

ALPHA = 20.0  # of diverse beam search; its time does not depend on it
RESULTS = bench.RESULTS / "gpu.jsonl.xz"
# From the left half of the paper's table: ms for selection, ms for categorical sampling, ms for both, and peak GB.
PAPER = {"Baseline": (22.7, 86.1, 108.8, 132.8), "DivBS": (58.7, 9.4, 68.1, 79.3), "D5P4": (46.6, 9.5, 56.1, 79.3)}
PAPER_FORWARD = 929.0  # the paper's forward takes about this many ms
INDEPENDENT, THEIRS, OURS = "every row for itself", "D5P4, the paper's way", "D5P4, ours"
DIVERSE_BEAM = "diverse beam, the paper's way (embeddings)"


class Shape(NamedTuple):
    """The sizes of a pool: k groups of w rows, and the positions, tokens and hidden width of a row."""

    k: int
    w: int
    length: int
    vocabulary: int
    width: int

    def __str__(self) -> str:
        return f"{self.k}×{self.w}, L {self.length}, V {self.vocabulary}, D {self.width}"


def shape_of(setup: Setup, kind: str) -> Shape:
    return Shape(setup["k"], setup["w"], *setup["shapes"]["cuda" if kind == "cuda" else "cpu"])


def stages(setup: Setup, kind: str) -> Source:
    """Return the `Source` that times selection and sampling on a kind of device. It makes one row per run."""
    shape = shape_of(setup, kind)

    def make(keys: Sequence[str]) -> dict[str, Row]:
        given = shape, str(setup.torch_device), setup["repeats"]
        return {key: in_new_process(_run, *given, setup.seed + int(key)) for key in keys}

    keys = [str(run) for run in range(setup["runs"])]
    return setup.source(f"runs-{kind}", keys, make, repeats=setup["repeats"], **shape._asdict())


def _run(shape: Shape, device: str, repeats: int, seed: int) -> Row:
    """Return the medians over the repeats of a run."""
    place = torch.device(device)
    with one_thread(place):
        repeated = [measure(shape, place, seed) for _ in range(repeats)]
    by_way = {
        way: {part: float(np.median([one[way][part] for one in repeated])) for part in parts}
        for way, parts in repeated[0].items()
    }
    return {"machine": clock(place), "stages": by_way}


def sources(setup: Setup) -> list[Source]:
    if setup.scale == "paper" and setup.decoding and setup.torch_device.type != "cuda":
        raise D5P4Error("cost --scale paper measures pools of LLaDA-8B's size and needs a GPU; use --scale box")
    return [stages(setup, setup.torch_device.type)]


# --- what is measured ---

select_as_the_paper = partial(baseline.select, beta=BETA)


def select_as_ours(logits: Tensor, states: Tensor, k: int) -> Tensor:
    """Select k parents as this library does: compute entropies in one pass over the logits, then run a local search.

    The search has k starts (solver "local-search"), as it had when the committed times were measured.
    """
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    entropy = row_stats(logits.flatten(0, 1), banned, ("entropy",))["entropy"].view(logits.shape[:2])
    quality = normalise(-entropy.mean(-1)[None], "minmax", "entropy", logits.shape[-1])
    similarity = pool_gram(states, torch.arange(len(states), device=states.device)[None])
    kernel = dpp_kernel("additive", quality, similarity, BETA)[0].to(similarity.dtype)
    return partition_map(kernel, k, None, quality, starts="k")[0]


def draw_as_ours(logits: Tensor, parents: Tensor, draws: int) -> Tensor:
    """Draw tokens [k * L, draws] as this library does: from keyed uniform numbers, without a copy of the logits."""
    length = logits.shape[1]
    rows = (parents[:, None] * length + torch.arange(length, device=logits.device)).flatten()
    u = uniform(mix(rows[:, None], 1), torch.arange(draws, device=logits.device))
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    return draw_logits(logits.flatten(0, 1), banned, u, rows=rows)[0]


def measure(shape: Shape, device: torch.device, seed: int) -> dict[str, dict[str, float]]:
    """Measure the ms and the peak GB of selection and sampling in each way, on the same random logits."""
    k, w, length, vocabulary, width = shape
    source = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(k * w, length, vocabulary, generator=source, device=device, dtype=dtype)
    states = torch.randn(k * w, length, width, generator=source, device=device, dtype=dtype)

    def way(select: Callable[..., Tensor], draw: Callable[[Tensor], Tensor]) -> dict[str, float]:
        parents, select_ms, select_gb = measured(lambda: select(logits, states, k), device)
        _, draw_ms, draw_gb = measured(lambda: draw(parents), device)
        return {"selection": select_ms, "sampling": draw_ms, "gb": max(select_gb, draw_gb)}

    def as_the_paper(parents: Tensor) -> Tensor:
        return draw_as_the_paper(logits[parents], w)

    _, draw_ms, draw_gb = measured(lambda: draw_as_the_paper(logits, 1), device)
    return {
        INDEPENDENT: {"selection": 0.0, "sampling": draw_ms, "gb": draw_gb},
        DIVERSE_BEAM: way(partial(baseline.select_diverse_beam, alpha=ALPHA), as_the_paper),
        THEIRS: way(select_as_the_paper, as_the_paper),
        OURS: way(select_as_ours, lambda rows: draw_as_ours(logits, rows, w)),
    }


# --- drawing ---


class Measured(NamedTuple):
    """Times and memory of the stages after the forward on one machine."""

    where: str  # the machine
    size: str  # the shape of the pool
    by_way: Mapping[str, Mapping[str, np.ndarray]]  # ms or GB by way and stage: an array with one value per run

    @property
    def label(self) -> str:
        return f"{self.where}, {self.size}"

    def total(self, way: str) -> np.ndarray:
        return self.by_way[way]["selection"] + self.by_way[way]["sampling"]


def _measured(setup: Setup) -> list[Measured]:
    """The rows of all kinds of devices that have rows, those of GPUs first."""
    sources = {kind: stages(setup, kind) for kind in ("cuda", "cpu")}
    results = []
    for kind in [kind for kind, source in sources.items() if len(setup.rows(source))] or ["cpu"]:
        rows = complete(setup, sources[kind])
        by_way = {
            way: {part: np.array([row["stages"][way][part] for row in rows]) for part in parts}
            for way, parts in rows[0]["stages"].items()
        }
        where = ", ".join(sorted({row["machine"] for row in rows}))
        results.append(Measured(where, str(shape_of(setup, kind)), by_way))
    return results


PARTS = ("selection", "sampling", "after_forward", "forward", "whole_step", "gb")
Steps = Mapping[str, Mapping[str, Any]]  # ms or GB by way and part; None if the benchmark does not time this part alone


def _steps(results: Mapping[str, Any]) -> Steps:
    """The parts of a step in the GPU benchmark, as the paper computes a step and as this library does."""
    rows = {row["what"]: row for section in ("step", "decode") for row in bench.rows_of(results, section)}
    stored, first = rows["step, logits in memory"], rows["baseline step"]
    whole, streamed = rows["no duplicates"]["ours_ms"], rows["step, streamed head"]["ours_ms"]
    after, step = stored["baseline_ms"], first["baseline_ms"]
    theirs = stored["baseline_select_ms"], stored["baseline_sample_ms"], after, step - after, step, first["baseline_gb"]
    peak = max(row["ours_gb"] for what, row in rows.items() if "order, T" in what)
    ours = None, None, stored["ours_ms"], whole - streamed, whole, peak
    return {way: dict(zip(PARTS, values, strict=True)) for way, values in ((THEIRS, theirs), (OURS, ours))}


def draw(setup: Setup) -> Drawing:
    results, here = bench.read_sections(RESULTS), _measured(setup)
    gpu, on = _steps(results), bench.rows_of(results, "machine")[0]["what"]
    figures: dict[str, Any] = {"benchmark": {"machine": on, **gpu}}
    for one in here:
        figures[one.label] = {way: {part: figure(x) for part, x in by.items()} for way, by in one.by_way.items()}
    tables = [_table_gpu(gpu, f"{on} ({results['base']})"), *map(_table_here, here)]
    return Drawing(tables, None, figures, _claims(gpu, here[0], on))


def _table_gpu(gpu: Steps, on: str) -> Table:
    def row(name: str, values: Iterable[float | None]) -> list[str]:
        return [name, *("" if value is None else f"{value:.1f}" for value in values)]

    rows = []
    for name, (selection, sampling, total, peak) in PAPER.items():
        values = selection, sampling, total, PAPER_FORWARD, PAPER_FORWARD + total, peak
        rows.append(row(f"{name}, in the paper", values))
    rows += [row(name, way.values()) for name, way in gpu.items()]
    note = (
        "The paper used two H200 GPUs and LLaDA-8B, with 6×10 rows per GPU. The other rows come from the GPU "
        f"benchmark on {on} with random weights of LLaDA's shape. Memory is the peak of a whole step and includes "
        "the weights. Our code selects and samples in one stage, from logits in memory; while decoding, this includes "
        "the head's matrix product, so the forward is shorter by that much. No rows are equal, which is our worst case."
    )
    columns = ("way", "selection, ms", "sampling, ms", "after the forward, ms", "forward, ms", "step, ms", "peak GB")
    return Table("One step by stage", columns, rows, note)


def _table_here(here: Measured) -> Table:
    rows = []
    for way, x in here.by_way.items():
        selection = shown(figure(x["selection"]), 1) if x["selection"].any() else ""
        times = [shown(figure(x["sampling"]), 1), shown(figure(here.total(way)), 1)]
        rows.append([way, selection, *times, f"{1e3 * x['gb'].max():.1f}"])
    note = (
        f"Pools of {here.size}, {len(here.total(OURS))} processes, random logits in memory, whose size is not in the "
        f'peak. "{INDEPENDENT.capitalize()}" draws tokens for every row of the pool and selects none. The paper\'s '
        "diverse beam search computes its penalties from the flattened features at every pick. "
    )
    if "CPU" in here.where:
        note += "On a CPU our operations are the plain versions in float64, made to be exact rather than fast."
    columns = ("way", "selection, ms", "sampling, ms", "both, ms", "peak MB")
    return Table(f"The stages after the forward, on {here.where}", columns, rows, note.strip())


def _claims(gpu: Steps, here: Measured, on: str) -> list[Claim]:
    theirs = here.by_way[THEIRS]
    time = figure(np.log(here.total(INDEPENDENT) / here.total(THEIRS)))
    sampling = figure(np.log(here.by_way[INDEPENDENT]["sampling"] / theirs["sampling"]))
    beam = figure(np.log(here.by_way[DIVERSE_BEAM]["selection"] / theirs["selection"]))
    memory = {way: float(x["gb"].max()) for way, x in here.by_way.items()}
    where = f"measured on {here.label}" + ("; these sizes are small, and this is no GPU" if "CPU" in here.where else "")
    kinds = {"after_forward": "ms after the forward", "whole_step": "ms per step", "gb": "GB at the peak"}
    pairs = [(gpu[THEIRS][part], gpu[OURS][part], what) for part, what in kinds.items()]
    smaller = ", ".join(f"{before:.1f} → {after:.1f} {what}" for before, after, what in pairs)
    verdicts: list[Verdict] = ["holds" if after < before else "does not hold" for before, after, _ in pairs]
    return [
        Claim(
            "D5P4 takes less time after the forward than drawing tokens for every row of the pool",
            "108.8 → 56.1 ms, sampling 86.1 → 9.5 ms (two H200, LLaDA-8B, 6×10 rows per GPU)",
            f"D5P4 as the paper computes it takes {_part(time)} of that time (sampling alone {_part(sampling)})",
            decided(time),
            f"{where}; the paper's Baseline includes 22.7 ms of selection, but our version of it selects nothing",
        ),
        Claim(
            "D5P4 takes less peak memory than drawing tokens for every row of the pool",
            "132.8 → 79.3 GB (two H200, LLaDA-8B, 6×10 rows per GPU)",
            f"peak without the logits: {1e3 * memory[INDEPENDENT]:.0f} → {1e3 * memory[THEIRS]:.0f} MB",
            "holds" if memory[THEIRS] < memory[INDEPENDENT] else "does not hold",
            f"{where}; memory is counted, so it is the same in every run",
        ),
        Claim(
            "D5P4 selects faster than the paper's diverse beam search, which has no Gram matrix",
            "46.6 against 58.7 ms",
            f"D5P4's selection takes {_part(beam)} of the time of diverse beam search",
            decided(beam),
            f"{where}; both in plain torch, from the same logits and features",
        ),
        Claim(
            "Ours: a step of D5P4 takes less time and memory in our code than as the paper computes it",
            "not measured",
            f"{on}, LLaDA-8B's shape: {smaller}",
            every(verdicts),
            "these are medians of one run of the GPU benchmark, without intervals",
        ),
    ]


def _part(log_ratio: Figure) -> str:
    """Return new time / old time and its 95 % interval as text, given the logarithm of old time / new time."""
    value, low, high = (math.exp(-x) for x in (log_ratio.value, log_ratio.high, log_ratio.low))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


_BOX = {
    "runs": 5,  # processes
    "repeats": 3,  # in a run, which counts with their medians
    "k": 6,
    "w": 10,
    "shapes": {"cpu": [32, 8192, 256], "cuda": [256, 126464, 4096]},  # positions, tokens, width; LLaDA-8B's on a GPU
}
EXPERIMENT = Experiment(
    name="cost",
    title="Time and memory of one step by stage",
    paper="Table scalability (left)",
    settings={"box": _BOX, "paper": _BOX},
    sources=sources,
    draw=draw,
)
