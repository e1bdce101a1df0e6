"""Measure how many held-out countdown puzzles every method solves with k = 4 answers, under every reveal rule.

    python -m d5p4_lab bench countdown --device cuda --tf32 --processes 4 --out countdown.jsonl
    python -m d5p4_lab bench countdown --draw --out countdown.jsonl

The first command decodes. It adds one line per unit (one method with one seed on all puzzles) to --out as soon as the
unit ends, and the same command continues a killed run. The second command computes the figures of all lines, writes
them to --results and prints the tables; `bench tables` then redraws the documents.

The stages, the most important units first:
sweep      every method is tuned on --tune other puzzles with one seed: first its temperature at the model's default of
           its parameter (its "knob"), then the knob at the best temperature. The best value has the largest pass@4;
           of equal values, the one with more different right answers. This is done under the schedule and under the
           threshold 0.99, and the other thresholds take the choice of 0.99. Under the rules `factor` and
           `entropy-bound`, which also take that choice, the value of the rule itself is swept.
positions  d5p4 with Q over all positions, and over masked positions only
table      the tuned methods on --puzzles puzzles with three seeds (factor and entropy bound: one seed)
orders     independent sampling and best-of-16 by the orders `top` and `left`, each at its own best temperature
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import d5p4
from d5p4.eval.countdown import WINDOW, Problem, canonical, is_right, problems
from d5p4.eval.stats import pass_at
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..provenance import about
from ..statistics import interval
from ..timing import wall
from . import RESULTS, Row, Tables, chosen, generate, half_width, make_parser, markdown, read, write
from .units import Lines, read_lines, rule_options, run_units

K, W = 4, 4
SEEDS = 3
NUMBERS = (4, 5)
TEST_SEED, TUNE_SEED = 0, 1  # of the puzzles
TESTED = 1000  # the largest value of --puzzles; tuning never uses these test puzzles
TOKENS = 1 << 18  # a forward on a GPU has at most this many tokens, and a call of `generate` eight times as many
STAGES = ("sweep", "positions", "table", "orders")

TEMPERATURES = (0.5, 1.0, 1.5, 2.0, 3.0)
SCHEDULE, SURE = "schedule", "threshold 0.99"
LESS_SURE = ("threshold 0.95", "threshold 0.9")
VALUED = {"factor": (0.1, 0.3, 1.0), "entropy-bound": (0.05, 0.2, 0.5)}  # rules with a value to sweep
ORDERS, ORDER_TEMPERATURES, ORDERED = ("top", "left"), (0.5, 1.0, 1.5), ("independent", "best-of-16")

Knob = float | bool | None


@dataclass(frozen=True)
class Method:
    """A method's options for `d5p4.generate`, and the values of its knob. The first value is the model's default."""

    options: Mapping[str, Any]
    knob: str = ""
    values: tuple[Knob, ...] = (None,)


BETAS = (100.0, 20.0, 300.0)
METHODS = {
    "independent": Method({"method": "independent"}),
    "best-of-16": Method({"method": "best-of-n", "rank": "entropy"}, "repeats", (True, False)),
    "diverse-beam": Method({"method": "diverse-beam"}, "alpha", (100.0, 5.0, 20.0, 50.0)),
    "d5p4": Method({"method": "d5p4"}, "beta", BETAS),
    "d5p4, distinct, spare 4": Method({"method": "d5p4", "distinct": True, "spare": 4}, "beta", BETAS),
}


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all puzzles for tuning or for testing."""

    stage: str
    method: str
    numbers: int
    rule: str  # "schedule", or a rule and its value, such as "threshold 0.9"
    puzzles: int
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    positions: str = ""  # "" is the library's default
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`. The schedule reveals one token per step."""
        method = METHODS[self.method]
        common = {"k": K, "w": W, "gen_length": WINDOW[self.numbers]}
        tuned: dict[str, Any] = {"temperature": self.temperature, "order": self.order}
        tuned |= {method.knob: self.knob} if method.knob else {}
        tuned |= {"positions": self.positions} if self.positions else {}
        return common | dict(method.options) | tuned | rule_options(self.rule)

    def __str__(self) -> str:
        details = " ".join(filter(None, (self.order, self.positions)))
        place = f"{self.stage} {self.numbers} numbers, {self.rule}, {details}"
        return f"{place}: {self.method} ({_setting(vars(self))}), seed {self.seed}"


def _setting(unit: Mapping[str, Any]) -> str:
    """Return the temperature and the knob of a unit as text. `unit` has the fields of a `Unit`."""
    name, value = METHODS[unit["method"]].knob, unit["knob"]
    knob = f", {name} {str(value).lower() if isinstance(value, bool) else f'{value:g}'}" if name else ""
    return f"T {unit['temperature']:g}{knob}"


# ---- the plan


def choose(lines: Mapping[Unit, Row], units: Sequence[Unit]) -> Unit | None:
    """Return the unit with the best pass@4; of equals, with the most different right answers. None: not all ended."""
    if any(unit not in lines for unit in units):
        return None
    return max(units, key=lambda unit: (lines[unit]["pass@4"], lines[unit]["different"]))


def sweep(
    lines: Mapping[Unit, Row], first: Unit, temperatures: Sequence[float], values: Sequence[Knob]
) -> Generator[Unit, None, Unit | None]:
    """Yield the units that tune a method, and return the best one, or None as long as units are missing."""
    heated = [replace(first, temperature=temperature) for temperature in temperatures]
    yield from heated
    best = choose(lines, heated)
    if best is None:
        return None
    tuned = [replace(best, knob=value) for value in values]  # the first value is that of `best` itself
    yield from tuned[1:]
    return choose(lines, tuned)


def plan(lines: Mapping[Unit, Row], puzzles: int, tune: int) -> Iterator[Unit]:
    """Yield all units that are known by now, the most important first."""
    pairs = [(name, numbers) for numbers in NUMBERS for name in METHODS]
    best: dict[tuple[str, int, str], Unit | None] = {}
    for rule in (SCHEDULE, SURE):
        for name, numbers in pairs:
            values = METHODS[name].values
            first = Unit("sweep", name, numbers, rule, tune, knob=values[0])
            best[name, numbers, rule] = yield from sweep(lines, first, TEMPERATURES, values)
    for rule in LESS_SURE:
        best |= {(name, numbers, rule): best[name, numbers, SURE] for name, numbers in pairs}
    for numbers in NUMBERS:
        for rule in (SURE, LESS_SURE[-1]):
            if unit := best["d5p4", numbers, rule]:
                for positions in ("all", "masked"):
                    yield replace(unit, stage="positions", rule=rule, puzzles=puzzles, positions=positions)
    for rules in ((SCHEDULE, SURE), LESS_SURE):
        for seed in range(SEEDS):
            for rule in rules:
                for name, numbers in pairs:
                    if unit := best[name, numbers, rule]:
                        yield replace(unit, stage="table", rule=rule, puzzles=puzzles, seed=seed)
    for rule, strengths in VALUED.items():
        for name, numbers in pairs:
            if unit := best[name, numbers, SURE]:
                units = [replace(unit, rule=f"{rule} {strength:g}") for strength in strengths]
                yield from units
                if choice := choose(lines, units):
                    yield replace(choice, stage="table", puzzles=puzzles)
    for order in ORDERS:
        for rule in (SCHEDULE, SURE):
            for name, numbers in pairs:
                if name in ORDERED and (unit := best[name, numbers, rule]):
                    first = replace(unit, order=order)
                    if choice := (yield from sweep(lines, first, ORDER_TEMPERATURES, [unit.knob])):
                        yield replace(choice, stage="orders", puzzles=puzzles)


# ---- one unit


@cache
def cases(tuning: bool, count: int, numbers: int) -> list[Problem]:
    """Return the puzzles of a unit. Puzzles for tuning are never among the first TESTED puzzles for testing."""
    if not tuning:
        return problems(count, numbers, TEST_SEED)

    def key(problem: Problem) -> tuple[int, ...]:
        return *sorted(problem.numbers), problem.target

    test = {key(problem) for problem in problems(TESTED, numbers, TEST_SEED)}
    return [problem for problem in problems(2 * count, numbers, TUNE_SEED) if key(problem) not in test][:count]


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


def judge(puzzles: Sequence[Problem], texts: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Judge the answers, the texts [P][k]. Return `right` and `different`, which have one character per puzzle.

    Bit i of the hexadecimal digit in `right` is 1 if answer i is right. The digit in `different` counts the right
    answers that differ by more than the order of operands or of independent steps.
    """
    right, different = "", ""
    for problem, answers in zip(puzzles, texts, strict=True):
        marks = [is_right(problem, answer) for answer in answers]
        forms = {canonical(answer) for answer, mark in zip(answers, marks, strict=True) if mark}
        right += f"{sum(mark << i for i, mark in enumerate(marks)):x}"
        different += f"{len(forms)}"
    return right, different


def measures(line: Row) -> dict[str, np.ndarray]:
    """Return the measures of a unit, [P] each: pass@1 and pass@4 as shares, the others as counts."""
    digits = np.array([int(digit, 16) for digit in line["puzzles"]["right"]])
    right = (digits[:, None] >> np.arange(K) & 1).astype(bool)  # [P, k]
    counts = {"different": np.array([int(digit) for digit in line["puzzles"]["different"]])}
    counts |= {name: np.array(line["puzzles"][name]) for name in ("rows", "nfe")}
    return {"pass@1": pass_at(right, 1), "pass@4": pass_at(right, K), "first": right[:, 0].astype(float)} | counts


def work(unit: Unit) -> Row:
    """Decode the puzzles of a unit. Return its line: facts, results per puzzle, and the mean of each measure."""
    puzzles, model = cases(unit.stage == "sweep", unit.puzzles, unit.numbers), session.model
    prompts, options = [problem.prompt for problem in puzzles], unit.options()
    decode = partial(generate, model, prompts, seed=unit.seed, max_tokens_per_forward=session.tokens, **options)
    result, seconds = wall(decode, model.device)
    right, different = judge(puzzles, result.texts)
    counts = {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()}
    defaults, settings = d5p4.Settings().to_dict(), d5p4.Settings.make(model, **options).to_dict()
    line: Row = {"about": session.facts, "seconds": round(seconds, 2)}
    line["settings"] = {name: value for name, value in settings.items() if value != defaults[name]}
    line["puzzles"] = {"right": right, "different": different, **counts}
    line |= {name: round(float(values.mean()), 5) for name, values in measures(line).items()}
    solved = f"pass@1/4 {100 * line['pass@1']:.1f}/{100 * line['pass@4']:.1f}, {line['different']:.2f} different right"
    line["shown"] = f"{solved}, {line['rows']:.1f} rows in {line['nfe']:.1f} passes, {seconds:.1f} s"
    return line


# ---- figures and tables


def summary(lines: Mapping[Unit, Row], puzzles: int, tune: int) -> dict[str, Any]:
    """Return the contents of the results file. Figures are [mean, low, high]: means over seeds, 95 % over puzzles."""
    units = [unit for unit in plan(lines, puzzles, tune) if unit in lines]
    groups: dict[Unit, list[dict[str, np.ndarray]]] = {}
    for unit in units:
        if unit.stage != "sweep":
            groups.setdefault(replace(unit, seed=0), []).append(measures(lines[unit]))
    bases = {unit for unit in groups if unit.stage == "table" and unit.rule == SCHEDULE}
    solved = {  # pass@4 under the schedule [P], the mean over seeds; the other rules and orders are compared with it
        (unit.method, unit.numbers): np.stack([seed["pass@4"] for seed in groups[unit]]).mean(0) for unit in bases
    }
    chosen_settings = {_without_stage(unit) for unit in groups if unit.stage in ("table", "orders")}
    rows = []
    for unit, group in groups.items():
        stacked = {name: np.stack([seed[name] for seed in group]) for name in group[0]}
        if unit not in bases and (unit.method, unit.numbers) in solved:
            stacked["against_schedule"] = stacked["pass@4"] - solved[unit.method, unit.numbers]
        figures = {name: [round(x, 5) for x in interval(values)] for name, values in stacked.items()}
        rows.append(_identity(unit) | {"seeds": len(group), "setting": _setting(vars(unit))} | figures)
    sweeps = [
        _identity(unit)
        | {"chosen": _without_stage(unit) in chosen_settings}
        | {name: lines[unit][name] for name in ("pass@4", "different")}
        for unit in units
        if unit.stage == "sweep"
    ]
    origins = {json.dumps(lines[unit]["about"]): lines[unit]["about"] for unit in units}
    return {"about": list(origins.values()), "puzzles": puzzles, "tune": tune, "rows": rows, "sweeps": sweeps}


def _without_stage(unit: Unit) -> Unit:
    return replace(unit, stage="", puzzles=0, seed=0)


def _identity(unit: Unit) -> Row:
    return {name: value for name, value in vars(unit).items() if name not in ("puzzles", "seed")}


def figure_cells(row: Row) -> list[str | None]:
    percent = [half_width(row[name], 1, 100) for name in ("pass@1", "first", "pass@4")]
    gain = half_width(row["against_schedule"], 1, 100) if "against_schedule" in row else None
    counts = [half_width(row[name], digits) for name, digits in (("different", 2), ("rows", 0), ("nfe", 1))]
    return [*percent, gain, *counts]


FIGURES = ("pass@1 %", "first right %", "pass@4 %", "against schedule", "different right", "rows", "passes")


def results_table(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        rule = row["rule"] if row["seeds"] == SEEDS else f"{row['rule']} [seeds: {row['seeds']}]"
        cells.append([rule, row["method"], row["setting"], *figure_cells(row)])
    return markdown(["rule", "method", "setting", *FIGURES], cells)


def checks_table(rows: Sequence[Row], name: str) -> str:
    """Return the table of one of the stages `positions` and `orders`. `name` is the field that is compared."""
    fields = ("numbers", "rule", "method", "setting", name)
    return markdown([*fields, *FIGURES], [[*(row[field] for field in fields), *figure_cells(row)] for row in rows])


def sweeps_table(sweeps: Sequence[Row]) -> str:
    """Return pass@4 in all sweeps: by temperature and knob, or by the value of the rule. Chosen values are bold."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sweeps:
        rule, _, _ = row["rule"].partition(" ")
        key = (row["numbers"], rule if rule in VALUED else row["rule"], row["order"], row["method"])
        groups.setdefault(key, []).append(row)
    cells = []
    for key, group in groups.items():
        temperature = next((row["temperature"] for row in group if row["chosen"]), None)
        entries = []
        for row in group:
            heat, _, knob = _setting(row).partition(", ")
            if key[1] in VALUED:
                label, marked = row["rule"].split()[1], row["chosen"]
            elif row["knob"] == group[0]["knob"]:
                label, marked = heat, row["temperature"] == temperature
            else:
                label, marked = knob, row["chosen"]
            entry = f"{label}: {100 * row['pass@4']:.1f}"
            entries.append(f"**{entry}**" if marked else entry)
        cells.append([*key, ", ".join(entries)])
    return markdown(["numbers", "rule", "order", "method", "pass@4 %"], cells)


def short_table(rows: Sequence[Row]) -> str:
    """Return the table for the README, without intervals. A cell has the schedule's figure, then that of 0.99."""
    columns = (("pass@4", 1, 100), ("different", 2, 1), ("rows", 0, 1), ("nfe", 0, 1))
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row["rule"] in (SCHEDULE, SURE):
            groups.setdefault((row["numbers"], row["method"]), []).append(row)
    cells = [
        [*key, *("/".join(f"{scale * row[name][0]:.{digits}f}" for row in pair) for name, digits, scale in columns)]
        for key, pair in groups.items()
    ]
    return markdown(["numbers", "method", "pass@4 %", "different right", "rows", "passes"], cells)


def card_table(rows: Sequence[Row]) -> str:
    """Return the table for the model's card: one sample, four samples, d5p4, and d5p4 with `distinct` and `spare`."""
    ways = ("independent", "d5p4", "d5p4, distinct, spare 4")
    cells: list[list[str | None]] = []
    for numbers, word in ((4, "four"), (5, "five")):
        named = {row["method"]: row for row in rows if row["numbers"] == numbers and row["rule"] == SCHEDULE}
        figures = [(ways[0], "pass@1"), *((name, "pass@4") for name in ways)]
        solved = [f"{half_width(named[name][figure], 1, 100)} %" if name in named else None for name, figure in figures]
        different = [half_width(named[name]["different"], 2) if name in named else None for name in ways]
        cells.append([f"{word} numbers: solved", *solved])
        cells.append([f"{word} numbers: different right answers", "", *different])
    last = "and with `distinct`, `spare=4`"
    return markdown(["", "one sample", "any of four samples", "any of four by d5p4", last], cells)


def tables(results: Mapping[str, Any]) -> Tables:
    """Return the tables by name: one per count of numbers, the checks, the sweeps, the README's and the card's."""
    stages = {stage: [row for row in results.get("rows", ()) if row["stage"] == stage] for stage in STAGES}
    made: dict[str, Any] = {
        str(numbers): partial(results_table, [row for row in stages["table"] if row["numbers"] == numbers])
        for numbers in NUMBERS
    }
    compared = {"positions": "positions", "orders": "order"}
    made |= {stage: partial(checks_table, stages[stage], name) for stage, name in compared.items()}
    made |= {"sweeps": partial(sweeps_table, results.get("sweeps", ()))}
    return made | {"readme": partial(short_table, stages["table"]), "card": partial(card_table, stages["table"])}


def draw(lines: Mapping[Unit, Row], puzzles: int, tune: int, out: Path) -> str:
    """Write the results file, and return all tables as Markdown."""
    results = summary(lines, puzzles, tune)
    parts = (f'"{name}": {_one_per_line(value)}' for name, value in results.items())
    write(out, "{\n" + ",\n".join(parts) + "\n}\n")
    return "\n\n".join(f"### {name}\n{table()}" for name, table in tables(read(out)).items())


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
    parser.add_argument("--tune", type=int, default=500, help="number of puzzles for tuning")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, separated by commas [all]")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--tokens", type=int, default=None, help="at most this many tokens per forward")
    parser.add_argument("--out", type=Path, action="append", required=True, help="file of lines; --draw takes several")
    parser.add_argument("--draw", action="store_true", help="compute the figures of --out and write --results")
    parser.add_argument("--results", type=Path, default=RESULTS / "countdown.json")
    args = parser.parse_args(arguments)
    if not 2 <= args.puzzles <= TESTED or args.tune < 2 or args.processes < 1:
        counts = f"puzzles={args.puzzles} must be 2 to {TESTED}, tune={args.tune} at least 2"
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
