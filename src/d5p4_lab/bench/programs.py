"""Measure how many held-out tasks of `programs` every method solves with four answers, against the rows that it runs.

    python -m d5p4_lab bench programs --device cuda --tasks 1000

Answers are right if they satisfy the three examples of the prompt and the five hidden ones. Every method has its
default settings for the model. `independent` draws the four answers; all other methods have room for 16 rows per step.
The command adds one line per unit (one method with one seed on all tasks) to --out as soon as the unit ends, and the
same command continues a killed run. It then writes the figures of all lines to --results and prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.programs import HELDOUT_OPERATIONS, Task, tasks
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..timing import wall
from . import RESULTS, Row, Tables, chosen, generate, half_width, make_parser, markdown, write
from .countdown import K, Values, figures_of, judge, line_of, measures, samples, session, start
from .units import Lines, read_lines, run_units

METHODS: Mapping[str, Mapping[str, Any]] = {
    "independent": samples(K, heats={}).options,
    "best-of-16": samples(16, heats={}).options,
    "diverse-beam": {"method": "diverse-beam", "w": 4},
    "d5p4": {"method": "d5p4", "w": 4},
    "tree": {"method": "tree", "spare": 12},
}
COLUMNS = (  # (heading, name of a figure, digits, scale)
    ("pass@1 %", "pass@1", 1, 100),
    ("pass@4 %", "pass@4", 1, 100),
    ("different right programs", "different", 2, 1),
    ("rows", "rows", 0, 1),
    ("passes", "nfe", 1, 1),
)


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all tasks of one size."""

    method: str
    operations: int
    tasks: int
    seed: int = 0

    def options(self) -> dict[str, Any]:
        return {"k": K, "logprobs": True, **METHODS[self.method]}

    def __str__(self) -> str:
        return f"{self.operations} operations: {self.method}, seed {self.seed}"


def plan(operations: Sequence[int], count: int, seeds: int) -> Iterator[Unit]:
    """Yield all units, the first seed first."""
    for seed in range(seeds):
        for size in operations:
            yield from (Unit(method, size, count, seed) for method in METHODS)


@cache
def tasks_of(operations: int, count: int) -> list[Task]:
    return tasks(count, operations)


def work(unit: Unit) -> Row:
    """Decode the tasks of a unit, and return its line."""
    problems, options = tasks_of(unit.operations, unit.tasks), unit.options()
    prompts, references = [task.prompt for task in problems], [task.reference for task in problems]
    decode = partial(generate, session.model, prompts, seed=unit.seed, max_tokens_per_forward=session.tokens, **options)
    result, seconds = wall(decode, session.model.device)
    counts = {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()}
    return line_of(result, seconds, options, judge("programs", prompts, result.texts, references) | counts)


def summary(lines: Mapping[Unit, Row]) -> dict[str, Any]:
    """Return the contents of the results file. Figures are [mean, low, high]: means over seeds, 95 % over tasks."""
    groups: dict[Unit, list[Unit]] = {}
    for unit in lines:
        groups.setdefault(replace(unit, seed=0), []).append(unit)
    rows = []
    for unit, group in groups.items():
        seeds = [measures(lines[one]) for one in group]
        means: Values = {name: np.stack([seed[name] for seed in seeds]).mean(0) for name in seeds[0]}
        fields = {"method": unit.method, "operations": unit.operations, "tasks": unit.tasks, "seeds": len(group)}
        rows.append({**fields, **figures_of(means)})
    return {"rows": rows, "about": next((line["about"] for line in lines.values()), {})}


def table(results: Mapping[str, Any]) -> str:
    rows = sorted(results.get("rows", ()), key=lambda row: (row["operations"], list(METHODS).index(row["method"])))
    cells = [
        [
            row["operations"],
            row["method"],
            *(half_width(row[name], digits, scale) for _, name, digits, scale in COLUMNS),
        ]
        for row in rows
    ]
    header = ["operations", "method", *(heading for heading, *_ in COLUMNS)]
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
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--operations", default="3,4", help="counts of operations, separated by commas")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--tokens", type=int, default=None, help="at most this many tokens per forward")
    parser.add_argument("--out", type=Path, default=Path("out/programs.jsonl"), help="file of lines")
    parser.add_argument("--results", type=Path, default=RESULTS / "programs.json")
    args = parser.parse_args(arguments)
    if args.tasks < 2 or args.seeds < 1 or args.processes < 1:
        given = f"tasks={args.tasks}, seeds={args.seeds} and processes={args.processes}"
        raise d5p4.D5P4Error(f"{given} must be at least 2, 1 and 1")
    low, high = HELDOUT_OPERATIONS
    sizes = [int(text) for text in chosen(args.operations, [str(size) for size in range(low, high + 1)], "size")]
    wanted = list(plan(sizes, args.tasks, args.seeds))
    lines: Lines[Unit] = read_lines(Unit, [args.out])
    digest = weights_hash(find(args.model))
    if any(line["about"]["weights"] != digest for line in lines.values()):
        raise d5p4.D5P4Error(f"{args.out} has lines of other weights; give another file")
    command = ["bench", "programs", *(["--tf32"] if args.tf32 else []), "--tasks", str(args.tasks)]
    loaded = (args.model, args.device, args.dtype, args.tf32, args.tokens, command)
    run_units(args.out, lines, lambda finished: wanted, work, start, loaded, args.processes, args.minutes)
    results = summary({unit: lines[unit] for unit in wanted if unit in lines})
    write(args.results, results)
    print(table(results))
