"""Measure how often each solver of `d5p4.methods.partition_map` finds the best set, and how long it takes on CUDA.

    python -m d5p4_lab bench solver_quality [INSTANCES] [--device cuda] [--sections NAME,NAME] [--out FILE]
    python -m d5p4_lab bench solver_quality --table        prints the tables of the last run

Every section compares the solvers on random kernels whose rows share a common component:
 * kernels: 48 settings of k = 4, 5 or 6 and w = 4, with 16 or 768 dimensions, related or unrelated children, and four
   kernels (additive with beta 1, 10 or 100, and multiplicative with beta 1). Each setting has INSTANCES kernels, by
   default 80.
 * low-dimensional: 48 settings of 24 dimensions, k = 3, 4 or 5, w = 3 or 4, additive with beta 0, 1, 30 or 300, where
   the common component is 0.2 or 0.9 of the squared length. Each setting has 12 kernels.
 * times: the time per pool on CUDA, beside a step of LLaDA-8B's shape from the results of `bench gpu`.
In the first two sections, which run on one CPU thread, the best set is known from exhaustive search. By default these
two sections run. With `--device cuda`, the last two run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d5p4.errors import D5P4Error
from d5p4.methods.dpp import dpp_kernel
from d5p4.ops.partition_map import partition_map
from d5p4.ops.problem import prepare

from ..methods.exact import exhaustive
from ..provenance import about
from ..tables import Row, Tables, markdown
from ..timing import graph_ms, median_ms, one_thread, wall
from . import RESULTS, chosen, make_parser, measure_section, read_sections, rows_of, show, write_sections

CPU = torch.device("cpu")
RESULT = RESULTS / "solver_quality.jsonl.xz"
PAPER, LOCAL, DEFAULT = "n-starts", "local-search", "full-search"
SOLVERS: dict[str, dict[str, Any]] = {  # `local-one` is no solver of the methods
    "one-start": dict(starts="one", local_search=False),
    "k-starts": dict(starts="k", local_search=False),
    PAPER: dict(starts="n", local_search=False),
    "local-one": dict(starts="one"),
    LOCAL: dict(starts="k"),
    DEFAULT: dict(starts="n"),
}
LABELS = {
    "one-start": "greedy, one start (`one-start`)",
    "k-starts": "greedy, k starts (`k-starts`, the paper's text)",
    PAPER: "greedy, n starts (`n-starts`, the paper's code)",
    "local-one": "one start + local search",
    LOCAL: "k starts + local search (`local-search`)",
    DEFAULT: "**n starts + local search (`full-search`, the default)**",
}
KERNELS = [("additive", 1.0), ("additive", 10.0), ("additive", 100.0), ("multiplicative", 1.0)]
LOW, DIMENSIONS = "low-dimensional", 24  # the section of few dimensions
STEP_ROWS = 60  # the rows of the step that `bench gpu` measured
SIZES = ((6, 10), (32, 32), (64, 32))  # the sizes (k, w) of the section `times`
TIMED = (PAPER, LOCAL, DEFAULT)
SECTIONS = ("kernels", LOW, "times")


def instances(
    count: int, k: int, w: int, width: int, kin: float, seed: int, shared: float = 0.8
) -> tuple[Tensor, Tensor]:
    """Return random quality [count, kw] in [0, 1] and similarity [count, kw, kw].

    Rows are random vectors that share one component, which is `shared` of their squared length. `kin` is the share of
    the rest that siblings have in common.
    """
    g = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, width, generator=g, dtype=torch.float64), dim=-1)

    own = kin**0.5 * unit(count, k, 1) + (1 - kin) ** 0.5 * unit(count, k, w)
    rows = shared**0.5 * unit(count, 1, 1) + (1 - shared) ** 0.5 * own
    rows = torch.nn.functional.normalize(rows.flatten(1, 2), dim=-1)
    quality = torch.randn(count, k * w, generator=g, dtype=torch.float64)
    low, high = quality.amin(-1, keepdim=True), quality.amax(-1, keepdim=True)
    return (quality - low) / (high - low), rows @ rows.mT


class Pools(NamedTuple):
    """Random problems of one setting."""

    k: int
    kernel: Tensor  # [count, kw, kw]
    gain: Tensor | None  # [count, kw]
    quality: Tensor  # [count, kw]
    large: bool  # whether beta is at least 30


def pools_of(section: str, count: int) -> Iterator[Pools]:
    """Yield the problems of one of the first two sections, with `count` problems per setting."""
    if section == "kernels":
        settings = itertools.product((4, 5, 6), (16, 768), (0.0, 0.7), KERNELS)
        for seed, (k, width, kin, (kind, beta)) in enumerate(settings):
            quality, similarity = instances(count, k, 4, width, kin, seed)
            yield Pools(k, *dpp_kernel(kind, quality, similarity, beta), quality, beta >= 30)
    else:
        low = itertools.product((3, 4, 5), (3, 4), (0.0, 1.0, 30.0, 300.0), (0.2, 0.9))
        for seed, (k, w, beta, shared) in enumerate(low):
            quality, similarity = instances(count, k, w, DIMENSIONS, 0.0, seed, shared)
            yield Pools(k, *dpp_kernel("additive", quality, similarity, beta), quality, beta >= 30)


def compare(section: str, count: int) -> list[Row]:
    """Return one row per solver: the share of optimal sets, the gaps in nats, and the share below greedy n starts."""
    gaps: dict[str, list[Tensor]] = {name: [] for name in SOLVERS}
    spent = dict.fromkeys(SOLVERS, 0.0)
    large = []
    with one_thread(CPU):
        for k, kernel, gain, quality, is_large in pools_of(section, count):
            problem = prepare(kernel, k, gain)  # without tie hashes, so that rows are not reordered
            best = problem.score(exhaustive(kernel, k, gain, quality)[:, None])[1][:, 0]
            large += [is_large] * count
            for name, options in SOLVERS.items():
                sets, seconds = wall(partial(partition_map, kernel, k, gain, quality, **options), CPU)
                spent[name] += seconds
                gaps[name].append(best - problem.score(sets[:, None])[1][:, 0])
    joined, at_large = {name: torch.cat(parts) for name, parts in gaps.items()}, torch.tensor(large)
    return [
        show(
            {
                "solver": name,
                "kernels": len(gap),
                "optimal": int((gap < 1e-9).sum()),
                "large": int(at_large.sum()),
                "optimal_large": int((gap < 1e-9)[at_large].sum()),
                "mean_gap": gap.mean().clamp(min=0).item(),
                "largest_gap": gap.max().clamp(min=0).item(),
                "below_paper": int((gap > joined[PAPER] + 1e-9).sum()),
                "time": spent[name] / spent[DEFAULT],
            }
        )
        for name, gap in joined.items()
    ]


def times(device: torch.device) -> list[Row]:
    """Return one row per size and solver: the time per pool for 768 dimensions, related children and beta 10."""
    if device.type != "cuda":
        raise D5P4Error(f"the section times needs CUDA, and the device is {device}; give --device cuda")
    rows = []
    for k, w in SIZES:
        quality, similarity = (x.to(device).float() for x in instances(1, k, w, 768, 0.7, seed=0))
        kernel = dpp_kernel("additive", quality, similarity, 10.0)[0]
        tie = torch.arange(k * w, device=device)[None]
        for name in TIMED:
            call = partial(partition_map, kernel, k, None, quality, tie, **SOLVERS[name])
            row = {"size": f"{k}×{w}", "solver": name, "ms": median_ms(call, device, 0.3)}
            rows.append(show(row | {"graph_ms": graph_ms(call, device, 0.3, 10)}))
    return rows


def llada_step() -> float:
    """Return the ms of a step of LLaDA-8B's shape (6×10 different rows of 384 tokens), as `bench gpu` measured it."""
    rows = rows_of(read_sections(RESULTS / "gpu.jsonl.xz"), "decode")
    return next(row["ours_ms"] for row in rows if row["what"] == "no duplicates")


def _origin(section: Mapping[str, Any]) -> str:
    origin = section["about"]
    return f"Measured on {origin['machine']}, torch {origin['torch']}, with `{origin['command']}`."


def quality_table(results: Mapping[str, Any], name: str) -> str:
    """Return the Markdown table of one of the first two sections, followed by the origin of the figures."""
    cells = []
    for row in rows_of(results, name):
        share = f"{100 * row['optimal'] / row['kernels']:.2f} %"
        large = f"{row['optimal_large']} of {row['large']}"
        below = f"{100 * row['below_paper'] / row['kernels']:.1f} %"
        gaps = f"{row['mean_gap']:.4f}", f"{row['largest_gap']:.2f}"
        cells.append([LABELS[row["solver"]], share, large, *gaps, below, f"{row['time']:.2f}"])
    if not cells:
        return "Not measured yet."
    heads = ["solver", "optimal", "optimal, β ≥ 30", "mean gap (nats)", "largest gap", "below n starts", "time"]
    count = rows_of(results, name)[0]["kernels"]
    note = f"{count:,} kernels. The times are relative to the default, on one CPU thread."
    return f"{markdown(heads, cells)}\n\n{note}\n{_origin(results['sections'][name])}"


def times_table(results: Mapping[str, Any]) -> str:
    """Return the Markdown table of the section `times`, followed by the origin of the figures."""
    step, cells = llada_step(), []
    for row in rows_of(results, "times"):
        rows = math.prod(map(int, row["size"].split("×")))
        share = f"{100 * row['ms'] / (step * rows / STEP_ROWS):.3f} %"
        cells.append([row["size"], f"`{row['solver']}`", row["ms"], row["graph_ms"], share])
    if not cells:
        return "Not measured yet."
    heads = ["k×w", "solver", "ms", "ms in a CUDA graph", "share of a step"]
    note = (
        f"A step of LLaDA-8B's shape with {STEP_ROWS} different rows takes {step:.0f} ms (results/bench/gpu.jsonl.xz). "
        "The share is of a step with as many rows as the pool, whose time is in proportion.\n"
    )
    return f"{markdown(heads, cells)}\n\n{note}{_origin(results['sections']['times'])}"


def tables(results: Mapping[str, Any]) -> Tables:
    drawn: dict[str, Any] = {name: partial(quality_table, results, name) for name in ("kernels", LOW)}
    return drawn | {"times": partial(times_table, results)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("solver_quality", __doc__)
    parser.add_argument("instances", type=int, nargs="?", default=80, help="kernels per setting of the section kernels")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for the times")
    parser.add_argument("--sections", default=None, help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print the tables of the last run")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    results = read_sections(options.out)
    if not options.table:
        usual = f"{LOW},times" if device.type == "cuda" else f"kernels,{LOW}"
        for name in chosen(options.sections or usual, SECTIONS, "section"):
            count = options.instances if name == "kernels" else 12
            measure = partial(times, device) if name == "times" else partial(compare, name, count)
            origin = about(device if name == "times" else CPU, ["bench", "solver_quality", *arguments])
            results["sections"][name] = measure_section(name, measure, about=origin)
        write_sections(options.out, results)
    for name, table in tables(results).items():
        print(f"\n### {name}\n{table()}")
