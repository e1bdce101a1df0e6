"""Measure how many held-out tasks of `programs` every method solves with four answers, against the rows that it runs.

    python -m d5p4_lab bench programs --device cuda --processes 10

Answers are right if they satisfy the three examples of the prompt and the five hidden ones. The methods are those of
`bench countdown`: all reveal per pass what the tree reveals, and each has the temperature, order and parameter with the
best pass@4 on --tune other tasks. The tree that the model has as its default is shown with its default setting, too.
Best-of-n ranks by log-probability, as the model's answers are ranked.

The command adds one line per unit (one method with one seed on all tasks of a set) to --out as soon as the unit ends,
and the same command continues a killed run. At its end, or when it is interrupted, it writes the figures of all lines
to --results and prints the table; with --minutes 0 it does only this. `bench tables` then redraws docs/box.md.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.programs import Task
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..train.programs_data import HELDOUT_OPERATIONS, tasks
from . import RESULTS, Row, Tables, chosen, half_width, make_parser, markdown, write
from .countdown import (
    DEFAULT,
    METHODS,
    RIVALS,
    TREES,
    K,
    Knob,
    Values,
    answer,
    figures_of,
    measures,
    setting_of,
    start,
    sweep,
)
from .units import Lines, read_lines, rule_options, run_units

NAMES = (
    "independent",
    TREES[4],
    RIVALS[8],
    "best-of-16",
    "diverse-beam",
    "d5p4",
    TREES[8],
    RIVALS[4],
    RIVALS[16],
    "d5p4, distinct, spare 4",
    TREES[16],
)
HEATS = {"confidence": (0.7, 1.0, 1.5), "top": (0.5, 0.7, 1.0)}  # the temperatures of samples in each order
COLUMNS = (  # (heading, name of a figure, digits, scale)
    ("pass@1 %", "pass@1", 1, 100),
    ("pass@4 %", "pass@4", 1, 100),
    ("first right %", "first", 1, 100),
    ("different right programs", "different", 2, 1),
    ("rows", "rows", 0, 1),
    ("passes", "nfe", 1, 1),
)
TEST, TUNING = "test", "tuning"


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all tasks of one size."""

    method: str
    operations: int
    tasks: int
    cases: str = TUNING
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    change: str = ""  # no unit of this benchmark changes options; `countdown` reads this field
    seed: int = 0

    def options(self) -> dict[str, Any]:
        method = METHODS[self.method]
        options = {"k": K, "logprobs": True, **method.options, "temperature": self.temperature, "order": self.order}
        options |= {method.knob: self.knob} if method.knob else {}
        return options | rule_options(method.rule)

    def __str__(self) -> str:
        return f"{self.cases}, {self.operations} operations: {self.method} ({setting_of(vars(self))}), seed {self.seed}"


def plan(lines: Mapping[Any, Row], operations: Sequence[int], count: int, tune: int, seeds: int) -> Iterator[Unit]:
    """Yield all units that are known by now: those that tune a method, then the method on the tasks of the test.

    Seeds after the first come last, so that a run that is stopped has all methods.
    """
    tested = list[Unit]()
    for name, size in itertools.product(NAMES, operations):
        heats = METHODS[name].heats
        if name not in TREES.values():
            heats = {order: HEATS[order] for order in heats}
        first = Unit(name, size, tune)
        best = yield from sweep(lines, first, replace(METHODS[name], heats=heats))
        settings = [best] if best is not None else []
        settings += [replace(first, **DEFAULT)] if name == TREES[K] else []
        tested += (new := [replace(unit, tasks=count, cases=TEST) for unit in settings])
        yield from new
    for seed, unit in itertools.product(range(1, seeds), tested):
        if unit.temperature:
            yield replace(unit, seed=seed)


@cache
def tasks_of(cases: str, operations: int, count: int) -> list[Task]:
    """Return the first tasks of a set. No task for tuning is among the tasks of the test."""
    if cases == TEST:
        return tasks(count, operations)
    tested = {task.prompt for task in tasks(1000, operations)}
    return [task for task in tasks(count + 1000, operations, seed=1) if task.prompt not in tested][:count]


def work(unit: Unit) -> Row:
    problems = tasks_of(unit.cases, unit.operations, unit.tasks)
    prompts, references = [task.prompt for task in problems], [task.reference for task in problems]
    return answer("programs", prompts, unit.seed, unit.options(), references)


def summary(lines: Mapping[Unit, Row]) -> dict[str, Any]:
    """Return the contents of the results file. Figures are [mean, low, high]: means over seeds, 95 % over tasks."""
    groups: dict[Unit, list[Unit]] = {}
    for unit in lines:
        if unit.cases == TEST:
            groups.setdefault(replace(unit, seed=0), []).append(unit)
    rows = []
    for unit, group in groups.items():
        seeds = [measures(lines[one]) for one in group]
        means: Values = {name: np.stack([seed[name] for seed in seeds]).mean(0) for name in seeds[0]}
        fields = {"method": unit.method, "setting": setting_of(vars(unit)), "operations": unit.operations}
        fields |= {"tasks": unit.tasks, "seeds": len(group)}
        rows.append({**fields, **figures_of(means)})
    return {"rows": rows, "about": next((line["about"] for line in lines.values()), {})}


def table(results: Mapping[str, Any]) -> str:
    rows = sorted(results.get("rows", ()), key=lambda row: (row["operations"], row["rows"][0]))
    cells = [
        [
            row["operations"],
            row["method"],
            row["setting"],
            *(half_width(row[name], digits, scale) for _, name, digits, scale in COLUMNS),
        ]
        for row in rows
    ]
    header = ["operations", "method", "setting", *(heading for heading, *_ in COLUMNS)]
    return markdown(header, cells) if cells else "not measured yet"


def tables(results: Mapping[str, Any]) -> Tables:
    return {"table": partial(table, results)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("programs", __doc__)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="programs", help="a shipped name or a folder")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true", help="allow tf32 in float32 matrix products on a GPU")
    parser.add_argument("--tasks", type=int, default=500, help="number of tasks per count of operations")
    parser.add_argument("--tune", type=int, default=200, help="number of tasks for tuning")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--operations", default="3,4", help="counts of operations, separated by commas")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--tokens", type=int, default=None, help="at most this many tokens per forward")
    parser.add_argument("--out", type=Path, default=Path("out/programs.jsonl"), help="file of lines")
    parser.add_argument("--results", type=Path, default=RESULTS / "programs.json.xz")
    args = parser.parse_args(arguments)
    if args.tasks < 2 or args.tune < 2 or args.seeds < 1 or args.processes < 1:
        given = f"tasks={args.tasks}, tune={args.tune}, seeds={args.seeds} and processes={args.processes}"
        raise d5p4.D5P4Error(f"{given} must be at least 2, 2, 1 and 1")
    low, high = HELDOUT_OPERATIONS
    sizes = [int(text) for text in chosen(args.operations, [str(size) for size in range(low, high + 1)], "size")]

    def wanted(lines: Mapping[Any, Row]) -> list[Unit]:
        return list(dict.fromkeys(plan(lines, sizes, args.tasks, args.tune, args.seeds)))

    lines: Lines[Unit] = read_lines(Unit, [args.out])
    digest = weights_hash(find(args.model))
    if any(line["about"]["weights"] != digest for line in lines.values()):
        raise d5p4.D5P4Error(f"{args.out} has lines of other weights; give another file")
    command = ["bench", "programs", *(["--tf32"] if args.tf32 else []), "--tasks", str(args.tasks)]
    command += ["--tune", str(args.tune), "--seeds", str(args.seeds)]
    loaded = (args.model, args.device, args.dtype, args.tf32, args.tokens, command)
    try:
        run_units(args.out, lines, wanted, work, start, loaded, args.processes, args.minutes)
    finally:
        results = summary({unit: lines[unit] for unit in wanted(lines) if unit in lines})
        write(args.results, results)
        print(table(results))
