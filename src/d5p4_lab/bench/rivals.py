"""Compare the tree, d5p4 and best-of-n with four published rivals at k = 4 answers, and try ideas that the paper names.

    python -m d5p4_lab bench rivals --device cuda --tf32 --processes 10 --data val.txt.xz --out rivals.jsonl
    python -m d5p4_lab bench rivals --judge judge --judge encoder --out rivals.jsonl
    python -m d5p4_lab bench rivals --draw --out rivals.jsonl

The first command decodes, the second lets judges read the texts of books, and the third adds the lines of --out to
--results, compressed and without texts, and prints the tables. `bench tables` then redraws the documents. The first two
commands add one line per unit (one method with one seed on one task) to --out as soon as the unit ends. All commands
also read --results, so a run continues from there, even on another machine; but only --out has the texts.

The tasks and stages, the most important units first:
countdown, programs  puzzles with four and five numbers, and tasks with three and four operations. Every method is tuned
                     on other problems (see `bench countdown`: first the temperature in each order, then the parameter,
                     seven settings at most), and then tested, with three seeds if it is random. All methods reveal per
                     pass what the tree reveals, except soar, whose threshold is tuned. The lines of tests have the
                     marks of each problem, so all differences are paired
books                continuations of held-out paragraphs, 64 tokens, one per step. Better quality costs diversity here,
                     so nothing is tuned: all settings are shown, and each is compared with
                     independent samples at the temperature that gives the same distinct-2 (see `bench books_rules`).
                     Judges: a judge of `bench books`, or `encoder`, which measures S-COS
ideas                on puzzles for tuning: a similarity that knows which answers are the same, a weight of diversity
                     that follows the pool (see `variants`), and search followed by ranking against best-of-n at equal
                     rows
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.countdown import WINDOW
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..scoring.perplexity import Scored
from ..statistics import interval
from . import RESULTS, Row, Tables, books_rules, chosen, countdown, half_width, make_parser, markdown, programs, write
from .books import figures, plus_minus
from .countdown import (
    DEFAULT,
    DISTINCT,
    PAPER,
    SURE,
    TREES,
    UNMEASURED,
    K,
    Knob,
    Method,
    Values,
    answer,
    at_equal_rows,
    marks,
    option_of,
    samples,
    setting_of,
    sweep,
)
from .units import Lines, read_lines, rule_options, run_units


@dataclass(frozen=True)
class Sizes:
    """How many problems are decoded. The defaults were committed before the first unit was decoded."""

    tested: int = 1000  # problems of a test
    tuned: int = 200  # problems per setting for tuning
    tried: int = 500  # problems of an idea, of which the first `tuned` were also used for tuning
    prompts: int = 240  # paragraphs that are continued
    seeds: int = 3  # of random methods in a test
    tries: int = 2  # seeds of an idea


SMALL = Sizes(tested=3, tuned=2, tried=2, prompts=3, seeds=1, tries=1)
TASKS = ("countdown", "programs", "books")
STAGES = ("coverage", "ideas")
SUBTASKS = {  # (task, the size of its problems), and a heading
    "countdown-4": ("countdown", 4, "countdown, four numbers"),
    "countdown-5": ("countdown", 5, "countdown, five numbers"),
    "programs-3": ("programs", 3, "programs, three operations"),
    "programs-4": ("programs", 4, "programs, four operations"),
}
BOOKS, LENGTH = "books", books_rules.LENGTH
TUNING, TEST = "tuning", "test"
REFERENCE = {"countdown": TREES[8], "programs": TREES[4]}  # with the setting DEFAULT, each model's default method
BEST = {count: f"best-of-{count}" for count in (8, 16, 32, 64)}
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

    made = {TREES[8]: tree(8), TREES[4]: tree(4), "independent": samples(K, heats=drawn)}
    made |= {BEST[count]: samples(count, heats=drawn) for count in (8, 16)}
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
    made |= {BEST[32]: samples(32, heats={}, like=BEST[16])}
    return made


PROSE: dict[str, Method] = {  # all settings of books; other orders than `ancestral` are for methods that refuse it
    "independent": Method({"method": "independent"}, {"ancestral": (1.0, 0.85, 0.7), "top": (1.0, 1.2, 0.7, 1.5)}),
    "tree, K = 4": Method({"method": "tree"}, {"top": (1.0, 0.7)}, "diversity", (0.0, 1.0)),
    "odd": Method({"method": "odd"}, {"top": (1.0, 0.7)}, "alpha", (16.0, 64.0)),
    "sr-smc, N = 8": Method({"method": "sr-smc", "w": 2}, {"ancestral": (1.0, 0.7), "top": (1.0,)}),
    "ots": Method({"method": "ots"}, {"top": (1.0, 0.7)}, "segment", (8,)),
    "soar": Method({"method": "soar", "reveal": "threshold"}, {"top": (0.0,)}, "tau", (0.95,)),
    "d5p4": Method(PAPER, {"ancestral": (1.0, 0.7)}, "beta", (20.0,)),
    "best-of-16": Method({"method": "best-of-n", "repeats": False, "w": 4}, {"ancestral": (1.0, 0.7)}),
    "diverse-beam": Method({"method": "diverse-beam", "w": 4}, {"ancestral": (1.0, 0.7)}, "alpha", (20.0,)),
    "sr-smc, N = 16": Method({"method": "sr-smc", "w": 4}, {"ancestral": (1.0,)}),
}
TRIED: dict[str, Method] = {  # methods of ideas that the tests do not have; they take the choice of `like`
    "d5p4, spare 4": Method(PAPER | {"spare": 4}, {}, "beta", like="d5p4"),
    "d5p4, spare 12": Method(PAPER | {"spare": 12}, {}, "beta", like="d5p4"),
    "d5p4, distinct, spare 12": Method(DISTINCT | {"spare": 12}, {}, "beta", like="d5p4, distinct, spare 4"),
    BEST[64]: samples(64, heats={}, like=BEST[16]),
}
IDEAS: dict[str, list[tuple[str, dict[str, Any]]]] = {  # one table per entry: a method, and what replaces its setting
    "similarity": [
        ("d5p4", {}),
        *(("d5p4", {"change": f"method=d5p4-same share={share:g}"}) for share in (0.5, 0.9, 1)),
    ],
    "beta": [
        ("d5p4", {}),
        *(("d5p4", {"knob": beta}) for beta in (20.0, 100.0, 300.0)),
        *(("d5p4", {"change": "method=d5p4-spread", "knob": scale}) for scale in (1.0, 4.0, 16.0, 64.0, 256.0)),
    ],
    "search": [
        ("independent", {}),
        *((name, {}) for name in BEST.values()),
        ("d5p4", {}),
        *((f"d5p4, {kind}", {}) for kind in ("spare 4", "spare 12", "distinct, spare 4", "distinct, spare 12")),
        *((TREES[width], DEFAULT) for width in (4, 8, 16)),
        *((TREES[8], {**DEFAULT, "change": f"sort={sort}"}) for sort in ("entropy", "l", "leaves")),
    ],
}
IDEAS_ON = ("countdown-4", "countdown-5")
PAPERS = (  # what the rivals' own papers report: method, model, what is measured, without, with, source
    ("odd", "LLaDA-8B-Instruct", "GSM8K, pass@16, T 1 (alpha 64)", "81.3", "87.9", "2603.04893"),
    ("odd", "LLaDA-8B-Instruct", "GSM8K, pass@16, T 0 (alpha 128)", "61.0", "79.0", "2603.04893"),
    ("odd", "LLaDA-8B-Instruct", "HumanEval, pass@16, T 1", "42.7", "51.3", "2603.04893"),
    ("odd", "LLaDA-8B-Instruct", "HumanEval, pass@16, T 0 (alpha 16)", "19.5", "41.5", "2603.04893"),
    (
        "sr-smc, N = 4",
        "LLaDA-1.5, Dream-7B",
        "GSM8K and HumanEval, accuracy",
        "lower",
        "higher (figures)",
        "2602.01849",
    ),
    ("ots", "LLaDA-8B-Instruct", "GSM8K, accuracy", "76.7", "79.8", "2601.20339"),
    ("ots", "LLaDA-8B-Instruct", "MATH500, accuracy", "32.4", "36.0", "2601.20339"),
    ("ots", "LLaDA-8B-Instruct", "Countdown, accuracy", "19.5", "26.2", "2601.20339"),
    ("ots", "LLaDA-8B-Instruct", "HumanEval, accuracy", "26.2", "34.2", "2601.20339"),
    ("soar, K = 2", "LLaDA-8B-Base", "GSM8K, accuracy, 1.62 × as fast", "70.4", "71.3", "2602.10953"),
)


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all problems of a task. With a judge: the reading of its
    texts."""

    stage: str
    task: str  # a key of SUBTASKS, or "books"
    method: str
    problems: int
    cases: str = TUNING
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    change: str = ""  # options that replace those of the method, such as "method=d5p4-spread"
    seed: int = 0
    judge: str = ""
    judged: int = 0  # the number of prompts whose texts the judge reads

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods among which this unit names its own."""
        return PROSE if self.task == BOOKS else methods_of(SUBTASKS[self.task][0]) | TRIED

    @property
    def prompts(self) -> int:
        return self.problems

    @property
    def length(self) -> int:
        return WINDOW[SUBTASKS[self.task][1]] if self.task.startswith("countdown") else LENGTH

    @property
    def setting(self) -> str:
        return setting_of(vars(self), self.methods)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`. In books, every step reveals one token."""
        method = self.methods[self.method]
        options: dict[str, Any] = {"k": K, "logprobs": True, **method.options}
        options |= {"temperature": self.temperature, "order": self.order}
        options |= {method.knob: self.knob} if method.knob else {}
        if self.task == BOOKS:
            return options | {"gen_length": self.length} | ({} if "reveal" in options else {"steps": self.length})
        options |= {"gen_length": self.length} if self.task.startswith("countdown") else {}
        return options | rule_options(method.rule) | dict(map(option_of, self.change.split()))

    def __str__(self) -> str:
        what = f"{self.judge or self.stage} {self.task}, {self.cases}, {self.problems}"
        return f"{what}: {self.method} ({self.setting}), seed {self.seed}"


# ---- the plan


def plan(lines: Mapping[Unit, Row], sizes: Sizes, tasks: Sequence[str], stages: Sequence[str]) -> Iterator[Unit]:
    """Yield all units that are known by now, the most important first. A unit may come twice.

    All methods come with one seed first; then books, the ideas, and the other seeds.
    """
    tested = list[Unit]()
    if "coverage" in stages:
        for name, (subtask, (task, *_)) in itertools.product(methods_of("countdown"), SUBTASKS.items()):
            if task in tasks:
                tuned = yield from tune(lines, subtask, name, sizes)
                settings = [tuned] if tuned else []
                settings += [replace(first_unit(subtask, name, sizes), **DEFAULT)] if name in TREES.values() else []
                tested += (new := [replace(unit, problems=sizes.tested, cases=TEST) for unit in settings])
                yield from new
        if BOOKS in tasks:
            yield from prose(sizes)
    if "ideas" in stages and "countdown" in tasks:
        for seed, (name, changes) in itertools.product(range(sizes.tries), itertools.chain(*IDEAS.values())):
            for subtask in IDEAS_ON:
                tuned = yield from tune(lines, subtask, name, sizes)
                if tuned and (seed == 0 or tuned.temperature):
                    yield replace(tried(tuned, changes, sizes), seed=seed)
    for seed, unit in itertools.product(range(1, sizes.seeds), tested):
        if unit.temperature:
            yield replace(unit, seed=seed)


def first_unit(subtask: str, name: str, sizes: Sizes) -> Unit:
    return Unit("coverage", subtask, name, sizes.tuned)


def tune(lines: Mapping[Unit, Row], subtask: str, name: str, sizes: Sizes) -> Generator[Unit, None, Unit | None]:
    """Yield the units that tune a method. Return its best unit, or None as long as units are missing."""
    method = (methods_of(SUBTASKS[subtask][0]) | TRIED)[name]
    if not method.like:
        return (yield from sweep(lines, first_unit(subtask, name, sizes), method))
    tuned = yield from tune(lines, subtask, method.like, sizes)
    return replace(tuned, method=name) if tuned else None


def tried(tuned: Unit, changes: Mapping[str, Any], sizes: Sizes) -> Unit:
    """Return the unit of an idea."""
    return replace(tuned, stage="ideas", problems=sizes.tried, **changes)


def prose(sizes: Sizes) -> Iterator[Unit]:
    """Yield the units of books."""
    for name, method in PROSE.items():
        for order, heats in method.heats.items():
            for heat, value in itertools.product(heats, method.values):
                yield Unit("coverage", BOOKS, name, sizes.prompts, TEST, heat, value, order)


def judgements(lines: Mapping[Unit, Row], judges: Sequence[str], judged: int | None) -> Iterator[Unit]:
    """Yield the units in which the judges read the texts of the lines."""
    for name, unit in itertools.product(judges, lines):
        if "texts" in lines[unit]:
            yield replace(unit, judge=name, judged=min(judged or unit.problems, unit.problems))


# ---- one unit


@dataclass
class Session:
    """What a process was started with."""

    device: str | None = None
    dtype: str = "float32"
    tf32: bool = False
    tokens: int | None = None
    models: Mapping[str, str] = field(default_factory=dict)  # the model of each task, if it is not the shipped one
    data: Path | None = None
    paths: Sequence[Path] = ()
    words: Sequence[str] = ()


session = Session()


def start(given: Session) -> None:
    vars(session).update(vars(given))
    words, name = list(session.words), model_name(BOOKS)
    books_rules.start(
        books_rules.Session(name, session.device, session.dtype, session.data, list(session.paths), words)
    )


def model_name(task: str) -> str:
    return session.models.get(task, task)


@cache
def _loaded(task: str) -> dict[str, Any]:
    countdown.start(model_name(task), session.device, session.dtype, session.tf32, session.tokens, list(session.words))
    return dict(vars(countdown.session))


@cache
def problems_of(subtask: str, cases: str, count: int) -> tuple[list[str], list[Any] | None]:
    """Return the prompts and the references of the first problems of a set."""
    task, size, _ = SUBTASKS[subtask]
    if task == "countdown":
        known = countdown.COMMITTED if cases == TEST else countdown.TUNING
        return [problem.prompt for problem in countdown.puzzles_of(known, count, size)], None
    drawn = programs.tasks_of(programs.TEST if cases == TEST else programs.TUNING, size, count)
    return [task.prompt for task in drawn], [task.reference for task in drawn]


def work(unit: Unit) -> Row:
    """Run a unit and return its line."""
    if unit.judge == "encoder":
        return cosines(unit)
    if unit.judge:
        return books_rules.read_texts(unit)
    if unit.task == BOOKS:
        return books_rules.decode(unit)
    task = SUBTASKS[unit.task][0]
    vars(countdown.session).update(_loaded(task))
    prompts, references = problems_of(unit.task, unit.cases, unit.problems)
    return answer(task, prompts, unit.seed, unit.options(), references)


@cache
def _encoder() -> Any:
    from ..scoring.encoder import Encoder

    return Encoder(device=session.device)


def cosines(unit: Unit) -> Row:
    """Return S-COS, the mean cosine between the texts of a prompt, for each prompt. A single text has none."""
    from d5p4.eval.similarity import average_cosine

    sets = read_lines(Unit, session.paths)[replace(unit, judge="", judged=0)]["texts"][: unit.judged]
    ends = np.cumsum([len(texts) for texts in sets])
    vectors = np.split(_encoder().encode(list(itertools.chain(*sets))), ends[:-1])
    values = [average_cosine(rows) if len(rows) > 1 else None for rows in vectors]
    known = [cosine for cosine in values if cosine is not None]
    return {"cos": values, "shown": f"S-COS {np.mean(known):.3f}" if known else "no prompt has two texts"}


# ---- the committed lines


def compact(unit: Unit, line: Row) -> Row:
    """Return what is committed of a line: the marks per problem of tests and ideas, and means of everything else."""
    line = {name: value for name, value in line.items() if name not in ("prompts", "spread", "logdet", "four")}
    if unit.task == BOOKS and not unit.judge:
        line |= {name: float(np.mean(line[name])) for name in ("rows", "nfe")}
        if "texts" in line:
            from d5p4.eval.lexical import self_bleu

            texts = line.pop("texts")
            line["distinct_2"] = books_rules.measures({"texts": texts, "rows": [], "nfe": []})["distinct_2"]
            line["self_bleu"] = [self_bleu(answers) if answers else 0.0 for answers in texts]
    elif "puzzles" in line:
        kept = {name: line["puzzles"][name] for name in ("right", "different")}
        line.pop("puzzles")
        if unit.cases == TEST or unit.stage == "ideas":
            line["puzzles"] = kept
    return {name: _rounded(value, 4 if isinstance(value, list) else 6) for name, value in line.items()}


def _rounded(value: Any, digits: int) -> Any:
    """Return a number, or a list of numbers, rounded to this many significant digits."""
    if isinstance(value, list):
        return [_rounded(one, digits) for one in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def fold(lines: Mapping[Unit, Row], path: Path) -> Lines[Unit]:
    """Write the compact lines of all units to a compressed file, atomically, and return them."""
    kept = {unit: compact(unit, line) for unit, line in lines.items()}
    write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept.values()))
    return kept


# ---- tables


@dataclass(eq=False)
class Group:
    """The units that differ only in their seeds, and the means [P] of their measures over seeds."""

    unit: Unit
    seeds: int
    values: Values

    @property
    def rows(self) -> float:
        return float(self.values["rows"].mean())


def groups_of(lines: Mapping[Unit, Row], wanted: Callable[[Unit], bool]) -> dict[Unit, Group]:
    """Return the groups of units that have marks, by their unit of seed 0. Rows and passes are means of a unit."""
    members: dict[Unit, list[Values]] = {}
    for unit, line in lines.items():
        if "puzzles" in line and wanted(unit):
            count = len(line["puzzles"]["right"])
            costs = {name: np.full(count, np.mean(line[name])) for name in ("rows", "nfe")}
            members.setdefault(replace(unit, seed=0), []).append(marks(line["puzzles"]) | costs)
    return {
        unit: Group(unit, len(seeds), {name: np.stack([seed[name] for seed in seeds]).mean(0) for name in seeds[0]})
        for unit, seeds in members.items()
    }


def _difference(group: Group, other: Values, name: str = "pass@4", scale: float = 100, digits: int = 1) -> str:
    return half_width(interval(group.values[name] - other[name]), digits, scale)


def _figure(group: Group, name: str, scale: float = 100, digits: int = 1) -> str:
    return half_width(interval(group.values[name]), digits, scale)


def coverage_table(lines: Mapping[Unit, Row], subtask: str, sizes: Sizes) -> str:
    """Return one row per tested setting, with its differences to the default tree and to best-of-n with the nearest
    number of rows, problem by problem."""

    def tested(unit: Unit) -> bool:
        return (unit.stage, unit.task, unit.cases, unit.problems) == ("coverage", subtask, TEST, sizes.tested)

    groups = groups_of(lines, tested)
    task = SUBTASKS[subtask][0]
    reference = groups.get(Unit("coverage", subtask, REFERENCE[task], sizes.tested, TEST, **DEFAULT))
    ladder = [group for group in groups.values() if group.unit.method in SAMPLES]
    cells = []
    for group in sorted(groups.values(), key=lambda group: group.rows):
        unit = group.unit
        complete = group.seeds == sizes.seeds or not unit.temperature
        name = unit.method if complete else f"{unit.method} [seeds: {group.seeds}]"
        name += " (default)" if group is reference else ""
        figures = [_figure(group, "pass@1"), _figure(group, "pass@4"), _figure(group, "different", 1, 2)]
        cost = [f"{group.rows:.0f}", f"{group.values['nfe'].mean():.1f}"]
        to_tree = _difference(group, reference.values) if reference is not None and group is not reference else None
        near = min(ladder, key=lambda other: abs(np.log(other.rows / group.rows)), default=None)
        to_best = f"{_difference(group, near.values)} ({near.unit.method})" if near and near is not group else None
        cells.append([name, unit.setting, *figures, *cost, to_tree, to_best])
    header = ["method", "setting", "pass@1 %", "pass@4 %", "different right", "rows", "passes"]
    named = f"pass@4 minus {REFERENCE[task]}, default"
    return markdown([*header, named, "pass@4 minus best-of-n at the nearest rows"], cells) if cells else UNMEASURED


def tuning_table(lines: Mapping[Unit, Row], sizes: Sizes) -> str:
    """Return pass@4 of all settings that were tried, the best of each method in bold."""
    tried: dict[tuple[str, str], list[Unit]] = {}
    for unit in lines:
        if unit.task in SUBTASKS and unit.cases == TUNING and unit.stage == "coverage" and unit.problems == sizes.tuned:
            tried.setdefault((SUBTASKS[unit.task][2], unit.method), []).append(unit)
    cells = []
    for key, units in sorted(tried.items()):
        best = countdown.choose(lines, units)
        entries = [(f"{unit.setting}: {100 * lines[unit]['pass@4']:.1f}", unit == best) for unit in units]
        cells.append([*key, "; ".join(f"**{entry}**" if bold else entry for entry, bold in entries)])
    return markdown(["task", "method", "pass@4 %"], cells) if cells else UNMEASURED


def prose_table(lines: Mapping[Unit, Row], sizes: Sizes) -> str:
    """Return one row per setting of books: the judges' perplexity, diversity, and bits per byte against independent
    samples at equal distinct-2."""
    units = [unit for unit in lines if unit.task == BOOKS and unit.problems == sizes.prompts]
    decoded = [unit for unit in units if not unit.judge and "distinct_2" in lines[unit]]
    scores: dict[Unit, dict[str, Row]] = {unit: {} for unit in decoded}
    for unit in units:
        if unit.judge and replace(unit, judge="", judged=0) in scores:
            scores[replace(unit, judge="", judged=0)][unit.judge] = lines[unit]
    judges = [name for name in dict.fromkeys(unit.judge for unit in units) if name and name != "encoder"]
    curves = {unit: _curve(lines[unit], scores[unit].get("judge")) for unit in decoded}
    cells = []
    for unit in sorted(decoded, key=lambda unit: (lines[unit]["rows"], unit.method, unit.order)):
        line, quality = lines[unit], []
        for name in judges:
            score = scores[unit].get(name)
            quality.append(plus_minus(_scored(score), "perplexity", 1) if score else None)
        plain = [curves[one] for one in decoded if one.method == "independent" and one.order == unit.order]
        gain = books_rules.at_equal_distinct(curves[unit], plain) if unit.method != "independent" else None
        cosine = [value for value in scores[unit].get("encoder", {}).get("cos", ()) if value is not None]
        spread = [half_width(interval(line[name]), digits) for name, digits in (("self_bleu", 1), ("distinct_2", 3))]
        spread.append(half_width(interval(cosine), 3) if len(cosine) > 1 else "–")
        cost = [f"{line['rows']:.0f}", f"{line['nfe']:.1f}"]
        cells.append([unit.method, unit.setting, *quality, *spread, half_width(gain, 3) if gain else None, *cost])
    names = [f"{name}: perplexity" for name in judges]
    measured = ["self-BLEU", "distinct-2", "S-COS", "bits per byte against independent", "rows", "passes"]
    return markdown(["method", "setting", *names, *measured], cells) if cells else UNMEASURED


def _scored(line: Row) -> dict[str, float]:
    return figures(Scored(*(np.array(line[name]) for name in Scored._fields)), together=1)


def _curve(line: Row, score: Row | None) -> np.ndarray | None:
    """Return distinct-2, nats and bytes [P, 3], as `books_rules.at_equal_distinct` needs them."""
    if score is None or len(score["nats"]) != len(line["distinct_2"]):
        return None
    return np.stack([line["distinct_2"], score["nats"], score["bytes"]], 1)


def ideas_table(lines: Mapping[Unit, Row], name: str, sizes: Sizes) -> str:
    """Return one idea: its settings, and the differences to the first row, or, for `search`, to best-of-n at equal
    rows, interpolated puzzle by puzzle as in `bench countdown`."""
    groups = groups_of(lines, lambda unit: unit.stage == "ideas" and unit.problems == sizes.tried)
    cells = []
    for subtask in IDEAS_ON:
        rows = [groups.get(unit) for unit in _units_of_idea(lines, subtask, name, sizes)]
        ladder = [group.values for group in rows if group is not None and group.unit.method in SAMPLES]
        base = rows[0] if rows else None
        for group in dict.fromkeys(rows):
            if group is None:
                continue
            other = base.values if base is not None and group is not base else None
            if name == "search":
                other = at_equal_rows(group.values, ladder) if ladder and group.unit.method not in SAMPLES else None
            gains = [_difference(group, other), _difference(group, other, "different", 1, 2)] if other else [None] * 2
            figures = [_figure(group, "pass@4"), _figure(group, "different", 1, 2), f"{group.rows:.0f}"]
            cells.append([SUBTASKS[subtask][1], group.unit.method, group.unit.setting, *figures, *gains])
    header = ["numbers", "method", "setting", "pass@4 %", "different right", "rows"]
    against = "best-of-n at equal rows" if name == "search" else "the first row"
    gained = [f"pass@4 minus {against}", f"different right minus {against}"]
    return markdown([*header, *gained], cells) if cells else UNMEASURED


def _units_of_idea(lines: Mapping[Unit, Row], subtask: str, name: str, sizes: Sizes) -> Iterator[Unit]:
    """Yield the units of a table of ideas, with seed 0. Methods that are not tuned yet have none."""
    for method, changes in IDEAS[name]:
        steps = tune(lines, subtask, method, sizes)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                if end.value is not None:
                    yield tried(end.value, changes, sizes)
                break


def papers_table() -> str:
    cells = [[*row[:-1], f"[arXiv {row[-1]}](https://arxiv.org/abs/{row[-1]})"] for row in PAPERS]
    return markdown(["method", "model", "measure", "without", "with", "source"], cells)


def tables(lines: Mapping[Unit, Row], sizes: Sizes | None = None) -> Tables:
    """Return all tables by name."""
    sizes = sizes or Sizes()
    made: dict[str, Any] = {subtask: partial(coverage_table, lines, subtask, sizes) for subtask in SUBTASKS}
    made |= {"books": partial(prose_table, lines, sizes), "tuning": partial(tuning_table, lines, sizes)}
    made |= {f"idea-{name}": partial(ideas_table, lines, name, sizes) for name in IDEAS}
    return made | {"papers": papers_table}


def committed(path: Path = RESULTS / "rivals.jsonl.xz") -> Lines[Unit]:
    return read_lines(Unit, [path])


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("rivals", __doc__)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", default=[], help="TASK=FOLDER: another model than the shipped one")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true", help="allow tf32 in float32 matrix products on a GPU")
    parser.add_argument("--tasks", default=",".join(TASKS), help="tasks to run, separated by commas [all]")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run, separated by commas [all]")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test that everything runs")
    parser.add_argument("--data", type=Path, help="held-out books: a text file, or a folder of `d5p4_lab train corpus`")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--tokens", type=int, default=None, help="at most this many tokens per forward")
    parser.add_argument("--judge", action="append", default=[], help="read texts: a judge of `bench books`, or encoder")
    parser.add_argument("--judged", type=int, help="the number of prompts whose texts the judges read [all]")
    parser.add_argument("--out", type=Path, default=Path("out/rivals.jsonl"), help="file of lines")
    parser.add_argument("--draw", action="store_true", help="add the lines of --out to --results, and print the tables")
    parser.add_argument("--results", type=Path, default=RESULTS / "rivals.jsonl.xz")
    args = parser.parse_args(arguments)
    if args.processes < 1:
        raise d5p4.D5P4Error(f"processes={args.processes} must be at least 1")
    tasks, stages = chosen(args.tasks, TASKS, "task"), chosen(args.stages, STAGES, "stage")
    sizes, models = SMALL if args.small else Sizes(), dict(text.split("=", 1) for text in args.model)
    lines: Lines[Unit] = committed(args.results) | read_lines(Unit, [args.out])
    if args.draw:
        kept = fold(lines, args.results)
        print("\n\n".join(f"### {name}\n{table()}" for name, table in tables(kept, sizes).items()))
        return
    if BOOKS in tasks and args.data is None and not args.judge:
        print("books are left out: --data gives held-out books to continue", flush=True)
        tasks.remove(BOOKS)
    for task in tasks:
        name = models.get(task, task)
        digest = weights_hash(find(name))
        ours = (line for unit, line in lines.items() if unit.task.split("-")[0] == task and "about" in line)
        if any(line["about"]["weights"] != digest for line in ours):
            raise d5p4.D5P4Error(f"there are lines of other weights than those of {name}; give another --out")

    def wanted(finished: Mapping[Unit, Row]) -> Iterator[Unit]:
        if args.judge:
            return judgements(finished, args.judge, args.judged)
        return plan(finished, sizes, tasks, stages)

    command = ["bench", "rivals", *(["--tf32"] if args.tf32 else []), "--tasks", ",".join(tasks)]
    given = Session(
        args.device, args.dtype, args.tf32, args.tokens, models, args.data, (args.results, args.out), command
    )
    run_units(args.out, lines, wanted, work, start, (given,), args.processes, args.minutes)
