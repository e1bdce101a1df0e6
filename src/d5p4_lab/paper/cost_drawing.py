"""The tables, the figure and the claims of the experiment `cost`.

A *way* is one way to compute a step, such as `THEIRS` (as the paper does) or `OURS` (as this library does).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..figures import pyplot
from ..statistics import Figure, figure
from ..tables import Table, shown
from .drawing import Claim, Drawing, Verdict, decided, every

# From the left half of the paper's table: ms for selection, ms for categorical sampling, ms for both, and peak GB.
PAPER = {
    "Baseline": (22.7, 86.1, 108.8, 132.8),
    "DivBS": (58.7, 9.4, 68.1, 79.3),
    "D5P4": (46.6, 9.5, 56.1, 79.3),
}
PAPER_FORWARD = 929.0  # the paper's forward takes about this many ms
INDEPENDENT, THEIRS, OURS = "every row for itself", "D5P4, the paper's way", "D5P4, ours"
DIVERSE_BEAM = "diverse beam, the paper's way (embeddings)"
GRAM_BEAM = "diverse beam on the Gram matrix"
Steps = Mapping[str, Mapping[str, float | None]]
"""Results of the GPU benchmark: ms or GB by way and stage. None if the benchmark does not time this stage alone."""


class Measured(NamedTuple):
    """Times and memory of the stages after the forward on one machine."""

    where: str  # the machine
    size: str  # the shape of the pool of a rank
    ranks: int
    by_way: Mapping[str, Mapping[str, np.ndarray]]  # ms or GB by way and stage: an array with one value per repeat

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]], size: str, ranks: int) -> Measured:
        by_way = {
            way: {part: np.array([row["stages"][way][part] for row in rows]) for part in parts}
            for way, parts in rows[0]["stages"].items()
        }
        return Measured(", ".join(sorted({row["machine"] for row in rows})), size, ranks, by_way)

    @property
    def label(self) -> str:
        return f"{self.where}, {self.size}" + (" per rank" if self.ranks > 1 else "")

    def total(self, way: str) -> np.ndarray:
        return self.by_way[way]["selection"] + self.by_way[way]["sampling"]


def drawing(results: Mapping[str, Any], measured: Sequence[Measured]) -> Drawing:
    """Draw the results of the GPU benchmark, and what was measured by this experiment. The claims use `measured[0]`."""
    gpu = _steps(results)
    return Drawing(
        tables=[_table_gpu(gpu, results), *map(_table_here, measured)],
        figure=_figure(gpu, measured[0], _machine(results)),
        figures={"benchmark": {"machine": _machine(results), **gpu}}
        | {
            here.label: {way: {part: figure(x) for part, x in by.items()} for way, by in here.by_way.items()}
            for here in measured
        },
        claims=_claims(gpu, measured[0], _machine(results)),
    )


def _machine(results: Mapping[str, Any]) -> str:
    return results["sections"]["machine"]["rows"][0]["what"]


def _row(results: Mapping[str, Any], section: str, what: str, size: str = "") -> dict[str, Any]:
    rows = results["sections"].get(section, {}).get("rows", ())
    return next((row for row in rows if row["what"] == what and row.get("size", "").startswith(size)), {})


def _steps(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the time and memory of each stage, for each way to compute a step that the benchmark times."""
    base = results["base"].split(",")[0]
    stored, streamed = _row(results, "step", "step, logits in memory"), _row(results, "step", "step, streamed head")
    whole, first = _row(results, "decode", "no duplicates"), _row(results, "decode", "baseline step")
    runs = [row for row in results["sections"].get("decode", {}).get("rows", ()) if "order, T" in row["what"]]
    solver, mmr = _row(results, "solver", "partition MAP", f"{base}, P 1"), _row(results, "mmr", "MMR", f"{base}, P 1")
    theirs = {
        "selection": stored.get("baseline_select_ms"),
        "sampling": stored.get("baseline_sample_ms"),
        "after_forward": stored.get("baseline_ms"),
        "whole_step": first.get("baseline_ms"),
        "after_forward_gb": stored.get("baseline_gb"),
        "gb": first.get("baseline_gb"),
    }
    ways: dict[str, dict[str, float | None]] = {THEIRS: theirs}
    if theirs["selection"] is not None and solver and mmr:
        more = mmr["baseline_ms"] - solver["baseline_ms"]
        parts = ("selection", "after_forward", "whole_step")
        ways[GRAM_BEAM] = theirs | {part: theirs[part] and theirs[part] + more for part in parts}
    ways[OURS] = {
        "selection": None,
        "sampling": None,
        "after_forward": stored.get("ours_ms"),
        "whole_step": whole.get("ours_ms"),
        "after_forward_gb": stored.get("ours_gb"),
        "gb": max((row["ours_gb"] for row in runs if "ours_gb" in row), default=None),
        "graph": stored.get("ours_graph_ms"),
        "streamed": streamed.get("ours_ms"),
    }
    for way in ways.values():
        whole_ms, after = way["whole_step"], way.get("streamed", way["after_forward"])
        way["forward"] = None if whole_ms is None or after is None else whole_ms - after
    return ways


def _cell(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table_gpu(gpu: Steps, results: Mapping[str, Any]) -> Table:
    rows = []
    for name, (selection, sampling, total, memory) in PAPER.items():
        cells = [*map(_cell, (selection, sampling, total)), f"{PAPER_FORWARD:.0f}", _cell(PAPER_FORWARD + total)]
        rows.append([f"{name}, in the paper", *cells, _cell(memory)])
    parts = ("selection", "sampling", "after_forward", "forward", "whole_step", "gb")
    rows += [[name, *(_cell(way[part]) for part in parts)] for name, way in gpu.items()]
    ours = gpu[OURS]
    note = (
        "The paper used two H200 GPUs and LLaDA-8B, with 6×10 rows per GPU. The other rows come from the GPU "
        f"benchmark on {_machine(results)} ({results['base']}) with random weights of LLaDA's shape. Memory is the "
        "peak of a whole step and includes the weights. "
    )
    if ours.get("graph") is not None and ours.get("streamed") is not None:
        note += (
            f"Our code selects and samples in one stage. It takes {ours['after_forward']:.2f} ms from logits in "
            f"memory, {ours['graph']:.2f} ms as a CUDA graph, and {ours['streamed']:.1f} ms if it includes the head's "
            "matrix product. Decoding includes the product, so its forward is shorter by that much. The whole step "
            "has no duplicate rows, which is our worst case. "
        )
    if GRAM_BEAM in gpu:
        note += (
            f'"{GRAM_BEAM}" is the D5P4 step with the time of the other solver, which adds up entries of the Gram '
            "matrix. The paper's DivBS has no Gram matrix: it computes its penalties from the embeddings at every pick "
            "(measured in the next table)."
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
        f"Measured on {here.where} with pools of {here.size}, {len(here.total(OURS))} repeats and random logits in "
        f'memory. "{INDEPENDENT.capitalize()}" draws tokens for every row of the pool and selects none; the paper\'s '
        f'Baseline draws the same way. "{DIVERSE_BEAM[0].upper()}{DIVERSE_BEAM[1:]}" computes its penalties again from '
        "the flattened features at every pick, without a Gram matrix. Memory is the peak without the logits. "
    )
    if here.ranks > 1:
        note += (
            f"{here.ranks} ranks share a pool of {here.ranks} times this size, as in the paper, and the times include "
            "their exchanges; time and memory are those of the slowest and the largest rank. In the paper's way all "
            "ranks gather all embeddings; in ours they exchange slices of the features."
        )
    elif "CPU" in here.where:
        note += (
            "On a CPU our operations are the plain versions in float64, which are made to be exact rather than fast."
        )
    columns = ("way", "selection, ms", "sampling, ms", "both, ms", "peak MB")
    return Table(f"The stages after the forward, on {here.where}", columns, rows, note.strip())


def _claims(gpu: Steps, here: Measured, on: str) -> list[Claim]:
    time = figure(np.log(here.total(INDEPENDENT) / here.total(THEIRS)))
    sampling = figure(np.log(here.by_way[INDEPENDENT]["sampling"] / here.by_way[THEIRS]["sampling"]))
    beam = figure(np.log(here.by_way[DIVERSE_BEAM]["selection"] / here.by_way[THEIRS]["selection"]))
    memory = {way: float(x["gb"].max()) for way, x in here.by_way.items()}
    small = "" if "CPU" not in here.where else "; these sizes are small, and this is no GPU"
    return [
        Claim(
            f"D5P4 takes less time after the forward than drawing tokens for every row of the pool ({here.label})",
            "108.8 → 56.1 ms, sampling 86.1 → 9.5 ms (two H200, LLaDA-8B, 6×10 rows per GPU)",
            f"D5P4 as the paper computes it takes {_part(time)} of that time (sampling alone {_part(sampling)})",
            decided(time),
            f"the paper's Baseline includes 22.7 ms of selection, but our version of it selects nothing{small}"
            f"{_on_gpu(gpu, 'after_forward', 'ms', on)}",
        ),
        Claim(
            f"D5P4 takes less peak memory than drawing tokens for every row of the pool ({here.label})",
            "132.8 → 79.3 GB (two H200, LLaDA-8B, 6×10 rows per GPU)",
            f"peak without the logits: {1e3 * memory[INDEPENDENT]:.0f} → {1e3 * memory[THEIRS]:.0f} MB",
            "holds" if memory[THEIRS] < memory[INDEPENDENT] else "does not hold",
            f"memory is counted, so it is the same in every repeat{small}"
            f"{_on_gpu(gpu, 'gb', 'GB', on, ', a whole step with its weights')}",
        ),
        Claim(
            f"D5P4 selects faster than the paper's diverse beam search, which has no Gram matrix ({here.label})",
            "46.6 against 58.7 ms",
            f"D5P4's selection takes {_part(beam)} of the time of diverse beam search",
            decided(beam),
            f"both in plain torch, with entropies and embeddings from the same logits and features{small}"
            f"{_gram_on_gpu(gpu, on)}",
        ),
        _our_step(gpu, on),
    ]


def _part(log_ratio: Figure) -> str:
    """Return new time / old time and its 95 % interval as text, given the logarithm of old time / new time."""
    value, low, high = (math.exp(-x) for x in (log_ratio.value, log_ratio.high, log_ratio.low))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _on_gpu(gpu: Steps, part: str, unit: str, on: str, what: str = "") -> str:
    theirs, ours = gpu[THEIRS][part], gpu[OURS][part]
    if theirs is None or ours is None:
        return ""
    return (
        f"; D5P4 in the GPU benchmark ({on}, LLaDA-8B's shape{what}): {theirs:.1f} {unit} as the paper computes it, "
        f"{ours:.1f} {unit} in our code"
    )


def _gram_on_gpu(gpu: Steps, on: str) -> str:
    mine, other = gpu[THEIRS]["selection"], gpu.get(GRAM_BEAM, {}).get("selection")
    if mine is None or other is None:
        return ""
    return f"; {on}, LLaDA-8B's shape, both on the Gram matrix: D5P4 {mine:.1f} ms, diverse beam search {other:.1f} ms"


def _our_step(gpu: Steps, on: str) -> Claim:
    theirs, ours = gpu[THEIRS], gpu[OURS]
    parts = [
        (f"{before:.1f} → {after:.1f} {what}", after < before)
        for part, what in (
            ("after_forward", "ms after the forward"),
            ("whole_step", "ms per step"),
            ("gb", "GB at the peak"),
        )
        if (before := theirs[part]) is not None and (after := ours[part]) is not None
    ]
    verdicts: list[Verdict] = ["holds" if less else "does not hold" for _, less in parts]
    return Claim(
        claim="Ours: a step of D5P4 takes less time and memory in our code than as the paper computes it "
        f"({on}, LLaDA-8B's shape)",
        paper="not measured",
        ours=f"{on}: " + ", ".join(text for text, _ in parts),
        verdict=every(verdicts) if verdicts else "not testable at this scale",
        note="these are medians of one run of the GPU benchmark, without intervals",
    )


Bar = tuple[str, Mapping[str, float], float | None]  # the name of a way, its ms by stage, its peak memory


def _figure(gpu: Steps, here: Measured, on: str) -> Any:
    plt = pyplot()
    plot, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(1.6, 1))
    stages = (("selection", "#0072B2", ""), ("sampling", "#E69F00", "//"), ("selection and sampling", "#009E73", ".."))
    bars: list[Bar] = [
        (f"{name}, paper", {"selection": selection, "sampling": sampling}, memory)
        for name, (selection, sampling, _, memory) in PAPER.items()
    ]
    for name, way in gpu.items():
        selection, sampling, both = way["selection"], way["sampling"], way["after_forward"]
        if selection is not None and sampling is not None:
            bars.append((name, {"selection": selection, "sampling": sampling}, way["gb"]))
        elif both is not None:
            bars.append((name, {"selection and sampling": both}, way["gb"]))
    _bars(left, bars, stages, "GB")
    left.set_xlabel("ms after the forward of one step at 6×10")
    left.set_title(f"the paper (H200), and the GPU benchmark ({on})", fontsize=10)
    bars_here: list[Bar] = [
        (
            way.split(" (")[0],
            {part: float(x[part].mean()) for part in ("selection", "sampling")},
            1e3 * float(x["gb"].max()),
        )
        for way, x in here.by_way.items()
    ]
    _bars(right, bars_here, stages, "MB")
    right.set_xlabel("ms after the forward")
    right.set_title(f"{here.where}\n{here.size}", fontsize=10)
    handles = [plt.Rectangle((0, 0), 1, 1, fc=color, hatch=hatch, ec="white") for _, color, hatch in stages]
    plot.legend(handles, [name for name, _, _ in stages], loc="outside lower center", ncols=3)
    return plot


def _bars(axis: Any, bars: Sequence[Bar], stages: Sequence[tuple[str, str, str]], unit: str) -> None:
    """Draw one horizontal bar per way, one segment per stage, and write total time and peak memory at the bar's end."""
    for place, (_, parts, memory) in enumerate(bars):
        start = 0.0
        for name, color, hatch in stages:
            if parts.get(name):
                axis.barh(place, parts[name], left=start, color=color, hatch=hatch, edgecolor="white", height=0.7)
                start += parts[name]
        peak = "" if memory is None else f", {memory:.0f} {unit}"
        axis.annotate(f" {start:.1f} ms{peak}", (start, place), va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.margins(x=0.45)
    axis.set_xlim(left=0)
