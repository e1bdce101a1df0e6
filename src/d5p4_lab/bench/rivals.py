"""Compare the tree, d5p4 and best-of-n with four published rivals at k = 4 answers.

    python -m d5p4_lab bench rivals --device cuda --tf32 --processes 10 --out rivals.jsonl
    python -m d5p4_lab bench rivals --draw --out rivals.jsonl

The first command decodes and adds one line per unit (one method with one seed on one task) to --out as soon as the unit
ends. The second adds the lines of --out to --results and prints the tables. `bench tables` then redraws the documents.
Both commands also read --results, so a run continues from there, even on another machine.

The tasks are puzzles of `countdown` with four and five numbers, and of `programs` with three and four operations, whose
answers must satisfy the examples of the prompt and five hidden ones. Every method is tuned on other problems (see
`solving.py`; seven settings at most), and then tested, with three seeds if it is random. All methods reveal per pass
what the tree reveals, except soar, whose threshold is tuned. The lines of tests have the marks of each problem, so all
differences are paired.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from d5p4.eval.countdown import WINDOW

from ..statistics import interval
from ..tables import Row, Tables, half_width, markdown
from ..train.programs_data import tasks as program_tasks
from . import RESULTS, countdown, make_parser, solving, write
from .countdown import UNMEASURED
from .solving import DEFAULT, DISTINCT, PAPER, SURE, TREES, K, Knob, Method, Values, sweep
from .units import Lines, add_options, read_lines, run_units


@dataclass(frozen=True)
class Sizes:
    """How many problems are decoded. The defaults were committed before the first unit was decoded."""

    tested: int = 1000  # problems of a test
    tuned: int = 200  # problems per setting for tuning
    seeds: int = 3  # of random methods in a test


SMALL = Sizes(tested=3, tuned=2, seeds=1)
TASKS = ("countdown", "programs")
SUBTASKS = {  # (task, the size of its problems), and a heading
    "countdown-4": ("countdown", 4, "countdown, four numbers"),
    "countdown-5": ("countdown", 5, "countdown, five numbers"),
    "programs-3": ("programs", 3, "programs, three operations"),
    "programs-4": ("programs", 4, "programs, four operations"),
}
TUNING, TEST = "tuning", "test"
REFERENCE = {"countdown": TREES[8], "programs": TREES[4]}  # with the setting DEFAULT, each model's default method
BEST = {count: f"best-of-{count}" for count in (8, 16, 32)}
SAMPLES = ("independent", *BEST.values())
HEATS = {"countdown": (1.0, 2.0, 3.0), "programs": (0.7, 1.0, 1.5)}  # in the order `confidence`
SEGMENTS = {"countdown": (6, 12, 3), "programs": (4, 8, 2)}  # of ots: positions between two searches
COOL = (0.5, 0.7)  # in the order `top`, in which methods need lower temperatures


@cache
def methods_of(task: str) -> dict[str, Method]:
    """Return the methods of a task, the most important first. Each has at most seven settings to choose from."""
    hot = HEATS[task]
    drawn, few = {"confidence": hot, "top": COOL}, {"confidence": hot[:2], "top": COOL[:1]}

    def tree(width: int) -> Method:
        options = {"method": "tree", "spare": width - K}
        return Method(options, {"top": (0.0, 0.3)}, "diversity", (1.0, 0.0, 0.5, 2.0), rule=SURE)

    def particles(count: int, like: str = "") -> Method:
        return Method({"method": "sr-smc", "w": count // K}, {"confidence": hot[:2], "top": COOL}, like=like)

    def soar(**options: Any) -> Method:
        options = {"method": "soar", "reveal": "threshold", **options}
        return Method(options, {"top": (0.0,)}, "tau", (0.95, 0.99), rule="schedule")

    made = {TREES[8]: tree(8), TREES[4]: tree(4), "independent": solving.samples(K, heats=drawn)}
    made |= {BEST[count]: solving.samples(count, heats=drawn) for count in (8, 16)}
    made["odd"] = Method({"method": "odd"}, few, "alpha", (2.0, 1.0, 4.0, 16.0, 64.0))
    made["sr-smc, N = 8"] = particles(8)
    made["ots"] = Method({"method": "ots"}, few, "segment", SEGMENTS[task])
    made["soar"] = soar()
    made["d5p4"] = Method(PAPER, few, "beta", (100.0, 20.0, 300.0))
    made["d5p4, distinct, spare 4"] = Method(DISTINCT, {"confidence": hot[:2]}, "beta", (300.0, 100.0))
    made["diverse-beam"] = Method({"method": "diverse-beam", "w": 4}, few, "alpha", (100.0, 20.0, 50.0))
    made[TREES[16]] = tree(16)
    made["soar, no shrinking"] = soar(shrink=False)
    made |= {f"sr-smc, N = {count}": particles(count, "sr-smc, N = 8") for count in (4, 16)}
    made |= {BEST[32]: solving.samples(32, heats={}, like=BEST[16])}
    return made


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all problems of a task."""

    task: str  # a key of SUBTASKS
    method: str
    problems: int
    cases: str = TUNING
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    change: str = ""
    seed: int = 0

    @property
    def kind(self) -> Method:
        return methods_of(SUBTASKS[self.task][0])[self.method]

    @property
    def setting(self) -> str:
        return solving.setting_of(vars(self), self.kind)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`."""
        task, size, _ = SUBTASKS[self.task]
        window = {"gen_length": WINDOW[size]} if task == "countdown" else {}
        return solving.options_of(self, self.kind) | window | solving.rule_options(self.kind.rule)

    def __str__(self) -> str:
        return f"{self.task}, {self.cases}, {self.problems}: {self.method} ({self.setting}), seed {self.seed}"


# ---- the plan


def plan(lines: Mapping[Unit, Row], sizes: Sizes) -> Iterator[Unit]:
    """Yield all units that are known by now, the most important first: all methods with one seed, then other seeds.

    A unit may come twice.
    """
    tested = list[Unit]()
    for name, (subtask, (task, *_)) in itertools.product(methods_of("countdown"), SUBTASKS.items()):
        tuned = yield from sweep(lines, Unit(subtask, name, sizes.tuned), methods_of(task))
        settings = [tuned] if tuned else []
        settings += [replace(Unit(subtask, name, sizes.tuned), **DEFAULT)] if name in TREES.values() else []
        tested += (new := [replace(unit, problems=sizes.tested, cases=TEST) for unit in settings])
        yield from new
    for seed, unit in itertools.product(range(1, sizes.seeds), tested):
        if unit.temperature:
            yield replace(unit, seed=seed)


# ---- one unit


@cache
def problems_of(subtask: str, cases: str, count: int) -> tuple[list[str], list[Any] | None]:
    """Return the prompts and the references of the first problems of a set. No problem for tuning is among those of
    the test."""
    task, size, _ = SUBTASKS[subtask]
    if task == "countdown":
        known = countdown.COMMITTED if cases == TEST else countdown.TUNING
        return [problem.prompt for problem in countdown.puzzles_of(known, count, size)], None
    if cases == TEST:
        drawn = program_tasks(count, size)
    else:
        tested = set(problems_of(subtask, TEST, 1000)[0])
        drawn = [task for task in program_tasks(count + 1000, size, seed=1) if task.prompt not in tested][:count]
    return [task.prompt for task in drawn], [task.reference for task in drawn]


def work(unit: Unit) -> Row:
    prompts, references = problems_of(unit.task, unit.cases, unit.problems)
    return solving.answer(SUBTASKS[unit.task][0], prompts, unit.seed, unit.options(), references)


def compact(unit: Unit, line: Row) -> Row:
    """Return what is committed of a line: the marks per problem of tests, and means of everything else."""
    marks = {name: line["problems"][name] for name in ("right", "different")} if unit.cases == TEST else None
    means = {name: value for name, value in line.items() if name not in ("problems", "four")}
    return means | ({"problems": marks} if marks else {})


# ---- tables


def groups_of(lines: Mapping[Unit, Row], subtask: str, sizes: Sizes) -> dict[Unit, tuple[int, Values]]:
    """Return the number of seeds and the means [P] of each measure over seeds, by the tested unit of seed 0."""
    members: dict[Unit, list[Row]] = {}
    for unit, line in lines.items():
        if (unit.task, unit.cases, unit.problems) == (subtask, TEST, sizes.tested):
            members.setdefault(replace(unit, seed=0), []).append(line)
    groups = {}
    for unit, seeds in members.items():
        values = solving.mean_values([solving.measures(line["problems"]) for line in seeds])
        cost = {name: np.array([np.mean([line[name] for line in seeds])]) for name in ("rows", "nfe")}
        groups[unit] = len(seeds), values | cost
    return groups


def coverage_table(lines: Mapping[Unit, Row], subtask: str, sizes: Sizes) -> str:
    """Return one row per tested setting, with its differences to the default tree and to best-of-n with the nearest
    number of rows, problem by problem."""
    groups, default = groups_of(lines, subtask, sizes), REFERENCE[SUBTASKS[subtask][0]]
    reference = Unit(subtask, default, sizes.tested, TEST, **DEFAULT)
    ladder = [unit for unit in groups if unit.method in SAMPLES]

    def rows(unit: Unit) -> float:
        return float(groups[unit][1]["rows"].mean())

    def difference(unit: Unit, other: Unit) -> str:
        return half_width(interval(groups[unit][1]["pass@4"] - groups[other][1]["pass@4"]), 1, 100)

    cells = []
    for unit in sorted(groups, key=rows):
        seeds, values = groups[unit]
        missing = f" [seeds: {seeds}]" if seeds < sizes.seeds and unit.temperature else ""
        name = f"{unit.method}{missing}{' (default)' if unit == reference else ''}"
        shares = [half_width(interval(values[measure]), 1, 100) for measure in ("pass@1", "pass@4")]
        cost = [half_width(interval(values["different"]), 2), f"{rows(unit):.0f}", f"{values['nfe'].mean():.1f}"]
        to_tree = difference(unit, reference) if reference in groups and unit != reference else None
        near = min(ladder, key=lambda other: abs(np.log(rows(other) / rows(unit))), default=unit)
        to_best = f"{difference(unit, near)} ({near.method})" if near != unit else None
        cells.append([name, unit.setting, *shares, *cost, to_tree, to_best])
    header = ["method", "setting", "pass@1 %", "pass@4 %", "different right", "rows", "passes"]
    named = f"pass@4 minus {default}, default"
    return markdown([*header, named, "pass@4 minus best-of-n at the nearest rows"], cells) if cells else UNMEASURED


def tables(lines: Mapping[Unit, Row], sizes: Sizes) -> Tables:
    """Return all tables by name."""
    return {subtask: partial(coverage_table, lines, subtask, sizes) for subtask in SUBTASKS}


def committed(path: Path = RESULTS / "rivals.jsonl.xz") -> Lines[Unit]:
    return read_lines(Unit, [path])


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("rivals", __doc__, small=True)
    parser.add_argument("--model", action="append", default=[], help="TASK=FOLDER: another model than the shipped one")
    add_options(parser, RESULTS / "rivals.jsonl.xz")
    args = parser.parse_args(arguments)
    sizes, models = SMALL if args.small else Sizes(), {task: task for task in TASKS}
    models |= dict(text.split("=", 1) for text in args.model)
    lines: Lines[Unit] = read_lines(Unit, [args.results, *args.out])
    if args.draw:
        write(args.results, [compact(unit, line) for unit, line in lines.items()])
        drawn = tables(committed(args.results), sizes)
        print("\n\n".join(f"### {name}\n{table()}" for name, table in drawn.items()))
        return
    for task in TASKS:
        ours = {unit: line for unit, line in lines.items() if SUBTASKS[unit.task][0] == task}
        solving.refuse_other_weights(ours, models[task])
    loaded = (models, args.device, args.tf32, ("bench", "rivals", *(["--tf32"] if args.tf32 else [])))
    run_units(args.out[0], lines, partial(plan, sizes=sizes), work, solving.start, loaded, args.processes)
