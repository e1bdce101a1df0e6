"""The objective, rank and time of every method that chooses a set, on random pools of 4×4 to 64×64 rows.

Pools have one of two laws (see `synthetic`): the authors', by which the paper's claims are judged, or ours, with the
statistics of a step of a decoded set. A trial uses one pool and one β. All methods see the same trials. The objective
is log det L of the chosen rows, L = diag(Q) + β S. The authors' table shows log det S, so log det S is stored too. As
in the paper, samples of a k-DPP ignore groups, so they may have two rows of a group.

Times begin with Q and S, with two exceptions. The paper's diverse beam search (`EMBEDDED`) computes its penalties from
the rows e, so the time to compute S from e is stored beside it. DPPy, the library of the paper's DPP samples, begins
with L and always runs on the CPU; it is left out if it is not installed. Claims about time compare runs: every run is a
process of its own. On a GPU, `--stage decode` adds runs on this GPU, and the claims use these.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from d5p4.decode.view import PoolView
from d5p4.errors import D5P4Error
from d5p4.generate import generate
from d5p4.ops import kernels
from d5p4.provenance import machine
from d5p4.rng import mix
from d5p4.search import KDPP, MMR, GreedyBeam, PartitionDPP, Random
from d5p4.search.dpp import dpp_kernel
from d5p4.types import Selector

from .. import bench
from ..baseline import greedy_map, mmr_from_embeddings
from ..methods.partition_sample import PartitionSample
from ..statistics import Figure, figure, paired_difference
from ..tables import Table, shown
from ..timing import clock, in_new_process, one_thread, timed
from .drawing import Claim, Drawing, decided, every
from .rows import Row, Source, complete
from .setup import SOLVER, Experiment, Setup
from .synthetic import PoolStatistics, authors_rows, cosines, parse_size, read_statistics, synthetic_rows

EXACT = "exact"  # this solver runs only at the smallest sizes
FREE = "k-DPP sample (*)"  # this method may choose several rows of the same group
DPPY = "k-DPP sample by DPPy (*)"  # the library of the paper's DPP samples
GRAM = "diverse beam, α=10β"
EMBEDDED = f"{GRAM}, embeddings"  # the paper's form, which has no Gram matrix
PLAIN = "greedy, n starts, plain torch"  # the paper's solver before its Triton version
FAMILIES, AUTHORS = "families", "the authors' kernels"  # the laws of pools
TIMED_BETA = 10.0
UNRANKED = (EXACT, DPPY, EMBEDDED)  # not at every size, or with the same law as another method
PAPERS, TEXT, OURS, FULL = "greedy, n starts", "greedy, k starts", "local search", "full search"
RIVALS = ("random", "greedy beam", "diverse beam, α=β", "diverse beam, α=10β", FREE)  # in the paper
METHODS = (*RIVALS[:4], EMBEDDED, FREE, DPPY, "partition sample", "greedy, one start", TEXT, PAPERS, OURS, FULL, EXACT)
POINT = (32, 32)  # the size in the paper's table
PAPER_TABLE = {  # the milliseconds and the log det S in the paper's table
    "random": (0.1, -25.465),
    DPPY: (547.8, -25.453),
    "diverse beam, α=β": (29.5, -24.625),  # α is β in the authors' code
    PAPERS: (2.3, -24.483),
}
SELECTORS: dict[str, Callable[[float], Selector]] = {
    "random": lambda beta: Random(),
    "greedy beam": lambda beta: GreedyBeam(),
    "diverse beam, α=β": lambda beta: MMR(alpha=beta),
    "diverse beam, α=10β": lambda beta: MMR(alpha=10 * beta),
    FREE: KDPP,
    "partition sample": PartitionSample,
}
SOLVERS = {TEXT: "k-starts", PAPERS: "n-starts", OURS: "local-search", FULL: "full-search", EXACT: "exact"}
SOLVERS["greedy, one start"] = "one-start"
SELECTORS |= {name: partial(PartitionDPP, solver=solver) for name, solver in SOLVERS.items()}
BETAS = [1.0, 3.1623, 10.0, 31.623, 100.0]
SIZES = ["4x4", "6x4", "8x4", "6x10", "8x8", "4x64", "16x4", "8x32", "16x16", "32x8", "64x4", "32x32", "64x32", "64x64"]
EVERY = [f"{k}x{w}" for k in (4, 8, 16, 32, 64) for w in (4, 8, 16, 32, 64)]  # in the paper
SLOW = ["diverse beam, α=β", "diverse beam, α=10β", "k-DPP sample (*)", "partition sample", "greedy, n starts"]
SLOW += ["full search", EMBEDDED, DPPY]


def _by_rows(trials: Mapping[str, int], rows: int) -> int:
    """The number of trials for pools of `rows` rows. The keys of `trials` are upper limits of the number of rows."""
    fitting = [int(most) for most in trials if int(most) >= rows]
    return trials[str(min(fitting))] if fitting else 0


def sources(setup: Setup) -> list[Source]:
    return [statistics(setup), trials(setup), trials(setup, AUTHORS), times(setup, setup.torch_device.type)]


def statistics(setup: Setup) -> Source:
    """The source of the statistics of real pools: one row per decoded set, with the statistics of each step."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        rows = {}
        options = {name: setup[name] for name in ("k", "w", "steps", "beta")} | {"gen_length": setup["length"]}
        options["solver"] = setup["solver"]
        for key in keys:
            names = [f"scaling {key}"]
            read: list[PoolStatistics | None] = []
            options["callback"] = lambda shot, read=read: read.append(read_statistics(shot.step, shot.view))
            generate(setup.model, method="d5p4", sets=1, keys=names, seed=setup.seed, **options)
            steps = [asdict(step) for step in read if step is not None]
            rows[key] = {"steps": steps, "machine": machine(setup.torch_device)}
        return rows

    keys = [str(number) for number in range(setup["sets"])]
    made_with = setup.model_and("k", "w", "length", "steps", "beta")
    return setup.source("statistics", keys, make, models=[setup.named], **made_with)


def trials(setup: Setup, law: str = FAMILIES) -> Source:
    authors = law == AUTHORS
    sizes = {size: math.prod(parse_size(size)) for size in setup["authors_sizes" if authors else "sizes"]}
    keys = [f"{size} {trial}" for size, rows in sizes.items() for trial in range(_by_rows(setup["trials"], rows))]

    def make(wanted: Sequence[str]) -> dict[str, Row]:
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        steps, rows = [] if authors else _steps(setup), {}
        with one_thread(setup.torch_device), threadpool_limits(1):  # torch and numpy have threads of their own
            for key in wanted:
                size, trial = key.split()
                rows[key] = {"size": size, **_trial(setup, steps, size, int(trial))}
        return rows

    if authors:
        return setup.source("trials-authors", keys, make, **{name: setup[name] for name in ("betas", "largest")})
    # The pools depend on the statistics of all sets, so `made_with` includes the number of sets.
    made_with = setup.model_and("k", "w", "length", "steps", "beta", "sets", "betas", "largest")
    return setup.source("trials", keys, make, **made_with)


def times(setup: Setup, kind: str) -> Source:
    """The source of times on a kind of device: one row per run, with the ms of every method on an authors' pool."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        device, repeats = str(setup.torch_device), setup["repeats"]
        return {key: in_new_process(_timed_run, device, size, repeats, int(key)) for key in keys}

    keys, size = [str(run) for run in range(setup["runs"])], setup["timed_size"][kind]
    return setup.source(f"times-{kind}", keys, make, size=size, repeats=setup["repeats"])


def _timed_run(device: str, size: str, repeats: int, run: int) -> Row:
    from threadpoolctl import threadpool_limits

    place = torch.device(device)
    with one_thread(place), threadpool_limits(1):
        pool = Pool([], size, run, 0, TIMED_BETA, place)
        with kernels.off():  # on a GPU; a CPU has no others
            plain = pool.measure(lambda: greedy_map(pool.kernel.to(place, pool.dtype), pool.k), repeats)[1]
        names = [PLAIN, PAPERS, TEXT, FULL, EMBEDDED, GRAM, *([DPPY] if find_spec("dppy") else [])]
        ms = {PLAIN: plain} | {name: pool.measure(pool.call_of(name), repeats)[1] for name in names[1:]}
        return {"machine": clock(place), "ms": ms | {"cosines": pool.measure(partial(cosines, pool.there), repeats)[1]}}


def _steps(setup: Setup) -> list[PoolStatistics]:
    steps = [PoolStatistics(**step) for row in complete(setup, statistics(setup)) for step in row["steps"]]
    if not steps:
        raise D5P4Error(
            f"no step of {setup['sets']} sets has rows that differ; set steps to more than {setup['steps']}"
        )
    return steps


def _fitting(setup: Setup, size: str) -> list[str]:
    """Return the methods that run on pools of the given size. Slow methods run only on small pools."""
    k, w = parse_size(size)
    largest = setup["largest"]
    # The form without a Gram matrix chooses the same sets. Only its time matters, which runs measure (`times`).
    names = [*SELECTORS, *([DPPY] if find_spec("dppy") else [])]
    return [
        name for name in names if (w**k <= largest[EXACT] if name == EXACT else k * w <= largest.get(name, math.inf))
    ]


def _sample_by_dppy(kernel: Tensor, k: int, seed: int) -> Tensor:
    from dppy.finite_dpps import FiniteDPP

    return torch.tensor(FiniteDPP("likelihood", L=kernel.numpy()).sample_exact_k_dpp(size=k, random_state=seed))


class Pool:
    """A random pool on a device: with the statistics of one of the steps, or by the authors' law if there are none."""

    def __init__(
        self, steps: Sequence[PoolStatistics], size: str, trial: int, seed: int, beta: float, device: torch.device
    ) -> None:
        self.k, w = parse_size(size)
        self.trial, self.beta, self.device = trial, beta, device
        source = torch.Generator().manual_seed(int(mix(seed, torch.tensor(self.k), w, trial)) & (2**62 - 1))
        if steps:
            chosen = steps[int(torch.randint(len(steps), (1,), generator=source))]
            self.quality, rows = synthetic_rows(chosen, self.k, w, source)
        else:
            self.quality, rows = authors_rows(self.k, w, source)
        self.similarity, place = cosines(rows), torch.arange(self.k * w)
        self.kernel = dpp_kernel("additive", self.quality[None], self.similarity[None], beta)[0][0]
        self.dtype = torch.float32 if device.type == "cuda" else torch.float64  # of similarities, as in decoding
        self.there = rows.to(device, self.dtype)
        self.view = PoolView(
            group=(place // w)[None].to(device),
            tie=mix(trial, place)[None].to(device),
            quality=self.quality[None].to(device),
            similarity=self.similarity[None].to(device, self.dtype),
        )
        self.key = mix(seed, torch.tensor([trial], device=device))

    def call_of(self, name: str) -> Callable[[], Tensor]:
        if name == EMBEDDED:
            return partial(mmr_from_embeddings, self.quality.to(self.there), self.there, self.k, 10 * self.beta)
        if name == DPPY:
            return partial(_sample_by_dppy, self.kernel, self.k, self.trial)
        selector = SELECTORS[name](self.beta)
        return lambda: selector(self.view, self.k, self.key).parents[0]

    def measure(self, call: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
        if self.trial == 0 or repeats > 1 or self.device.type == "cuda":
            call()  # warm up, so that loading and compiling are not timed
        results = [timed(call, self.device) for _ in range(repeats)]
        return results[0][0], float(f"{sorted(ms for _, ms in results)[len(results) // 2]:.4g}")


def _trial(setup: Setup, steps: Sequence[PoolStatistics], size: str, trial: int) -> dict[str, Any]:
    """Run each method on one random pool. The result of a method is [log det L, log det S, ms]."""
    beta = float(setup["betas"][trial % len(setup["betas"])])
    pool = Pool(steps, size, trial, setup.seed, beta, setup.torch_device)
    repeats = 3 if math.prod(parse_size(size)) <= 64 else 1
    by_method: dict[str, Any] = {}
    for name in _fitting(setup, size):
        parents, ms = pool.measure(pool.call_of(name), repeats)
        at = parents.cpu()
        values = [torch.linalg.slogdet(x[at][:, at]).logabsdet for x in (pool.kernel, pool.similarity)]
        by_method[name] = [*(round(float(value), 6) for value in values), ms]
    about = {"trial": trial, "beta": beta, "machine": clock(setup.torch_device)}
    return about | {"cosines_ms": pool.measure(partial(cosines, pool.there), repeats)[1], "methods": by_method}


# ---- drawing


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
        self.rank = _ranks(self.objective, ranked)

    @property
    def pools(self) -> int:
        return len(self.ms[self.names[0]])

    @property
    def label(self) -> str:
        return f"{self.k}×{self.w}"

    @property
    def complexity(self) -> float:
        return self.k * math.log(self.w)

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


def draw(setup: Setup) -> Drawing:
    theirs, cells = (_cells(setup, law) for law in (AUTHORS, FAMILIES))
    on = ", ".join(sorted({row["machine"] for row in complete(setup, trials(setup))}))
    tables = [_table_point(_point(theirs), on, AUTHORS), _table_point(_point(cells), on, "our kernels")]
    tables += [*_tables_by_size(cells, on), _table_exact(cells)]
    figures: dict[str, Any] = {cell.label: _figures(cell) for cell in cells}
    figures[AUTHORS] = {cell.label: _figures(cell) for cell in theirs}
    drawn = [table for table in tables if table.rows]
    return Drawing(drawn, None, figures, [*_claims(theirs, cells), *_faster(_runs(setup), setup, _point(theirs))])


def _cells(setup: Setup, law: str) -> list[Cell]:
    by_size: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in complete(setup, trials(setup, law)):
        by_size[row["size"]].append(row)
    if not by_size:
        raise D5P4Error(f"{setup.folder} contains no trials; run --stage decode first")
    cells = [Cell(size, rows) for size, rows in by_size.items()]
    return sorted(cells, key=lambda cell: (cell.complexity, cell.k))


Runs = Mapping[str, Mapping[str, Any]]
"""By kind of device: its name, and the ms of every method, one value per run."""


def _runs(setup: Setup) -> Runs:
    rows = {kind: complete(setup, times(setup, kind)) for kind in ("cpu", "cuda") if setup.rows(times(setup, kind))}
    return {
        kind: {"where": own[0]["machine"]} | {name: np.array([row["ms"][name] for row in own]) for name in own[0]["ms"]}
        for kind, own in rows.items()
    }


def _point(cells: Sequence[Cell]) -> Cell:
    """Return the cell of size 32×32, as in the paper, or else the largest of the cells with the most methods."""
    exact = [cell for cell in cells if (cell.k, cell.w) == POINT]
    return exact[0] if exact else max(cells, key=lambda cell: (len(set(cell.names) - {*UNRANKED}), cell.complexity))


def _table_point(cell: Cell, on: str, law: str) -> Table:
    rows = []
    for name in cell.names:
        paper_ms, paper_value = PAPER_TABLE.get(name, ("", ""))
        cells_here = []
        # Methods are compared on the same pool, because values differ more between pools than between methods.
        for values in (cell.objective, cell.cosine):
            cells_here += [f"{values[name].mean():.3f}", shown(paired_difference(values[name], values["random"]), 3)]
        rows.append([name, *cells_here, _median(cell.ms[name]), str(paper_value), str(paper_ms)])
    note = (
        f"{cell.pools} pools. Times are medians on {on} in one run, in float64 on a CPU, from Q and S in memory. "
        "The paper's were measured on an H200, and that of DPPy on a CPU. The paper's diverse beam search has no S: it "
        f"computes its penalties again at every pick from the rows ({EMBEDDED}). Computing S from the rows takes "
        f"{np.median(cell.cosines_ms):.3g} ms. (*) This method may choose two rows of a group. Greedy from n starts is "
        "the solver of the paper's code, greedy from k starts is that of its text, and local search and full search "
        "(our default) are ours."
    )
    columns = ["method", "log det L", "log det L ahead of random", "log det S", "log det S ahead of random", "ms"]
    return Table(f"Pools of {cell.label}, {law}", [*columns, "paper: log det S", "paper: ms"], rows, note)


def _tables_by_size(cells: Sequence[Cell], on: str) -> list[Table]:
    def table(title: str, values: CellValues, text: Callable[[Any], str], note: str) -> Table:
        rows = [
            [name, *(text(values(cell)[name]) if name in values(cell) else "" for cell in cells)]
            for name in METHODS
            if any(name in values(cell) for cell in cells)
        ]
        return Table(title, ("method", *(f"{cell.label} ({cell.pools} pools)" for cell in cells)), rows, note)

    def mean(x: np.ndarray) -> str:
        return f"{x.mean():.3f}" + (f" ± {figure(x).se:.3f}" if len(x) > 1 else "")

    empty = "Cells show mean ± standard error. Empty cells were too slow to measure."
    scaled = f"Values are (x - worst) / (best - worst) over the methods in each pool, without exact. {empty}"
    timed = f"On {on}, with the time to build L from Q and S, and without the time to compute S."
    return [
        table("Objective log det L, normalised", lambda c: c.normalised, mean, scaled),
        table("Mean rank by log det L (1 is best)", lambda c: c.rank, mean, "Equal values share their mean rank."),
        table("Median time of one pool, ms", lambda c: c.ms, lambda x: f"{np.median(x):.3g}", timed),
    ]


def _table_exact(cells: Sequence[Cell]) -> Table:
    known, columns, rows = [cell for cell in cells if EXACT in cell.names], ["method"], []
    for name in (name for name in METHODS if known and name not in (*UNRANKED, FREE)):
        gaps = [cell.objective[EXACT] - cell.objective[name] for cell in known]
        rows.append([name, *(f"{(gap < 1e-6).mean():.0%}, {gap.mean():.4f}, {gap.max():.3f}" for gap in gaps)])
    columns += [f"{cell.label}: optimal, mean gap, largest gap" for cell in known]
    note = "How often each method chooses the best set, and by how many nats it misses the best value."
    return Table("Against the optimum", columns, rows, note)


def _figures(cell: Cell) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in cell.names:
        figures[name] = {"log_det_l": figure(cell.objective[name]), "log_det_s": figure(cell.cosine[name])}
        figures[name] |= {"ms": float(np.median(cell.ms[name])), "pools": len(cell.ms[name])}
        if name in cell.rank:
            ranked = {"normalised": figure(cell.normalised[name]), "rank": float(cell.rank[name].mean())}
            figures[name] |= ranked
    return figures


def _claims(theirs: Sequence[Cell], cells: Sequence[Cell]) -> list[Claim]:
    """The paper's claims, on the authors' kernels; then the same on ours; then those about our solvers."""
    figure_says = "stated without a number: DPPy and greedy beam search remain close to random (normalised objective)"
    table_says = "log det S at 32×32: DPP -25.453, random -25.465, D5P4 -24.483"

    def quality(cells: Sequence[Cell]) -> list[Claim]:
        point = _point(cells)
        return [
            _best_objective(cells),
            _best_cosine(point),
            _near_random(cells, "the normalised objective log det L", figure_says, lambda cell: cell.normalised),
            _near_random([point], f"log det S at {point.label}", table_says, lambda cell: cell.cosine),
        ]

    siblings = "siblings are alike in these pools, so a sampler that ignores groups loses much by choosing siblings"
    ours = [
        replace(one, claim=f"Ours: with families as in decoding: {one.claim}", note=siblings) for one in quality(cells)
    ]
    return [*quality(theirs), *ours, *_ours(cells)]


def _against(cell: Cell, values: Mapping[str, np.ndarray], without: str = "") -> tuple[str, Figure]:
    rivals = [name for name in RIVALS if name in cell.names and name != without]
    rival = max(rivals, key=lambda name: float(values[name].mean()))
    return rival, paired_difference(values[cell.d5p4], values[rival])


def _compared(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of those sizes at which all rivals were measured, or all cells if there is no such size."""
    full = [cell for cell in cells if set(RIVALS) <= set(cell.names)]
    return full or list(cells)


def _best_objective(cells: Sequence[Cell]) -> Claim:
    leads = [(cell, *_against(cell, cell.objective)) for cell in _compared(cells)]
    point, rival, ahead = next((lead for lead in leads if lead[0] is _point(cells)), leads[-1])
    clear, largest = sum(lead.low > 0 for _, _, lead in leads), max(cell.k * cell.w for cell, _, _ in leads)
    behind = ", ".join(cell.label for cell, _, lead in leads if lead.high < 0) or "none"
    return Claim(
        "Solver quality: at every size, D5P4's greedy MAP has the largest log det L of the paper's methods",
        "stated without a number: consistently stronger normalised objectives as complexity grows",
        f"log det L ahead of the best rival ({rival}) by {shown(ahead, 3)} nats at {point.label}; clearly ahead at "
        f"{clear} of {len(leads)} sizes, behind at {behind}",
        every(decided(lead) for _, _, lead in leads),
        f"the solver is {PAPERS}; the sizes are those at which every method was measured, up to {largest} rows",
    )


def _best_cosine(cell: Cell) -> Claim:
    rival, ahead = _against(cell, cell.cosine, GRAM)
    values = ", ".join(f"{name} {cell.cosine[name].mean():.3f}" for name in (cell.d5p4, *RIVALS) if name in cell.names)
    return Claim(
        f"Solver quality: of the paper's methods, D5P4 has the largest log det S at {cell.label}",
        "D5P4 -24.483, DivBS -24.625, DPP -25.453, random -25.465",
        f"{values}; ahead of {rival} by {shown(ahead, 3)}",
        decided(ahead),
        "the rivals have the authors' α = β; with α = 10β, diverse beam search weighs quality little and is ahead",
    )


def _near_random(cells: Sequence[Cell], measure: str, paper: str, values: CellValues) -> Claim:
    """The claim that greedy beam search and DPP samples are less than half as far from `random` as D5P4 is."""
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
        f"Greedy beam and DPP sampling stay close to random selection in {measure}",
        paper,
        "above random: " + "; ".join(texts),
        every(parts) if parts else "not measured",
        "a method is close if it is less than half as far from random, above or below, as D5P4 is",
    )


def _faster(runs: Runs, setup: Setup, cell: Cell) -> list[Claim]:
    """The claims about time: at one size, on a GPU if runs on one are there. DPPy always runs on a CPU."""
    kind = "cuda" if "cuda" in runs else "cpu"
    here, size = runs[kind], setup["timed_size"][kind].replace("x", "×")
    solver = bench.rows_of(bench.read_sections(bench.RESULTS / "gpu.jsonl.xz"), "solver")
    gpu = [row for row in solver if "P 1" in row["size"]]
    text = "2.3 ms on an H200 against 547.8 ms on a CPU"
    beam = "2.3 ms against 29.5 ms, on an H200"
    both = "both begin with the rows"
    pairs = [
        (f"{PAPERS} (the paper's code)", PAPERS, EMBEDDED, "the paper's diverse beam search", beam, both),
        (f"{TEXT} (the paper's text)", TEXT, DPPY, "DPPy's k-DPP sampler", text, "from L"),
        (f"{TEXT} (the paper's text)", TEXT, EMBEDDED, "the paper's diverse beam search", beam, both),
        (f"{FULL} (our default)", FULL, EMBEDDED, "the paper's diverse beam search", "–", both),
        (PAPERS, PAPERS, GRAM, "diverse beam search on the Gram matrix S", "–", "from S; the paper has no such method"),
    ]
    triton = [(row["plain_ms"], row["ours_ms"]) for row in gpu if "plain_ms" in row]
    point = next(row for row in gpu if row["size"].startswith("32×32"))
    where = "GPU benchmark of November 2026, one run on an H200, 32×32"
    claims = [
        Claim(
            "Solver time: the Triton version is faster than the plain one",
            "Fig. scaling: “further reduces selection time”",
            f"{where}: {point['plain_ms']:.1f} → {point['ours_ms']:.2f} ms; faster at all {len(triton)} sizes",
            "holds" if all(after < before for before, after in triton) else "does not hold",
            "the solver here is our local search; without an interval",
        )
    ]
    if "cuda" in runs:
        pairs.insert(0, (f"{PAPERS} (the paper's code)", PAPERS, DPPY, "DPPy's k-DPP sampler", text, "GPU against CPU"))
    elif DPPY in cell.ms:
        first = f"Solver time: {PAPERS} (the paper's code) is faster than DPPy's k-DPP sampler"
        ms = f"{point['baseline_ms']:.1f} ms in plain torch ({where}) against {_median(cell.ms[DPPY])} ms on one CPU "
        ms += f"thread ({cell.label})"
        faster = point["baseline_ms"] < cell.ms[DPPY].min()
        claims.append(
            Claim(first, text, ms, "holds" if faster else "does not hold", "GPU against CPU, as in the paper")
        )
    for named, name, rival, what, paper, note in pairs:
        if rival in here:
            begin = here["cosines"] if rival == EMBEDDED else 0.0  # then the solver must compute S first
            mine, theirs = here[name] + begin, here[rival]
            ratio = figure(np.log(theirs / mine))
            times = "{:.2g} [{:.2g}, {:.2g}]".format(*(math.exp(x) for x in (ratio.value, ratio.low, ratio.high)))
            ours = "Ours: solver" if paper == "–" else "Solver"
            claim = f"{ours} time: {named} is faster than {what} at {size} on {here['where']}"
            text = f"{_median(mine)} ms against {_median(theirs)} ms, {times} times as fast in {ratio.n} runs"
            claims.append(Claim(claim, paper, text, decided(ratio), note))
    return claims


def _median(times: np.ndarray) -> str:
    median = float(f"{np.median(times):.3g}")
    return f"{median:,.0f}" if median >= 1000 else f"{median:g}"


def _ours(cells: Sequence[Cell]) -> list[Claim]:
    there = [cell for cell in cells if {PAPERS, OURS, FULL} <= set(cell.names)]
    claims = []
    for name, what in ((OURS, "local search from k starts"), (FULL, "full search (our default)")):
        claim = f"Ours: {what} reaches a larger log det L than greedy, n starts, on average"
        a, b = (np.concatenate([cell.objective[which] for cell in there]) for which in (name, PAPERS))
        ahead = paired_difference(a, b)
        same = (
            f"ahead by {shown(ahead, 4)} nats over {ahead.n} pools; better in {(a > b + 1e-6).mean():.0%}, "
            f"equal in {(abs(a - b) <= 1e-6).mean():.0%}, worse in {(a < b - 1e-6).mean():.0%}"
        )
        claims.append(Claim(claim, "not measured", same, decided(ahead)))
    return claims


_BOX = {
    "model": "books",
    "sets": 2,
    "k": 8,
    "w": 4,
    "length": 256,
    "steps": 32,
    "beta": 20.0,
    "solver": SOLVER,  # of the decoding whose statistics the random pools have
    "betas": BETAS,
    "sizes": SIZES,
    "authors_sizes": ["8x4", "16x4", "8x8", "16x16", "32x32"],
    "timed_size": {"cpu": "16x16", "cuda": "32x32"},  # the paper's is 32×32, on a GPU
    "runs": 5,  # processes that measure times
    "repeats": 3,  # of a call in a run; the run counts with their median
    "trials": {"256": 40, "1024": 20, "2048": 5, "4096": 3},  # 40 trials for pools of up to 256 rows, and so on
    "largest": {**dict.fromkeys(SLOW, 1024), EXACT: 5000},  # the most rows of a pool; for EXACT, the most sets
}
_PAPER = {
    "model": "kuleshov-group/mdlm-owt",
    "sets": 8,
    "length": 1024,
    "steps": 1024,
    "betas": [round(100 ** (i / 14), 4) for i in range(15)],
    "sizes": EVERY,
    "authors_sizes": EVERY,
    "trials": {"4096": 500},
    "largest": {EXACT: 70_000, DPPY: 1024},
}

EXPERIMENT = Experiment(
    name="scaling",
    title="Objective, rank and time of methods that choose a set, as pools grow",
    paper="Figure scaling and Table scalability (right)",
    settings={"box": _BOX, "paper": _BOX | _PAPER},
    sources=sources,
    draw=draw,
)
