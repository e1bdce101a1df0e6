"""The tables, the figure and the claims of the experiment `scaling`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from d5p4.errors import D5P4Error
from d5p4.result import HistoryStep

from ..bench import read
from ..figures import pyplot
from ..statistics import Figure, figure, paired_difference
from ..tables import Table, shown
from .cost import RESULTS
from .drawing import STYLES, Claim, Drawing, decided, every
from .setup import Setup
from .synthetic import WIDTH, PoolStatistics, complexity, parse_size, read_statistics, synthetic_pool

EXACT = "exact"  # this solver runs only at the smallest sizes
FREE = "k-DPP sample (*)"  # this method may choose several rows of the same group
DPPY = "k-DPP sample by DPPy (*)"  # the library of the paper's DPP samples
EMBEDDED = "diverse beam, α=10β, embeddings"  # the paper's form, which has no Gram matrix
UNRANKED = (EXACT, DPPY, EMBEDDED)  # not at every size, or with the same law as another method
PAPERS, TEXT, OURS, FULL = "greedy, n starts", "greedy, k starts", "local search", "full search"
RIVALS = ("random", "greedy beam", "diverse beam, α=β", "diverse beam, α=10β", FREE)  # in the paper
DRAWN: dict[str, dict[str, str]] = {
    "random": STYLES["random"],
    "greedy beam": STYLES["greedy beam"],
    "diverse beam, α=β": STYLES["diverse beam"],
    "diverse beam, α=10β": STYLES["diverse beam"] | {"marker": "d", "linestyle": ":"},
    EMBEDDED: STYLES["diverse beam"] | {"marker": "x", "linestyle": "-."},
    FREE: STYLES["D5P3"],
    DPPY: STYLES["D5P3"] | {"marker": "+", "linestyle": ":"},
    "partition sample": {"color": "#000000", "marker": "o", "linestyle": ":"},
    "greedy, one start": {"color": "#009E73", "marker": "1", "linestyle": ":"},
    "greedy, k starts": {"color": "#009E73", "marker": "2", "linestyle": "--"},
    "greedy, n starts": {"color": "#009E73", "marker": "X", "linestyle": "-"},
    "local search": STYLES["D5P4+"],
    "full search": STYLES["D5P4+"] | {"marker": "p", "linestyle": "--"},
}
METHODS = (*DRAWN, EXACT)
POINT = (32, 32)  # the size in the paper's table
PAPER_TABLE = {  # the milliseconds and the log det S in the paper's table
    "random": (0.1, -25.465),
    DPPY: (547.8, -25.453),
    EMBEDDED: (29.5, -24.625),
    PAPERS: (2.3, -24.483),
}


class Cell:
    """The trials of one size: for each method, columns with one value per trial."""

    def __init__(self, size: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.k, self.w = parse_size(size)
        self.names = [name for name in METHODS if all(name in row["methods"] for row in rows)]
        table = np.array([[row["methods"][name] for name in self.names] for row in rows])  # [trials, methods, 3]
        self.objective, self.cosine, self.ms = (dict(zip(self.names, table[:, :, i].T, strict=True)) for i in range(3))
        self.cosines_ms = np.array([row["cosines_ms"] for row in rows])  # the time to compute S from the rows
        ranked = [name for name in self.names if name not in UNRANKED]
        self.normalised = _normalised(self.objective, ranked)
        self.normalised_cosine = _normalised(self.cosine, ranked)
        self.rank = _ranks(self.objective, ranked)
        best = np.max([self.objective[name] for name in ranked if name != FREE], axis=0)
        self.below = {name: best - self.objective[name] for name in ranked}  # nats by which a method is below the best

    @property
    def pools(self) -> int:
        return len(self.ms[self.names[0]])

    @property
    def label(self) -> str:
        return f"{self.k}×{self.w}"

    @property
    def complexity(self) -> float:
        return complexity(self.k, self.w)

    @property
    def d5p4(self) -> str:
        """The paper's solver, a greedy search that starts from every row or, at large sizes, from one row per group."""
        return PAPERS if PAPERS in self.names else TEXT


CellValues = Callable[[Cell], Mapping[str, np.ndarray]]
"""A function that returns, for a cell, one column [trials] per method."""


def _normalised(values: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Scale the values x of a trial to (x - worst) / (best - worst) over the methods, or to 1 if all x are equal."""
    table = np.stack([values[name] for name in names])
    low, high = table.min(0), table.max(0)
    spread = np.where(high > low, high - low, 1.0)
    return {name: np.where(high > low, (values[name] - low) / spread, 1.0) for name in names}


def _ranks(values: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Rank the methods in each trial. Rank 1 is best. Values that are equal up to rounding share their mean rank."""
    table = np.stack([values[name] for name in names]).round(6)
    above = (table[None] > table[:, None]).sum(1)
    equal = (table[None] == table[:, None]).sum(1)
    return dict(zip(names, 1 + above + (equal - 1) / 2, strict=True))


def drawing(rows: Sequence[Mapping[str, Any]], steps: Sequence[PoolStatistics], setup: Setup) -> Drawing:
    """Draw the results of the trials (`rows`), and the statistics of real steps that the random pools imitate."""
    by_size: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if "methods" in row:
            by_size[row["size"]].append(row)
    batches = {row["size"]: row for row in rows if "each_ms" in row and row["size"] in setup["sizes"]}
    cells = [Cell(size, by_size[size]) for size in setup["sizes"] if by_size.get(size)]
    if not cells:
        raise D5P4Error(f"{setup.folder} contains no trials; run --stage decode first")
    cells.sort(key=lambda cell: (cell.complexity, cell.k))
    clocks = sorted({row["machine"] for trials in by_size.values() for row in trials})
    gpu = _gpu_times()
    tables = [
        _table_point(cells, clocks, gpu),
        *_tables_by_size(cells, clocks),
        _table_batch(batches, clocks),
        _table_exact(cells),
        _table_statistics(steps, setup),
    ]
    return Drawing(
        tables=[table for table in tables if table.rows],
        figure=_figure(cells, clocks),
        figures=_figures(cells, batches),
        claims=_claims(cells, clocks, gpu),
    )


def _gpu_times() -> dict[str, Any] | None:
    """The times for one 32×32 pool in the committed GPU benchmark: by section, ms of our code and of the paper's."""
    results = read(RESULTS)
    times: dict[str, Any] = {"machine": results["sections"]["machine"]["rows"][0]["what"]}
    for section in ("solver", "mmr"):
        for row in results["sections"].get(section, {}).get("rows", ()):
            if row["size"] == f"{POINT[0]}×{POINT[1]}, P 1":
                times[section] = row["ours_ms"], row["baseline_ms"]
    return times if {"solver", "mmr"} <= set(times) else None


def _point(cells: Sequence[Cell]) -> Cell:
    """Return the cell of size 32×32, as in the paper, or else the largest of the cells with the most methods."""
    exact = [cell for cell in cells if (cell.k, cell.w) == POINT]
    return exact[0] if exact else max(cells, key=lambda cell: (len(set(cell.names) - {*UNRANKED}), cell.complexity))


def _table_point(cells: Sequence[Cell], clocks: Sequence[str], gpu: Mapping[str, Any] | None) -> Table:
    cell = _point(cells)
    rows = []
    for name in cell.names:
        paper_ms, paper_value = PAPER_TABLE.get(name, (None, None))
        cells_here = []
        # Methods are compared on the same pool, because values differ more between pools than between methods.
        for values in (cell.objective, cell.cosine):
            cells_here += [f"{values[name].mean():.3f}", shown(paired_difference(values[name], values["random"]), 3)]
        paper_cells = ["" if paper_value is None else f"{paper_value:.3f}", "" if paper_ms is None else f"{paper_ms:g}"]
        rows.append([name, *cells_here, _median(cell.ms[name]), *paper_cells])
    note = (
        f"{cell.pools} pools. Times are medians on {', '.join(clocks)} in one run, in float64 on a CPU, from Q and S "
        "in memory. The paper's were measured on an H200, and that of DPPy on a CPU. The paper's diverse beam search "
        "has no S: it "
        f"computes its penalties again at every pick from the rows ({EMBEDDED}; the rows have {1 + WIDTH} dimensions "
        f"here, and 786,432 in MDLM). Computing S from the rows takes {np.median(cell.cosines_ms):.3g} ms. The other "
        "rows of diverse beam search add up entries of S. Compare raw values only within a column: the paper's kernels "
        "differ from ours. (*) This method may choose two rows of a group. Greedy from n starts is the solver of the "
        "paper's code, greedy from k starts is the solver of its text, and local search and full search (our default) "
        "are ours."
    )
    if gpu is not None:
        (ours, paper), (mmr, paper_mmr) = gpu["solver"], gpu["mmr"]
        note += (
            f" On one {gpu['machine']} (the committed GPU benchmark, one 32×32 pool, from S in memory): greedy from n "
            f"starts {paper:.2g} ms, local search by our kernel {ours:.2g} ms, diverse beam on the Gram matrix "
            f"{paper_mmr:.2g} ms, by our kernel {mmr:.2g} ms."
        )
    columns = ["method", "log det L", "log det L ahead of random", "log det S", "log det S ahead of random", "ms"]
    return Table(f"Pools of {cell.label}", [*columns, "paper: log det S", "paper: ms"], rows, note)


def _tables_by_size(cells: Sequence[Cell], clocks: Sequence[str]) -> list[Table]:
    def cellwise(values: CellValues, text: Callable[[Any], str]) -> list[list[str]]:
        return [
            [name, *(text(values(cell)[name]) if name in values(cell) else "" for cell in cells)]
            for name in METHODS
            if any(name in values(cell) for cell in cells)
        ]

    columns = ("method", *(cell.label for cell in cells))

    def mean(digits: int) -> Callable[[Any], str]:
        def text(x: Any) -> str:
            return f"{x.mean():.{digits}f}" + (f" ± {figure(x).se:.{digits}f}" if len(x) > 1 else "")

        return text

    pools = ["pools", *(str(cell.pools) for cell in cells)]
    size = ["log(w^k)", *(f"{cell.complexity:.1f}" for cell in cells)]
    empty = "Cells show mean ± standard error. Empty cells were too slow to measure."
    normalised_note = f"Values are (x - worst) / (best - worst) over the methods in each pool, without exact. {empty}"
    normalised = [size, pools, *cellwise(lambda c: c.normalised, mean(3))]
    ranks = cellwise(lambda c: c.rank, mean(2))
    times = cellwise(lambda c: c.ms, lambda x: f"{np.median(x):.3g}")
    return [
        Table("Objective log det L, normalised", columns, normalised, normalised_note),
        Table("Mean rank by log det L (1 is best)", columns, ranks, "Equal values share their mean rank."),
        Table("log det L", columns, cellwise(lambda c: c.objective, mean(3)), empty),
        Table(
            "log det S", columns, cellwise(lambda c: c.cosine, mean(3)), f"The paper's table shows log det S. {empty}"
        ),
        Table(
            "Median time of one pool, ms",
            columns,
            [*times, ["S from the rows", *(f"{np.median(cell.cosines_ms):.3g}" for cell in cells)]],
            f"On {', '.join(clocks)}, with the time to build L from Q and S, and without the time to compute S.",
        ),
    ]


def _table_batch(batches: Mapping[str, Mapping[str, Any]], clocks: Sequence[str]) -> Table:
    sizes = list(batches)
    rows = [
        [name, *(f"{batches[size]['each_ms'][name]:.3g}" if name in batches[size]["each_ms"] else "" for size in sizes)]
        for name in METHODS
        if any(name in batch["each_ms"] for batch in batches.values())
    ]
    count = next(iter(batches.values()))["batch"] if batches else 0
    labels = (size.replace("x", "×") for size in sizes)
    title = f"Time per pool when {count} pools are solved in one call, ms"
    return Table(title, ("method", *labels), rows, f"On {', '.join(clocks)}.")


def _table_exact(cells: Sequence[Cell]) -> Table:
    known = [cell for cell in cells if EXACT in cell.names]
    rows = []
    for name in (name for name in METHODS if name not in (*UNRANKED, FREE)):
        row = [name]
        for cell in known:
            gap = cell.objective[EXACT] - cell.objective[name]
            row += [f"{(gap < 1e-6).mean():.0%}", f"{gap.mean():.4f}", f"{gap.max():.3f}"]
        rows.append(row)
    columns = ["method"]
    for cell in known:
        columns += [f"{cell.label} optimal", f"{cell.label} mean gap", f"{cell.label} largest gap"]
    note = "How often each method chooses the best set, and by how many nats it misses the best value."
    return Table("Against the optimum", columns, rows if known else [], note)


def _table_statistics(steps: Sequence[PoolStatistics], setup: Setup) -> Table:
    """Compare the statistics of random pools with those of the decoded pools that the random pools imitate."""
    source = torch.Generator().manual_seed(setup.seed)
    group = torch.arange(setup["k"] * setup["w"]) // setup["w"]
    made = [_again(step, *synthetic_pool(step, setup["k"], setup["w"], source), group) for step in steps]
    titles = {
        "between": "mean cosine between groups",
        "between_spread": "its spread",
        "within": "mean cosine within a group",
        "within_spread": "its spread",
        "quality_shared": "share of Q's variance that siblings share",
        "quality": "mean of Q",
    }
    rows = [
        [title, *(f"{np.mean([np.mean(getattr(x, name)) for x in pools]):.4f}" for pools in (steps, made))]
        for name, title in titles.items()
    ]
    note = (
        f"The values are means over {len(steps)} steps of {setup['sets']} sets decoded by {Path(setup.named).name} "
        f"({setup['k']}×{setup['w']}, {setup['length']} tokens in {setup['steps']} steps, β = {setup['beta']:g}), and "
        "over random pools of that size with each step's statistics."
    )
    return Table("Statistics of the pools", ("", "decoded", "random"), rows, note)


def _again(step: PoolStatistics, quality: Tensor, similarity: Tensor, group: Tensor) -> PoolStatistics:
    nothing = torch.empty(0)
    return read_statistics(HistoryStep(step.step, nothing, quality, quality, similarity, group, nothing, 1)) or step


def _figure(cells: Sequence[Cell], clocks: Sequence[str]) -> Any:
    plt = pyplot()
    plot, axes = plt.subplots(2, 3, figsize=(11, 6.6), sharex=True)
    whole = _compared(cells)  # other sizes lack methods, so ranks and normalised values differ in meaning there
    panels: list[tuple[str, Sequence[Cell], CellValues]] = [
        ("objective log det L, normalised", whole, lambda cell: cell.normalised),
        ("log det L below the best, nats", cells, lambda cell: cell.below),
        ("mean rank by log det L (1 is best)", whole, lambda cell: cell.rank),
        ("log det S, normalised", whole, lambda cell: cell.normalised_cosine),
        (f"median ms of one pool, {', '.join(clocks)}", cells, lambda cell: cell.ms),
    ]
    for axis, (label, shown_cells, values) in zip(axes.flat, panels, strict=False):
        for name in DRAWN:
            _curve(axis, shown_cells, name, values, "median" in label, "normalised" in label)
        axis.set_ylabel(label)
        axis.set_xscale("log")
        axis.set_xticks(ticks := (5, 10, 20, 50, 100, 200), list(map(str, ticks)))
    axes[0][1].set_yscale("symlog", linthresh=1e-3)
    axes[0][1].set_yticks([0, 1e-3, 1e-2, 1e-1, 1, 10])
    axes[0][1].set_ylim(-2e-4, 40)
    axes[0][2].invert_yaxis()
    axes[1][1].set_yscale("log")
    axes[0][2].tick_params(labelbottom=True)
    for axis in axes.flat:
        axis.minorticks_off()
    for axis in (axes[1][0], axes[1][1], axes[0][2]):
        axis.set_xlabel("log of the number of sets, w^k")
    handles, labels = axes[1][1].get_legend_handles_labels()  # this panel has all methods
    axes[1][2].axis("off")
    axes[1][2].legend(handles, labels, loc="lower center", title="bars: 95 % intervals; (*) ignores groups")
    return plot


def _curve(
    axis: Any, cells: Sequence[Cell], name: str, values: CellValues, median: bool = False, intervals: bool = False
) -> None:
    """Draw one method's curve over w^k, the number of possible sets. Sizes (k, w) with the same w^k share one point."""
    style = DRAWN[name]
    here: dict[float, list[np.ndarray]] = defaultdict(list)
    for cell in cells:
        if name in values(cell):
            here[round(cell.complexity, 6)].append(values(cell)[name])
    if not here:
        return
    places = sorted(here)
    points = [np.concatenate(here[place]) for place in places]
    main = name in (OURS, PAPERS)
    look = dict(style) | {"linewidth": 2.0 if main else 1.2, "markersize": 9 if name == OURS else 5}
    heights = [np.median(trials) if median else trials.mean() for trials in points]
    axis.plot(places, heights, label=name, zorder=3 if main else 2, **look)
    if intervals and name in (OURS, PAPERS, *RIVALS):
        marks = [figure(trials) for trials in points]
        axis.vlines(places, [f.low for f in marks], [f.high for f in marks], color=style["color"], linewidth=1.0)


def _figures(cells: Sequence[Cell], batches: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for cell in cells:
        figures[cell.label] = {
            name: {
                "log_det_l": figure(cell.objective[name]),
                "log_det_s": figure(cell.cosine[name]),
                "ms": float(np.median(cell.ms[name])),
                "pools": len(cell.ms[name]),
            }
            for name in cell.names
        }
        for name, ranks in cell.rank.items():
            ranked = {"normalised": figure(cell.normalised[name]), "rank": float(ranks.mean())}
            figures[cell.label][name] |= ranked
    return figures | {"each_ms_in_batches": {size: batch["each_ms"] for size, batch in batches.items()}}


def _claims(cells: Sequence[Cell], clocks: Sequence[str], gpu: Mapping[str, Any] | None) -> list[Claim]:
    point = _point(cells)
    figure_says = "stated without a number: DPPy and greedy beam search remain close to random (normalised objective)"
    table_says = "log det S at 32×32: DPP -25.453, random -25.465, D5P4 -24.483"
    return [
        _best_objective(cells),
        _best_cosine(cells),
        _near_random(cells, "the normalised objective log det L", figure_says, lambda cell: cell.normalised),
        _near_random([point], f"log det S at {point.label}", table_says, lambda cell: cell.cosine),
        *_faster(cells, clocks, gpu),
        *_ours(cells),
    ]


def _against(cell: Cell, values: Mapping[str, np.ndarray], rivals: Sequence[str]) -> tuple[str, Figure]:
    """Return the rival with the best mean value, and the mean lead of the paper's solver over this rival."""
    there = [name for name in rivals if name in cell.names]
    rival = max(there, key=lambda name: float(values[name].mean()))
    return rival, paired_difference(values[cell.d5p4], values[rival])


def _compared(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of those sizes at which all rivals were measured, or all cells if there is no such size."""
    full = [cell for cell in cells if set(RIVALS) <= set(cell.names)]
    return full or list(cells)


def _best_objective(cells: Sequence[Cell]) -> Claim:
    leads = [(cell, *_against(cell, cell.objective, RIVALS)) for cell in _compared(cells)]
    judged = [decided(ahead) for _, _, ahead in leads]
    point, rival, ahead = next((lead for lead in leads if lead[0] is _point(cells)), leads[-1])
    clear = sum(lead.low > 0 for _, _, lead in leads)
    largest = max(cell.k * cell.w for cell, _, _ in leads)
    behind = [cell.label for cell, _, lead in leads if lead.high < 0]
    return Claim(
        claim="Solver quality: at every size, D5P4's greedy MAP has the largest log det L of the paper's methods",
        paper="stated without a number: consistently stronger normalised objectives as complexity grows",
        ours=(
            f"log det L ahead of the best rival ({rival}) by {shown(ahead, 3)} nats at {point.label}; clearly ahead at "
            f"{clear} of {len(leads)} sizes" + (f", behind at {', '.join(behind)}" if behind else ", behind at none")
        ),
        verdict=every(judged),
        note=f"the solver is {PAPERS}; the sizes are those at which every method was measured, up to {largest} rows",
    )


def _best_cosine(cells: Sequence[Cell]) -> Claim:
    cell = _point(cells)
    rival, ahead = _against(cell, cell.cosine, RIVALS)
    values = ", ".join(f"{name} {cell.cosine[name].mean():.3f}" for name in (cell.d5p4, *RIVALS) if name in cell.names)
    return Claim(
        claim=f"Solver quality: of the paper's methods, D5P4 has the largest log det S at {cell.label}",
        paper="D5P4 -24.483, DivBS -24.625, DPP -25.453, random -25.465",
        ours=f"{values}; ahead of {rival} by {shown(ahead, 3)}",
        verdict=decided(ahead),
        note="log det S ignores quality, but all methods weigh it; diverse beam search with a large α weighs it little",
    )


def _near_random(cells: Sequence[Cell], measure: str, paper: str, values: CellValues) -> Claim:
    """The claim that greedy beam search and DPP samples are near `random` in a measure.

    A method is near if its distance from random, above or below, is less than half of D5P4's.
    """
    parts, texts = [], []
    for name in ("greedy beam", FREE):
        there = [cell for cell in cells if name in cell.names]
        if not there:
            continue
        x, low, high = (  # one value per pool
            np.concatenate([values(cell)[cell.d5p4 if which == "d5p4" else which] for cell in there])
            for which in (name, "random", "d5p4")
        )
        half = (high - low) / 2
        parts += [decided(figure(half - (x - low))), decided(figure(half + (x - low)))]
        texts.append(f"{name} {shown(paired_difference(x, low))}, D5P4 {shown(paired_difference(high, low))}")
    return Claim(
        claim=f"Greedy beam and DPP sampling stay close to random selection in {measure}",
        paper=paper,
        ours="above random: " + "; ".join(texts),
        verdict=every(parts) if parts else "not testable at this scale",
        note="a method is close if it is less than half as far from random, above or below, as D5P4 is. Siblings in "
        "our pools are very similar, so a sampler that ignores groups loses much by choosing siblings",
    )


def _faster(cells: Sequence[Cell], clocks: Sequence[str], gpu: Mapping[str, Any] | None) -> list[Claim]:
    """The claims that greedy solvers are faster than the paper's rivals, at one size and on one machine."""
    cell = _point(cells)
    on = ", ".join(clocks)
    rivals = (
        (DPPY, "DPPy's k-DPP sampler (from L)", "2.3 ms on an H200 against 547.8 ms on a CPU"),
        (EMBEDDED, "the paper's diverse beam search (from the rows, without S)", "2.3 ms against 29.5 ms, on an H200"),
        ("diverse beam, α=10β", "diverse beam search on the Gram matrix S", "not measured"),
    )
    claims = []
    solvers = ((PAPERS, "the paper's code", rivals), (TEXT, "the paper's text", rivals[:2]))
    for solver, whose, against in (*solvers, (FULL, "our default", rivals[1:2])):
        for rival, what, paper in against:
            if rival not in cell.names or solver not in cell.names:
                continue
            begin = cell.cosines_ms if rival == EMBEDDED else 0.0  # then the solver must compute S first
            mine, theirs = cell.ms[solver] + begin, cell.ms[rival]
            ratio = figure(np.log(theirs / mine))
            times = f"{_median(mine)} ms against {_median(theirs)} ms"
            with_s = ", with the time to compute S" if rival == EMBEDDED else ""
            claims.append(
                Claim(
                    f"{'Ours: solver' if solver == FULL else 'Solver'} time: {solver} ({whose}) is faster than {what} "
                    f"at {cell.label} on {on}",
                    paper if solver != FULL else "not measured",
                    f"{on}{with_s}: {times}, {_times(ratio)} as fast",
                    decided(ratio),
                    f"both were timed in the same run{_dimensions(rival)}{_on_gpu(solver, rival, gpu)}",
                )
            )
    return claims


def _median(times: np.ndarray) -> str:
    """The median with three digits."""
    median = float(f"{np.median(times):.3g}")
    return f"{median:,.0f}" if median >= 1000 else f"{median:g}"


def _dimensions(rival: str) -> str:
    if rival != EMBEDDED:
        return ""
    return (
        f"; the rows have {1 + WIDTH} dimensions (MDLM's have 786,432), and the rival's time is in proportion to them"
    )


def _on_gpu(solver: str, rival: str, gpu: Mapping[str, Any] | None) -> str:
    """The part of a claim's note with the times of the GPU benchmark, or "" if there are none for the two methods."""
    if gpu is None or rival != "diverse beam, α=10β" or solver != PAPERS:
        return ""
    return (
        f"; on one {gpu['machine']}, both in plain torch from S in memory: {gpu['solver'][1]:.1f} ms against "
        f"{gpu['mmr'][1]:.1f} ms, medians without intervals"
    )


def _times(log_ratio: Figure) -> str:
    value, low, high = (math.exp(x) for x in (log_ratio.value, log_ratio.low, log_ratio.high))
    return f"{value:.2g} [{low:.2g}, {high:.2g}] times"


def _ours(cells: Sequence[Cell]) -> list[Claim]:
    """Our claims: our two searches reach better objectives than greedy elimination from every row."""
    there = [cell for cell in cells if {PAPERS, OURS, FULL} <= set(cell.names)]
    claims = []
    for name, what in ((OURS, "local search from k starts"), (FULL, "full search (our default)")):
        claim = f"Ours: {what} reaches a larger log det L than greedy, n starts, on average"
        if not there:
            claims.append(Claim(claim, "", "not measured", "not testable at this scale"))
            continue
        a, b = (np.concatenate([cell.objective[which] for cell in there]) for which in (name, PAPERS))
        ahead = paired_difference(a, b)
        ratios = [float(np.median(cell.ms[PAPERS] / cell.ms[name])) for cell in there if cell.k * cell.w >= 1024]
        faster = f", {min(ratios):.2g} times as fast at 1024 rows" if ratios else ""
        same = (
            f"ahead by {shown(ahead, 4)} nats over {ahead.n} pools; better in {(a > b + 1e-6).mean():.0%}, "
            f"equal in {(abs(a - b) <= 1e-6).mean():.0%}, worse in {(a < b - 1e-6).mean():.0%}{faster}"
        )
        claims.append(Claim(claim, "not measured", same, decided(ahead)))
    return claims
