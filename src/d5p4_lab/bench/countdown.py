"""Measure how many held-out countdown puzzles every method solves with four answers, against the rows that it runs.

    python -m d5p4_lab bench countdown --device cuda --tf32 --processes 5 --out countdown.jsonl
    python -m d5p4_lab bench countdown --draw --out countdown.jsonl

The first command decodes. It adds one line per unit (one method with one seed on all puzzles) to --out as soon as the
unit ends, and the same command continues a killed run. The second command computes the figures of all lines, writes
them to --results and prints the tables; what has no lines keeps its last figures. `bench tables` then redraws the
documents.

The stages, the most important units first:
sweep      every method is tuned on --tune other puzzles of four and five numbers with one seed: first its temperature
           in each of its orders at the first value of its parameter (its "knob"), then the knob at the best
           temperature. The best value has the largest pass@4; of equal values, the one with more different right
           answers. Three numbers take the choice of four numbers. Every method reveals per pass what the tree
           reveals: all positions above the threshold 0.99, and one more.
coverage   the tuned methods on --puzzles committed puzzles and on as many fresh ones, with three seeds if the method is
           random. The tree is also shown with its default setting (temperature 0, diversity 1), and its rivals on the
           committed puzzles with the temperatures beside their best one.
ablations  the tree with K = 8 and one thing changed, on 500 of the puzzles for tuning, with one seed
schedule   five methods without the threshold, one token per step: tuned in their own order, then on committed puzzles
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import d5p4
from d5p4.eval.countdown import WINDOW, Problem, problems
from d5p4.eval.graders import grader
from d5p4.eval.stats import pass_at
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..figures import pyplot, save
from ..provenance import about
from ..statistics import interval
from ..timing import wall
from . import RESULTS, Row, Tables, chosen, generate, half_width, make_parser, markdown, read, write
from .units import Lines, read_lines, rule_options, run_units
from .variants import ranked_texts, register_variants

K = 4
SEEDS = 3
NUMBERS = {4: "four", 5: "five", 3: "three"}
SWEPT = {4: 4, 5: 5, 3: 4}  # the count of numbers with which the settings are tuned
TUNING, COMMITTED, FRESH = "tuning", "committed", "fresh"
PUZZLE_SEEDS = {COMMITTED: 0, TUNING: 1, FRESH: 2}
ABLATED = 500  # the most puzzles of an ablation
TESTED = 1000  # the largest value of --puzzles and --tune, and the number of puzzles that other sets leave out
TOKENS = 1 << 18  # a forward on a GPU has at most this many tokens, and a call of `generate` eight times as many
STAGES = ("sweep", "coverage", "ablations", "schedule")
SCHEDULE, SURE = "schedule", "threshold 0.99"
AS_TREE = "sure-and-one 0.99"  # other methods reveal with it what a tree reveals under the threshold (see `variants`)

Knob = float | None
Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Method:
    """A method's options for `d5p4.generate`, and the settings to choose from."""

    options: Mapping[str, Any]
    heats: Mapping[str, tuple[float, ...]]  # the temperatures of each order
    knob: str = ""
    values: tuple[Knob, ...] = (None,)
    like: str = ""  # the method whose choice this method takes
    rule: str = AS_TREE


def samples(count: int, **options: Any) -> Method:
    """Return the method that keeps the four best of `count` independent answers, different ones first."""
    if count == K:
        return Method({"method": "independent"}, **options)
    return Method({"method": "best-of-n", "repeats": False, "w": count // K}, **options)


DRAWN, TOP, BOTH = (
    {"confidence": (1.0, 2.0, 3.0)},
    {"top": (0.5, 0.7, 1.0, 1.5)},
    {"confidence": (1.0, 2.0, 3.0), "top": (1.0,)},
)
SIZES = (4, 8, 16, 32, 64)
RIVALS = {size: f"best-of-{size}, top" for size in SIZES}  # the fair rivals of the tree
WIDTHS = (4, 8, 16, 32)
TREES = {width: f"tree, K = {width}" for width in WIDTHS}
PAPER: dict[str, Any] = {"method": "d5p4", "w": 4}
DISTINCT = {**PAPER, "distinct": True, "spare": 4}
BETAS = (100.0, 20.0, 300.0)
CLASSIC = {  # the methods that are also shown without a threshold
    "independent": samples(4, heats=DRAWN),
    "best-of-16": samples(16, heats=DRAWN),
    "diverse-beam": Method({"method": "diverse-beam", "w": 4}, BOTH, "alpha", (100.0, 20.0, 50.0)),
    "d5p4": Method(PAPER, BOTH, "beta", BETAS),
    "d5p4, distinct, spare 4": Method(DISTINCT, {"confidence": (2.0, 3.0), "top": (1.0,)}, "beta", (300.0, 100.0)),
}
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
        for width in WIDTHS
    },
    **{RIVALS[size]: samples(size, heats=TOP) for size in SIZES},
    **CLASSIC,
    **{f"best-of-{size}": samples(size, heats=DRAWN, like="best-of-16") for size in (8, 32)},
    "d5p4, distinct, spare 12": Method(DISTINCT | {"spare": 12}, BOTH, "beta", BETAS, like="d5p4, distinct, spare 4"),
}

BASE = TREES[8]
DEFAULT: dict[str, Any] = {"temperature": 0.0, "knob": 1.0, "order": "top"}  # the tree's
ABLATIONS: dict[str, list[dict[str, Any]]] = {  # one table per entry; a row replaces these fields of the base's unit
    "diversity": [{"knob": value} for value in (0.0, 0.5, 2.0, 4.0)],
    "temperature": [
        *({"temperature": heat, "knob": value} for heat in (0.3, 1.0) for value in (0.0, 1.0)),
        *({"knob": 0.0, "change": f"method=tree-noise heat={heat:g}"} for heat in (0.3, 1.0)),
    ],
    "order": [{"order": order} for order in ("left", "margin", "entropy", "random")],
    "rule": [
        *({"rule": f"threshold {tau:g}"} for tau in (1, 0.999, 0.95, 0.9, 0.8)),
        *({"rule": rule} for rule in ("factor 0.1", "factor 0.3", "entropy-bound 0.05", "entropy-bound 0.2")),
    ],
    "children": [{"change": f"w={count}"} for count in (2, 8)],
    "spare": [{"change": f"spare={count}"} for count in (0, 2, 12)],
    "similarity": [{"change": f"method=tree-{name}"} for name in ("hidden", "product")],
    "selection": [{"change": f"method=tree-{name}"} for name in ("stay", "hybrid")],
    "ranking": [{"change": f"sort={sort}"} for sort in ("entropy", "l", "leaves")],
    "positions": [
        {"method": "d5p4", "rule": rule, "change": change}
        for rule in (SURE, "threshold 0.9")
        for change in ("", "positions=masked")
    ],
}


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all puzzles of one set."""

    stage: str
    method: str
    numbers: int
    rule: str  # "schedule", or a rule and its value, such as "threshold 0.9"
    puzzles: int
    cases: str = TUNING
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    change: str = ""  # options that replace those of the method, such as "w=8", or another way to sort all K texts
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`. The schedule reveals one token per step."""
        method = METHODS[self.method]
        options: dict[str, Any] = {"k": K, "gen_length": WINDOW[self.numbers], "logprobs": True}
        options |= dict(method.options) | {"temperature": self.temperature, "order": self.order}
        options |= {method.knob: self.knob} if method.knob else {}
        return options | rule_options(self.rule) | dict(map(option_of, self.change.split()))

    def __str__(self) -> str:
        place = f"{self.stage} {self.numbers} numbers, {self.cases}, {self.rule}"
        return f"{place}: {self.method} ({setting_of(vars(self))}), seed {self.seed}"


def option_of(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def setting_of(unit: Mapping[str, Any], methods: Mapping[str, Method] = METHODS) -> str:
    """Return the order, the temperature, the knob and the change of a unit. `unit` has the fields of a `Unit`."""
    name, value = methods[unit["method"]].knob, unit["knob"]
    parts = [unit["order"], f"T {unit['temperature']:g}", f"{name} {value:g}" if name else "", unit["change"]]
    return ", ".join(filter(None, parts))


# ---- the plan


def choose(lines: Mapping[Any, Row], units: Sequence[Any]) -> Any:
    """Return the unit with the best pass@4; of equals, with the most different right answers. None: not all ended."""
    if any(unit not in lines for unit in units):
        return None
    return max(units, key=lambda unit: (lines[unit]["pass@4"], lines[unit]["different"]))


def sweep(lines: Mapping[Any, Row], first: Any, method: Method) -> Generator[Any, None, Any]:
    """Yield the units that tune a method, and return the best one, or None as long as units are missing.

    Units may be of any class that has the fields `order`, `temperature` and `knob` of `Unit`.
    """
    values = method.values
    settings = [(order, heat) for order, heats in method.heats.items() for heat in heats]
    heated = [replace(first, order=order, temperature=heat, knob=values[0]) for order, heat in settings]
    yield from heated
    best = choose(lines, heated)
    if best is None:
        return None
    tuned = [replace(best, knob=value) for value in values]  # the first value is that of `best` itself
    yield from tuned[1:]
    return choose(lines, tuned)


Best = dict[tuple[str, int], Unit | None]


def sweeps(lines: Mapping[Unit, Row], tune: int) -> Generator[Unit, None, Best]:
    """Yield the units that tune all methods. Return the best unit of each method and count of numbers."""
    counts = sorted(set(SWEPT.values()))
    best: Best = {}
    for name, method in METHODS.items():
        for numbers in counts:
            source = best.get((method.like, numbers))
            first = Unit("sweep", name, numbers, method.rule, tune)
            tuned = (yield from sweep(lines, first, method)) if not method.like else source
            best[name, numbers] = replace(tuned, method=name) if tuned else None
    return best


def plan(lines: Mapping[Unit, Row], puzzles: int, tune: int) -> Iterator[Unit]:
    """Yield all units that are known by now, the most important first. A unit may come twice."""
    counts = sorted(set(SWEPT.values()))
    best = yield from sweeps(lines, tune)

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
            base = Unit("", BASE, numbers, SURE, 0, **DEFAULT) if "method" not in change else best["d5p4", numbers]
            if base:
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
    for name, method in CLASSIC.items():
        for numbers in counts:
            first = Unit("schedule", name, numbers, SCHEDULE, tune)
            heats = {first.order: method.heats[first.order]}
            if unit := (yield from sweep(lines, first, replace(method, heats=heats))):
                yield from (replace(unit, puzzles=puzzles, cases=COMMITTED, seed=seed) for seed in range(SEEDS))


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


@dataclass
class Session:
    """What a process has loaded."""

    model: Any = None
    tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


session = Session()


def start(name: str, device: str | None, dtype: str, tf32: bool, tokens: int | None, words: list[str]) -> None:
    """Load the model into this process."""
    if tf32:
        torch.set_float32_matmul_precision("high")
    session.model = d5p4.load(name, device, dtype)
    session.tokens = tokens or (TOKENS if session.model.device.type == "cuda" else 1 << 14)
    exact = f"{session.model.dtype}".removeprefix("torch.") + (" (tf32)" if tf32 else "")
    session.facts = about(session.model.device, words) | {"dtype": exact, "weights": weights_hash(find(name))}


def judge(
    task: str, prompts: Sequence[str], texts: Sequence[Sequence[str]], references: Sequence[Any] | None = None
) -> dict[str, str]:
    """Judge the answers, the texts [P][k or fewer], with the grader of a task.

    Every returned text has one character per prompt.

    right      bit i of this hexadecimal digit is 1 if answer i is right
    different  the number of right answers with different canonical forms
    texts      the number of different texts
    """
    marker, right, different = grader(task), "", ""
    for prompt, answers, reference in zip(prompts, texts, references or [None] * len(prompts), strict=True):
        marks = marker.grade(prompt, answers, reference)
        assert marks is not None
        right += f"{sum(mark << i for i, mark in enumerate(marks)):x}"
        different += f"{marker.count_right(answers, marks)}"
    return {"right": right, "different": different, "texts": "".join(f"{len(set(answers))}" for answers in texts)}


def measures(line: Row) -> Values:
    """Return the measures of a unit, [P] each: pass@1, pass@4, first and four as shares, the others as counts."""
    puzzles = line["puzzles"]
    shares = {"four": np.array([float(digit == str(K)) for digit in puzzles["texts"]])}
    return marks(puzzles) | shares | {name: np.array(puzzles[name]) for name in ("rows", "nfe")}


def marks(puzzles: Row) -> Values:
    """Return the measures [P] that follow from the right answers alone."""
    digits = np.array([int(digit, 16) for digit in puzzles["right"]])
    right = (digits[:, None] >> np.arange(K) & 1).astype(bool)  # [P, k]
    shares = {"pass@1": pass_at(right, 1), "pass@4": pass_at(right, K), "first": right[:, 0].astype(float)}
    return shares | {"different": np.array([int(digit) for digit in puzzles["different"]])}


def work(unit: Unit) -> Row:
    prompts = [problem.prompt for problem in puzzles_of(unit.cases, unit.puzzles, unit.numbers)]
    return answer("countdown", prompts, unit.seed, unit.options())


def answer(
    task: str, prompts: Sequence[str], seed: int, options: dict[str, Any], references: Sequence[Any] | None = None
) -> Row:
    """Decode and judge the problems of a unit. Return its line: facts, results per problem, and the mean of each
    measure. Besides the options of `generate` there is `sort`: "entropy", "l" or "leaves" ranks all K texts anew."""
    register_variants()
    sort, model = options.pop("sort", ""), session.model
    options |= {"k": K + options.pop("spare")} if sort else {}
    decode = partial(generate, model, prompts, seed=seed, max_tokens_per_forward=session.tokens, **options)
    result, seconds = wall(decode, model.device)
    texts = ranked_texts(model, result, sort) if sort in ("l", "leaves") else result.texts
    counts = {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()}
    if sort == "leaves":  # one more forward of all leaves
        counts["rows"] = [rows + len(answers) for rows, answers in zip(counts["rows"], texts, strict=True)]
        counts["nfe"] = [passes + 1 for passes in counts["nfe"]]
    judged = judge(task, prompts, [row[:K] for row in texts], references)
    return line_of(result, seconds, options, judged | counts)


def line_of(result: d5p4.Result, seconds: float, options: Mapping[str, Any], puzzles: Row) -> Row:
    """Return the line of a unit. `puzzles` has what `judge` returns, and the rows and passes per puzzle."""
    defaults, settings = d5p4.Settings().to_dict(), d5p4.Settings.make(session.model, **options).to_dict()
    line: Row = {"about": session.facts, "seconds": round(seconds, 2)}
    line["settings"] = {name: value for name, value in settings.items() if value != defaults.get(name)}
    line["puzzles"] = puzzles
    line |= {name: round(float(values.mean()), 5) for name, values in measures(line).items()}
    line |= spread(result)
    solved = f"pass@4 {100 * line['pass@4']:.1f}, first {100 * line['first']:.1f}, {line['different']:.2f} different"
    line["shown"] = f"{solved}, {line['rows']:.1f} rows in {line['nfe']:.1f} passes, {seconds:.1f} s"
    return line


def spread(result: d5p4.Result) -> dict[str, float | None]:
    """Return the mean over prompts of log det S, and of the standard deviation of l, the answers' log-probability.

    None: no prompt has several different answers.
    """
    sums = [[math.fsum(row) for row in rows] for rows in result.logprobs or () if len(rows) > 1]
    spreads, logdet = [np.std(row, ddof=1) for row in sums], result.logdet[result.logdet.isfinite()].tolist()
    means = {"spread": spreads, "logdet": logdet}
    return {name: round(float(np.mean(values)), 4) if values else None for name, values in means.items()}


# ---- figures and tables


def summary(lines: Mapping[Unit, Row], puzzles: int, tune: int) -> dict[str, Any]:
    """Return the contents of the results file. Figures are [mean, low, high]: means over seeds, 95 % over puzzles.

    In the stage `coverage`, trees are compared with their fair rivals at equal rows, puzzle by puzzle: each puzzle's
    figure is interpolated between the two rivals with fewer and with more rows, linearly in the logarithm of rows. In
    the stage `ablations`, the others are compared with the base, puzzle by puzzle.
    """
    units, tuned = [unit for unit in dict.fromkeys(plan(lines, puzzles, tune)) if unit in lines], _tuned(lines, tune)
    groups: dict[Unit, list[Unit]] = {}
    for unit in units:
        if unit.stage == "ablations" or unit.cases != TUNING:
            groups.setdefault(replace(unit, seed=0), []).append(unit)
    means: dict[Unit, Values] = {}  # [P], the means over seeds
    rivals: dict[tuple[int, str], list[Values]] = {}
    for unit, group in groups.items():
        seeds = [measures(lines[seed]) for seed in group]
        means[unit] = {name: np.stack([seed[name] for seed in seeds]).mean(0) for name in seeds[0]}
        if unit.stage == "coverage" and unit.method in RIVALS.values() and setting_of(vars(unit)) in tuned(unit):
            rivals.setdefault((unit.numbers, unit.cases), []).append(means[unit])
    rows = []
    for unit, values in means.items():
        figures: Row = dict(figures_of(values))
        if unit.stage == "coverage" and unit.method in TREES.values():
            same = rivals.get((unit.numbers, unit.cases))
            figures |= {"rival": _against(values, at_equal_rows(values, same))} if same else {}
        elif unit.stage == "ablations":
            base = replace(unit, change="") if unit.method != BASE else replace(unit, rule=SURE, change="", **DEFAULT)
            figures |= {"base": _against(values, means[base])} if base in means and base != unit else {}
            figures |= {name: lines[unit][name] for name in ("spread", "logdet")}
        setting = setting_of(vars(unit))
        figures |= {"tuned": setting in tuned(unit)} if unit.stage == "coverage" else {}
        rows.append(_identity(unit) | {"seeds": len(groups[unit]), "setting": setting} | figures)
    sweeps = [
        _identity(unit) | {name: lines[unit][name] for name in ("pass@4", "different", "rows")}
        for unit in units
        if unit.cases == TUNING and unit.stage != "ablations"
    ]
    origins = {json.dumps(lines[unit]["about"]): lines[unit]["about"] for unit in units}
    return {"about": list(origins.values()), "puzzles": puzzles, "tune": tune, "rows": rows, "sweeps": sweeps}


def _tuned(lines: Mapping[Unit, Row], tune: int) -> Callable[[Unit], list[str]]:
    """Return a function that returns the tuned setting of a unit's method, in a list, or an empty list without one."""
    left = sweeps(lines, tune)
    while True:
        try:
            next(left)
        except StopIteration as end:
            best: Best = end.value
            break

    def settings(unit: Unit) -> list[str]:
        tuned = best.get((unit.method, SWEPT[unit.numbers]))
        return [setting_of(vars(tuned))] if tuned else []

    return settings


def figures_of(values: Values) -> dict[str, list[float]]:
    return {name: [round(x, 5) for x in interval(column)] for name, column in values.items()}


def _against(values: Values, others: Values) -> dict[str, list[float]]:
    return figures_of({name: values[name] - others[name] for name in ("pass@4", "first", "different", "rows")})


def at_equal_rows(values: Values, rivals: list[Values]) -> Values:
    """Return the figures per puzzle that the rivals have with as many rows on average as `values` have."""
    rivals = sorted(rivals, key=lambda rival: float(rival["rows"].mean()))
    budgets = [math.log(rival["rows"].mean()) for rival in rivals]
    place = float(np.interp(math.log(values["rows"].mean()), budgets, range(len(rivals))))
    low = min(int(place), len(rivals) - 1)
    high = min(low + 1, len(rivals) - 1)
    return {name: (1 - place + low) * rivals[low][name] + (place - low) * rivals[high][name] for name in values}


def _identity(unit: Unit) -> Row:
    return {name: value for name, value in vars(unit).items() if name not in ("puzzles", "seed")}


Columns = Sequence[tuple[str, str, int, float]]  # (heading, name of a figure, digits, scale)
SOLVED: Columns = (("solved %", "pass@4", 1, 100), ("first right %", "first", 1, 100))
COST: Columns = (("rows", "rows", 0, 1), ("passes", "nfe", 1, 1))
FIGURES: Columns = (*SOLVED, ("different right", "different", 2, 1), ("four texts %", "four", 1, 100), *COST)
CHANGES: Columns = (*SOLVED, ("different right", "different", 2, 1))


def _cells(row: Row | None, columns: Columns) -> list[str | None]:
    return [half_width(row[name], digits, scale) if row and name in row else None for _, name, digits, scale in columns]


def _headings(columns: Columns, before: str = "") -> list[str]:
    return [f"{before}{heading}" for heading, *_ in columns]


def _named(row: Row) -> str:
    """Return the method of a row, and the number of seeds if some are missing."""
    complete = row["seeds"] == SEEDS or not row["temperature"]
    return row["method"] if complete else f"{row['method']} [seeds: {row['seeds']}]"


def _place(row: Row) -> tuple[int, float]:
    """Return a number for the curve of the method, and the rows."""
    curves = [names for _, names in CURVES.values()]
    return next(i for i, names in enumerate(curves) if row["method"] in names), row["rows"][0]


Results = Mapping[str, Any]
UNMEASURED = "not measured yet"


def _rows(results: Results, stage: str, **fields: Any) -> list[Row]:
    """Return the rows of a stage whose fields have the given values."""
    wanted = {"stage": stage, **fields}
    return [row for row in results.get("rows", ()) if all(row[name] == value for name, value in wanted.items())]


def coverage_table(results: Results, numbers: int) -> str:
    """Return all figures on the committed puzzles, and the shares solved of the fresh ones."""

    def key(row: Row) -> tuple[Any, ...]:
        return row["method"], row["setting"], row["rule"]

    fresh = {key(row): row for row in _rows(results, "coverage", numbers=numbers, cases=FRESH)}
    cells = []
    for row in sorted(_rows(results, "coverage", numbers=numbers, cases=COMMITTED), key=_place):
        setting = f"**{row['setting']}**" if row["tuned"] else row["setting"]
        alone = row["rule"] == SURE and row["method"] not in TREES.values()
        figures = *_cells(row, FIGURES), *_cells(fresh.get(key(row)), SOLVED)
        cells.append([_named(row), "sure" if alone else "sure and one", setting, *figures])
    header = ["method", "per pass", "setting", *_headings(FIGURES), *_headings(SOLVED, "fresh: ")]
    return markdown(header, cells) if cells else UNMEASURED


def rivals_table(results: Results) -> str:
    """Return the differences between trees with their default setting and their fair rivals at equal rows."""
    rows = [row for row in _rows(results, "coverage") if "rival" in row and row.items() >= DEFAULT.items()]
    rows.sort(key=lambda row: (list(NUMBERS).index(row["numbers"]), row["cases"], _place(row)))
    cells = []
    for row in rows:
        share = f"{100 * (row['pass@4'][0] - row['rival']['pass@4'][0]):.1f}"
        cost = half_width(row["rows"], 0), half_width(row["pass@4"], 1, 100)
        which = row["numbers"], row["cases"], row["method"]
        cells.append([*which, *cost, share, *_cells(row["rival"], CHANGES)])
    header = ["numbers", "puzzles", "method", "rows", "solved %", "rival: solved %"]
    return markdown([*header, *_headings(CHANGES, "gain: ")], cells) if cells else UNMEASURED


def ablations_table(results: Results, name: str) -> str:
    """Return one entry of ABLATIONS: all figures, and the differences to the base."""
    rows, cells, spreads = _rows(results, "ablations"), [], name == "diversity"
    base: list[dict[str, Any]] = [] if name == "positions" else [{}]
    for changes in (*base, *ABLATIONS[name]):
        fields: Row = {"method": BASE, "rule": SURE, "change": "", **DEFAULT, **changes}
        if fields["method"] != BASE:
            fields = changes
        for numbers in NUMBERS:
            for row in (row for row in rows if row["numbers"] == numbers and row.items() >= fields.items()):
                setting = row["setting"] if row["rule"] == SURE else f"{row['rule']}; {row['setting']}"
                figures = [*_cells(row, (*CHANGES, *COST)), *_cells(row.get("base"), SOLVED)]
                cells.append([numbers, setting, *figures, *([row["spread"], row["logdet"]] if spreads else [])])
    if not cells:
        return UNMEASURED
    header = ["numbers", "setting", *_headings((*CHANGES, *COST)), *_headings(SOLVED, "gain: ")]
    return markdown([*header, *(["spread of l", "log det S"] if spreads else [])], cells)


def sweeps_table(results: Results) -> str:
    """Return pass@4 in all sweeps, by order and temperature, then by knob. The chosen settings are bold."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in results.get("sweeps", ()):
        groups.setdefault((row["numbers"], row["rule"], row["method"]), []).append(row)
    cells = []
    for key, group in groups.items():
        best = max(group, key=lambda row: (row["pass@4"], row["different"]))
        entries = [(f"{setting_of(row)}: {100 * row['pass@4']:.1f}", row is best) for row in group]
        cells.append([*key, "; ".join(f"**{entry}**" if bold else entry for entry, bold in entries)])
    return markdown(["numbers", "rule", "method", "pass@4 %"], cells)


def classic_table(results: Results) -> str:
    """Return the figures of the paper's methods and the baselines, without and with the threshold."""
    cells = []
    for numbers in sorted(set(SWEPT.values())):
        for stage in ("schedule", "coverage"):
            for row in _rows(results, stage, numbers=numbers, cases=COMMITTED):
                if row["method"] in CLASSIC and row["rule"] != AS_TREE:
                    figures = _cells(row, (("", "pass@1", 1, 100), *FIGURES))
                    cells.append([numbers, row["rule"], _named(row), row["setting"], *figures])
    return markdown(["numbers", "rule", "method", "setting", "pass@1 %", *_headings(FIGURES)], cells)


README = ("independent", "d5p4", "d5p4, distinct, spare 4", RIVALS[16], *(TREES[width] for width in (4, 8)))
SHORT: Columns = (*SOLVED, ("different right", "different", 2, 1), ("rows", "rows", 0, 1))


def tuned_rows(results: Results, numbers: int) -> list[Row]:
    """Return the rows of the tuned methods on the committed puzzles, the smallest number of rows first."""
    rows = _rows(results, "coverage", numbers=numbers, cases=COMMITTED, tuned=True)
    return sorted(rows, key=lambda row: row["rows"][0])


def named_rows(results: Results, numbers: int) -> dict[str, Row]:
    """Return one row per method: trees with their default setting, other methods with the rule that solves more."""
    rows = _rows(results, "coverage", numbers=numbers, cases=COMMITTED)
    rows = [
        row for row in rows if (row.items() >= DEFAULT.items() if row["method"] in TREES.values() else row["tuned"])
    ]
    return {row["method"]: row for row in sorted(rows, key=lambda row: row["pass@4"][0])}


def short_table(results: Results) -> str:
    """Return the table for the README, without intervals."""
    cells = []
    for numbers in sorted(set(SWEPT.values())):
        named = named_rows(results, numbers)
        for name in (name for name in README if name in named):
            figures = [f"{scale * named[name][figure][0]:.{digits}f}" for _, figure, digits, scale in SHORT]
            cells.append([numbers, name, *figures])
    return markdown(["numbers", "method", *_headings(SHORT)], cells)


def card_table(results: Results) -> str:
    """Return the table for the model's card: samples, d5p4 without and with its options, and the tree."""
    cells: list[list[str | None]] = []
    for numbers in sorted(set(SWEPT.values())):
        named = named_rows(results, numbers)
        ways = [named.get(name) for name in ("independent", "d5p4", "d5p4, distinct, spare 4", BASE)]
        solved = [*_cells(ways[0], (("", "pass@1", 1, 100),)), *(_cells(way, SOLVED[:1])[0] for way in ways)]
        cells.append([f"{NUMBERS[numbers]} numbers: solved %", *solved])
        different = [_cells(way, CHANGES[2:])[0] for way in ways]
        cells.append([f"{NUMBERS[numbers]} numbers: different right answers", "", *different])
    names = ("one sample", "any of four samples", "any of four by d5p4", "and with `distinct`, `spare=4`")
    return markdown(["", *names, "any of four by the tree, `spare=4`"], cells)


def tables(results: Results) -> Tables:
    """Return all tables by name."""
    made: dict[str, Any] = {
        f"coverage-{numbers}": partial(coverage_table, results, numbers) for numbers in sorted(NUMBERS)
    }
    made |= {f"ablation-{name}": partial(ablations_table, results, name) for name in ABLATIONS}
    made |= {"rivals": partial(rivals_table, results), "classic": partial(classic_table, results)}
    made |= {"sweeps": partial(sweeps_table, results), "card": partial(card_table, results)}
    return made | {"readme": partial(short_table, results)}


CURVES = {  # (colour, methods) of each curve of the figure
    "reveal tree, K = 4 to 32": ("tab:red", tuple(TREES.values())),
    "best of 4 to 64 samples, order top (the fair rival)": ("tab:blue", tuple(RIVALS.values())),
    "best of 4 to 32 samples, order confidence": (
        "tab:cyan",
        ("independent", *(f"best-of-{size}" for size in SIZES)),
    ),
    "d5p4, and with distinct and spare 4, 12": ("tab:green", tuple(name for name in METHODS if "d5p4" in name)),
    "diverse beam": ("tab:gray", ("diverse-beam",)),
}
PANELS = (
    ("pass@4", "rows", "any of four answers right, %", "rows through the model per puzzle"),
    ("first", "rows", "first answer right, %", "rows through the model per puzzle"),
    ("pass@4", "nfe", "any of four answers right, %", "forward passes one after another"),
)


def figure(results: Results, path: Path) -> None:
    """Draw the shares solved against rows and against passes, with bands for the intervals over puzzles."""
    chart, panels = pyplot().subplots(2, 3, figsize=(12, 6.6))
    for panel_row, numbers in zip(panels, (4, 5), strict=True):
        rows = tuned_rows(results, numbers)
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
    results, last = summary(lines, puzzles, tune), read(out)
    for name in ("rows", "sweeps"):
        measured = set(map(_source, results[name]))
        results[name] += [row for row in last.get(name, ()) if _source(row) not in measured]
    results["about"] += [origin for origin in last.get("about", ()) if origin not in results["about"]]
    parts = (f'"{name}": {_one_per_line(value)}' for name, value in results.items())
    write(out, "{\n" + ",\n".join(parts) + "\n}\n")
    return "\n\n".join(f"### {name}\n{table()}" for name, table in tables(read(out)).items())


def _source(row: Row) -> tuple[Any, ...]:
    return row["stage"], row["method"], row["numbers"], row["cases"], row["rule"]


def _one_per_line(value: Any) -> str:
    """Return the JSON text of a value. If the value is a list, each entry is on its own line."""
    entries = [json.dumps(entry) for entry in value] if isinstance(value, list) else []
    return "[\n" + ",\n".join(entries) + "\n]" if entries else json.dumps(value)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("countdown", __doc__)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="countdown", help="a shipped name or a folder")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true", help="allow tf32 in float32 matrix products on a GPU")
    parser.add_argument("--puzzles", type=int, default=TESTED, help="number of test puzzles per count of numbers")
    parser.add_argument("--tune", type=int, default=300, help="number of puzzles for tuning")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, separated by commas [all]")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--tokens", type=int, default=None, help="at most this many tokens per forward")
    parser.add_argument("--out", type=Path, action="append", required=True, help="file of lines; --draw takes several")
    parser.add_argument("--draw", action="store_true", help="compute the figures of --out and write --results")
    parser.add_argument("--results", type=Path, default=RESULTS / "countdown.json.xz")
    args = parser.parse_args(arguments)
    if not all(2 <= count <= TESTED for count in (args.puzzles, args.tune)) or args.processes < 1:
        counts = f"puzzles={args.puzzles} and tune={args.tune} must be 2 to {TESTED}"
        raise d5p4.D5P4Error(f"{counts}, processes={args.processes} above 0")
    stages = chosen(args.stages, STAGES, "stage")
    lines: Lines[Unit] = read_lines(Unit, args.out)
    if args.draw:
        print(draw(lines, args.puzzles, args.tune, args.results))
        return
    digest = weights_hash(find(args.model))
    if any(line["about"]["weights"] != digest for line in lines.values()):
        raise d5p4.D5P4Error(f"{args.out[0]} has lines of other weights; give another file")

    def wanted(finished: Mapping[Unit, Row]) -> Iterator[Unit]:
        return (unit for unit in plan(finished, args.puzzles, args.tune) if unit.stage in stages)

    command = ["bench", "countdown", *(["--tf32"] if args.tf32 else []), "--puzzles", str(args.puzzles)]
    loaded = (args.model, args.device, args.dtype, args.tf32, args.tokens, command)
    run_units(args.out[0], lines, wanted, work, start, loaded, args.processes, args.minutes)
