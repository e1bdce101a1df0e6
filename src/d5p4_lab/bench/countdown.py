"""Measure how many held-out countdown puzzles every method solves with four answers, against the rows that it runs.

    python -m d5p4_lab bench countdown --device cuda --tf32 --processes 5 --out countdown.jsonl
    python -m d5p4_lab bench countdown --draw --out countdown.jsonl

The first command decodes. It adds one line per unit (one method with one seed on all puzzles) to --out as soon as the
unit ends, and the same command continues a killed run. The second command computes the figures of all lines, writes
them to --results and prints the tables; what has no lines keeps its last figures. `bench tables` then redraws the
documents.

The stages, the most important units first:
sweep      every method is tuned (see `solving.py`) on --tune other puzzles of four and five numbers with one seed.
           Three numbers take the choice of four numbers
coverage   the tuned methods on --puzzles committed puzzles and on as many fresh ones, with three seeds if the method is
           random. The tree is also shown with its default setting (temperature 0, diversity 1), and its rivals on the
           committed puzzles with the temperatures beside their best one.
ablations  the tree with K = 8 and one thing changed, on 500 of the puzzles for tuning, with one seed.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import d5p4
from d5p4.eval.countdown import WINDOW, Problem

from ..figures import pyplot, save
from ..puzzles import problems
from ..tables import Row, Tables, half_width, markdown
from . import RESULTS, chosen, make_parser, read, solving, write
from .solving import (
    DEFAULT,
    DISTINCT,
    PAPER,
    SURE,
    TREES,
    Columns,
    K,
    Knob,
    Method,
    Values,
    cells_of,
    figures_of,
    headings,
    samples,
    setting_of,
    sweep,
)
from .units import Lines, add_options, read_lines, run_units

SEEDS = 3
NUMBERS = {4: "four", 5: "five", 3: "three"}
SWEPT = {4: 4, 5: 5, 3: 4}  # the count of numbers with which the settings are tuned
TUNING, COMMITTED, FRESH = "tuning", "committed", "fresh"
PUZZLE_SEEDS = {COMMITTED: 0, TUNING: 1, FRESH: 2}
ABLATED = 500  # the most puzzles of an ablation
TESTED = 1000  # the largest value of --puzzles and --tune, and the number of puzzles that other sets leave out
STAGES = ("sweep", "coverage", "ablations")

DRAWN, TOP = {"confidence": (1.0, 2.0, 3.0)}, {"top": (0.5, 0.7, 1.0, 1.5)}
BOTH = DRAWN | {"top": (1.0,)}
RIVALS = {size: f"best-of-{size}, top" for size in (4, 8, 16, 32, 64)}  # the fair rivals of the tree
BETAS = (100.0, 20.0, 300.0)
METHODS = {
    **{
        TREES[width]: Method(
            {"method": "tree", "spare": width - K},
            {"top": (0.0, 0.3, 1.0)},
            "diversity",
            (1.0, 0.0, 0.5, 2.0),
            rule=SURE,
            like=TREES[16] if width > 16 else "",
        )
        for width in TREES
    },
    **{RIVALS[size]: samples(size, heats=TOP) for size in RIVALS},
    "independent": samples(4, heats=DRAWN),
    "best-of-16": samples(16, heats=DRAWN),
    "diverse-beam": Method({"method": "diverse-beam", "w": 4}, BOTH, "alpha", (100.0, 20.0, 50.0)),
    "d5p4": Method(PAPER, BOTH, "beta", BETAS),
    "d5p4, distinct, spare 4": Method(DISTINCT, {"confidence": (2.0, 3.0), "top": (1.0,)}, "beta", (300.0, 100.0)),
    **{f"best-of-{size}": samples(size, heats=DRAWN, like="best-of-16") for size in (8, 32)},
    "d5p4, distinct, spare 12": Method(DISTINCT | {"spare": 12}, BOTH, "beta", BETAS, like="d5p4, distinct, spare 4"),
}

BASE = TREES[8]
ABLATIONS: dict[str, list[dict[str, Any]]] = {  # one table per entry; a row replaces these fields of the base's unit
    "diversity": [{"knob": value} for value in (0.0, 0.5, 2.0, 4.0)],
    "temperature": [{"temperature": heat, "knob": value} for heat in (0.3, 1.0) for value in (0.0, 1.0)],
    "order": [{"order": order} for order in ("left", "margin", "entropy", "random")],
    "rule": [
        *({"rule": f"threshold {tau:g}"} for tau in (1, 0.999, 0.95, 0.9, 0.8)),
        *({"rule": rule} for rule in ("factor 0.1", "factor 0.3", "entropy-bound 0.05", "entropy-bound 0.2")),
    ],
    "children": [{"change": f"w={count}"} for count in (2, 8)],
    "spare": [{"change": f"spare={count}"} for count in (0, 2, 12)],
    "caches": [
        {"change": f'block_length={length} cache="{cache}"'}
        for length, cache in itertools.product((12, 6), ("none", "prefix", "dual"))
    ],
}


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all puzzles of one set."""

    stage: str
    method: str
    numbers: int
    rule: str  # a reveal rule and its value, such as "threshold 0.9"
    puzzles: int
    cases: str = TUNING
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    change: str = ""  # options that replace those of the method, such as "w=8"
    seed: int = 0

    @property
    def setting(self) -> str:
        return setting_of(vars(self), METHODS[self.method])

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`."""
        options = solving.options_of(self, METHODS[self.method])
        return {"gen_length": WINDOW[self.numbers]} | options | solving.rule_options(self.rule)

    def __str__(self) -> str:
        place = f"{self.stage} {self.numbers} numbers, {self.cases}, {self.rule}"
        return f"{place}: {self.method} ({self.setting}), seed {self.seed}"


# ---- the plan


Best = dict[tuple[str, int], Unit | None]


def sweeps(lines: Mapping[Unit, Row], tune: int, best: Best) -> Iterator[Unit]:
    """Yield the units that tune all methods, and add the best unit of each method and count of numbers to `best`."""
    for (name, method), numbers in itertools.product(METHODS.items(), sorted(set(SWEPT.values()))):
        first = Unit("sweep", name, numbers, method.rule, tune)
        best[name, numbers] = yield from sweep(lines, first, METHODS)


def plan(lines: Mapping[Unit, Row], puzzles: int, tune: int) -> Iterator[Unit]:
    """Yield all units that are known by now, the most important first. A unit may come twice."""
    counts = sorted(set(SWEPT.values()))
    best: Best = {}
    yield from sweeps(lines, tune, best)

    def coverage(seed: int, counts: Sequence[int], cases: str) -> Iterator[Unit]:
        for numbers in counts:
            for name in METHODS:
                if unit := best[name, SWEPT[numbers]]:
                    unit = replace(unit, stage="coverage", numbers=numbers, puzzles=puzzles, cases=cases, seed=seed)
                    settings = (unit, replace(unit, **DEFAULT)) if name in TREES.values() else (unit,)
                    yield from (setting for setting in settings if seed == 0 or setting.temperature)

    yield from coverage(0, counts, COMMITTED)
    for change in ({}, *itertools.chain(*ABLATIONS.values())):
        for numbers in counts:
            base = Unit("", BASE, numbers, SURE, 0, **DEFAULT)
            yield replace(base, stage="ablations", puzzles=min(puzzles, ABLATED), **change)
    for name, numbers in itertools.product(RIVALS.values(), counts):
        if unit := best.get((name, numbers)):
            unit = replace(unit, stage="coverage", puzzles=puzzles, cases=COMMITTED)
            beside = TOP[unit.order].index(unit.temperature)
            nearest = TOP[unit.order][max(0, beside - 1) : beside + 2]
            yield from (replace(unit, temperature=heat) for heat in nearest)
    yield from coverage(0, counts, FRESH)
    yield from coverage(0, (3,), COMMITTED)
    for seed, cases in itertools.product(range(SEEDS), (COMMITTED, FRESH)):
        yield from coverage(seed, tuple(NUMBERS), cases)


# ---- one unit


@cache
def puzzles_of(cases: str, count: int, numbers: int) -> list[Problem]:
    """Return the first puzzles of a set. A set has no puzzle that is among the first TESTED puzzles of an earlier set.

    The sets are, in this order, those of PUZZLE_SEEDS. All their puzzles were kept out of training.
    """
    earlier = set[tuple[int, ...]]()
    for name, seed in PUZZLE_SEEDS.items():
        keys = {(*sorted(problem.numbers), problem.target): problem for problem in problems(2 * TESTED, numbers, seed)}
        left = [key for key in keys if key not in earlier][:TESTED]
        if name == cases:
            break
        earlier |= set(left)
    return [keys[key] for key in left[:count]]


def work(unit: Unit) -> Row:
    prompts = [problem.prompt for problem in puzzles_of(unit.cases, unit.puzzles, unit.numbers)]
    return solving.answer("countdown", prompts, unit.seed, unit.options())


# ---- figures


def summary(lines: Mapping[Unit, Row], puzzles: int, tune: int) -> list[Row]:
    """Return the rows of the results file: the facts, then the tested settings.

    Figures are [mean, low, high]: means over seeds, 95 % over puzzles. In the stage `coverage`, trees are compared with
    their fair rivals at equal rows, puzzle by puzzle (see `at_equal_rows`). In the stage `ablations`, the others are
    compared with the base, puzzle by puzzle.
    """
    units, tuned = [unit for unit in dict.fromkeys(plan(lines, puzzles, tune)) if unit in lines], tuned_in(lines, tune)
    groups: dict[Unit, list[Values]] = {}
    for unit in units:
        if unit.stage == "ablations" or unit.cases != TUNING:
            groups.setdefault(replace(unit, seed=0), []).append(solving.measures(lines[unit]["problems"]))
    means = {unit: solving.mean_values(seeds) for unit, seeds in groups.items()}
    rivals: dict[tuple[int, str], list[Values]] = {}
    for unit, values in means.items():
        if unit.stage == "coverage" and unit.method in RIVALS.values() and tuned(unit):
            rivals.setdefault((unit.numbers, unit.cases), []).append(values)
    rows = []
    for unit, values in means.items():
        row: Row = _identity(unit) | {"seeds": len(groups[unit]), "setting": unit.setting} | figures_of(values)
        if unit.stage == "coverage":
            same = rivals.get((unit.numbers, unit.cases)) if unit.method in TREES.values() else None
            row |= {"rival": _against(values, solving.at_equal_rows(values, same))} if same else {}
            row["tuned"] = tuned(unit)
        elif unit.stage == "ablations":
            base = replace(unit, rule=SURE, change="", **DEFAULT)
            row |= {"base": _against(values, means[base])} if base in means and base != unit else {}
        rows.append(row)
    origins = {json.dumps(lines[unit]["about"]): lines[unit]["about"] for unit in units}
    return [{"about": list(origins.values()), "puzzles": puzzles, "tune": tune}, *rows]


def tuned_in(lines: Mapping[Unit, Row], tune: int) -> Callable[[Unit], bool]:
    """Return a function that tells whether a unit has the tuned setting of its method."""
    best: Best = {}
    list(sweeps(lines, tune, best))

    def tuned(unit: Unit) -> bool:
        chosen_unit = best.get((unit.method, SWEPT[unit.numbers]))
        return chosen_unit is not None and chosen_unit.setting == unit.setting

    return tuned


def _against(values: Values, others: Values) -> dict[str, list[float]]:
    return figures_of({name: values[name] - others[name] for name in ("pass@4", "first", "different", "rows")})


def _identity(unit: Unit) -> Row:
    return {name: value for name, value in vars(unit).items() if name not in ("puzzles", "seed")}


# ---- tables

SOLVED: Columns = (("solved %", "pass@4", 1, 100), ("first right %", "first", 1, 100))
COST: Columns = (("rows", "rows", 0, 1), ("passes", "nfe", 1, 1))
FIGURES: Columns = (*SOLVED, ("different right", "different", 2, 1), ("four texts %", "four", 1, 100), *COST)
CHANGES: Columns = (*SOLVED, ("different right", "different", 2, 1))
Rows = Sequence[Row]
UNMEASURED = "not measured yet"


def _place(row: Row) -> tuple[int, float]:
    """Return a number for the curve of the method, and the rows."""
    curves = [names for _, names in CURVES.values()]
    return next(i for i, names in enumerate(curves) if row["method"] in names), row["rows"][0]


def select(results: Rows, stage: str, **fields: Any) -> list[Row]:
    """Return the tested rows of a stage whose fields have the given values."""
    wanted = {"stage": stage, **fields}
    return [row for row in results if row.items() >= wanted.items()]


def coverage_table(results: Rows, numbers: int) -> str:
    """Return all figures on the committed puzzles, and the shares solved of the fresh ones."""

    def key(row: Row) -> tuple[Any, ...]:
        return row["method"], row["setting"], row["rule"]

    fresh = {key(row): row for row in select(results, "coverage", numbers=numbers, cases=FRESH)}
    cells = []
    for row in sorted(select(results, "coverage", numbers=numbers, cases=COMMITTED), key=_place):
        complete = row["seeds"] == SEEDS or not row["temperature"]
        method = row["method"] if complete else f"{row['method']} [seeds: {row['seeds']}]"
        setting = f"**{row['setting']}**" if row["tuned"] else row["setting"]
        alone = row["rule"] == SURE and row["method"] not in TREES.values()
        figures = *cells_of(row, FIGURES), *cells_of(fresh.get(key(row)), SOLVED)
        cells.append([method, "sure" if alone else "sure and one", setting, *figures])
    header = ["method", "per pass", "setting", *headings(FIGURES), *headings(SOLVED, "fresh: ")]
    return markdown(header, cells) if cells else UNMEASURED


def rivals_table(results: Rows) -> str:
    """Return the differences between trees with their default setting and their fair rivals at equal rows."""
    rows = [row for row in select(results, "coverage", **DEFAULT) if "rival" in row]
    rows.sort(key=lambda row: (list(NUMBERS).index(row["numbers"]), row["cases"], _place(row)))
    cells = []
    for row in rows:
        share = f"{100 * (row['pass@4'][0] - row['rival']['pass@4'][0]):.1f}"
        cost = half_width(row["rows"], 0), half_width(row["pass@4"], 1, 100)
        which = row["numbers"], row["cases"], row["method"]
        cells.append([*which, *cost, share, *cells_of(row["rival"], CHANGES)])
    header = ["numbers", "puzzles", "method", "rows", "solved %", "rival: solved %"]
    return markdown([*header, *headings(CHANGES, "gain: ")], cells) if cells else UNMEASURED


def ablations_table(results: Rows, name: str) -> str:
    """Return one entry of ABLATIONS: all figures, and the differences to the base."""
    columns = (*CHANGES, *COST, *([("positions run", "positions", 0, 1.0)] if name == "caches" else []))
    cells = []
    for changes, numbers in itertools.product(({}, *ABLATIONS[name]), NUMBERS):
        fields: Row = {"method": BASE, "rule": SURE, "change": "", **DEFAULT, **changes, "numbers": numbers}
        for row in select(results, "ablations", **fields):
            setting = row["setting"] if row["rule"] == SURE else f"{row['rule']}; {row['setting']}"
            cells.append([numbers, setting, *cells_of(row, columns), *cells_of(row.get("base"), SOLVED)])
    header = ["numbers", "setting", *headings(columns), *headings(SOLVED, "gain: ")]
    return markdown(header, cells) if cells else UNMEASURED


README = ("independent", "d5p4", "d5p4, distinct, spare 4", RIVALS[16], *(TREES[width] for width in (4, 8)))
SHORT: Columns = (*SOLVED, ("different right", "different", 2, 1), ("rows", "rows", 0, 1))


def named_rows(results: Rows, numbers: int) -> dict[str, Row]:
    """Return one row per method: trees with their default setting, other methods with the rule that solves more."""
    rows = select(results, "coverage", numbers=numbers, cases=COMMITTED)
    rows = [
        row for row in rows if (row.items() >= DEFAULT.items() if row["method"] in TREES.values() else row["tuned"])
    ]
    return {row["method"]: row for row in sorted(rows, key=lambda row: row["pass@4"][0])}


def short_table(results: Rows) -> str:
    """Return the table for the README, without intervals."""
    cells = []
    for numbers in sorted(set(SWEPT.values())):
        named = named_rows(results, numbers)
        for name in (name for name in README if name in named):
            figures = [f"{scale * named[name][figure][0]:.{digits}f}" for _, figure, digits, scale in SHORT]
            cells.append([numbers, name, *figures])
    return markdown(["numbers", "method", *headings(SHORT)], cells)


def tables(results: Rows) -> Tables:
    """Return all tables by name."""
    made: dict[str, Any] = {
        f"coverage-{numbers}": partial(coverage_table, results, numbers) for numbers in sorted(NUMBERS)
    }
    made |= {f"ablation-{name}": partial(ablations_table, results, name) for name in ABLATIONS}
    return made | {"rivals": partial(rivals_table, results), "readme": partial(short_table, results)}


CURVES = {  # (colour, methods) of each curve of the figure
    "reveal tree, K = 4 to 32": ("tab:red", tuple(TREES.values())),
    "best of 4 to 64 samples, order top (the fair rival)": ("tab:blue", tuple(RIVALS.values())),
    "best of 4 to 32 samples, order confidence": ("tab:cyan", ("independent", *(f"best-of-{size}" for size in RIVALS))),
    "d5p4, and with distinct and spare 4, 12": ("tab:green", tuple(name for name in METHODS if "d5p4" in name)),
    "diverse beam": ("tab:gray", ("diverse-beam",)),
}
PANELS = (
    ("pass@4", "rows", "any of four answers right, %", "rows through the model per puzzle"),
    ("first", "rows", "first answer right, %", "rows through the model per puzzle"),
    ("pass@4", "nfe", "any of four answers right, %", "forward passes one after another"),
)


def figure(results: Rows, path: Path) -> None:
    """Draw the shares solved against rows and against passes, with bands for the intervals over puzzles."""
    chart, panels = pyplot().subplots(2, 3, figsize=(12, 6.6))
    for panel_row, numbers in zip(panels, (4, 5), strict=True):
        rows = select(results, "coverage", numbers=numbers, cases=COMMITTED, tuned=True)
        for panel, (share, cost, what, against) in zip(panel_row, PANELS, strict=True):
            for label, (colour, names) in CURVES.items():
                tree = label.startswith("reveal")
                for alone in (False,) if tree else (False, True):  # whether only sure positions are revealed
                    points = [
                        row for row in rows if row["method"] in names and (tree or alone == (row["rule"] == SURE))
                    ]
                    if points:
                        _curve(panel, sorted(points, key=lambda row: row[cost][0]), share, cost, colour, label, alone)
            panel.axvline(WINDOW[numbers], color="black", linewidth=0.8, linestyle=":")
            if cost == "rows":
                panel.set_xscale("log", base=2)
                panel.xaxis.set_major_formatter("{x:g}")
            panel.grid(alpha=0.3)
            panel.set(title=f"{NUMBERS[numbers]} numbers", xlabel=against, ylabel=what)
    handles, labels = panels[0][0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(chart, path)


def _curve(panel: Any, points: list[Row], share: str, cost: str, colour: str, label: str, dashed: bool) -> None:
    where = [row[cost][0] for row in points]
    mean, low, high = ([100 * row[share][i] for row in points] for i in range(3))
    style: Any = {"linestyle": "--", "fillstyle": "none"} if dashed else {"label": label}
    panel.plot(where, mean, marker="o", color=colour, markersize=4, **style)
    panel.fill_between(where, low, high, color=colour, alpha=0.05 if dashed else 0.15, linewidth=0)


def draw(lines: Mapping[Unit, Row], puzzles: int, tune: int, out: Path) -> str:
    """Write the results file, and return all tables as Markdown. What has no lines keeps its last figures."""

    def source(row: Row) -> tuple[Any, ...]:
        return row["stage"], row["method"], row["numbers"], row["cases"], row["rule"]

    (facts, *rows), (last, *old) = summary(lines, puzzles, tune), read(out) or [{"about": []}]
    measured = set(map(source, rows))
    facts["about"] += [origin for origin in last["about"] if origin not in facts["about"]]
    write(out, [facts, *rows, *(row for row in old if source(row) not in measured)])
    return "\n\n".join(f"### {name}\n{table()}" for name, table in tables(read(out)).items())


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("countdown", __doc__)
    parser.add_argument("--model", default="countdown", help="a shipped name or a folder")
    parser.add_argument("--puzzles", type=int, default=TESTED, help="number of test puzzles per count of numbers")
    parser.add_argument("--tune", type=int, default=300, help="number of puzzles for tuning")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, separated by commas [all]")
    add_options(parser, RESULTS / "countdown.jsonl.xz")
    args = parser.parse_args(arguments)
    if not all(2 <= count <= TESTED for count in (args.puzzles, args.tune)):
        raise d5p4.D5P4Error(f"puzzles={args.puzzles} and tune={args.tune} must be 2 to {TESTED}")
    stages = chosen(args.stages, STAGES, "stage")
    lines: Lines[Unit] = read_lines(Unit, args.out)
    if args.draw:
        print(draw(lines, args.puzzles, args.tune, args.results))
        return
    solving.refuse_other_weights(lines, args.model)

    def wanted(finished: Mapping[Unit, Row]) -> Iterator[Unit]:
        return (unit for unit in plan(finished, args.puzzles, args.tune) if unit.stage in stages)

    command = ("bench", "countdown", *(["--tf32"] if args.tf32 else []), "--puzzles", str(args.puzzles))
    loaded = ({"countdown": args.model}, args.device, args.tf32, command)
    run_units(args.out[0], lines, wanted, work, solving.start, loaded, args.processes)
