"""Compare the tree, d5p4 and best-of-n with four published rivals at k = 4 answers.

    python -m d5p4_lab bench rivals --device cuda --tf32 --processes 10 --data val.txt.xz --out rivals.jsonl
    python -m d5p4_lab bench rivals --judge smollm2 --judge encoder --out rivals.jsonl
    python -m d5p4_lab bench rivals --draw --out rivals.jsonl

The first command decodes, the second lets judges read the texts of books, and the third adds the lines of --out to
--results, without texts, and prints the tables. `bench tables` then redraws the documents. The first two commands add
one line per unit (one method with one seed on one task) to --out as soon as the unit ends. All commands also read
--results, so a run continues from there, even on another machine; but only --out has the texts.

The tasks, the most important units first:
countdown, programs  puzzles with four and five numbers, and tasks with three and four operations, whose answers must
                     satisfy the examples of the prompt and five hidden ones. Every method is tuned on other problems
                     (see `solving.py`; seven settings at most), and then tested, with three seeds if it is random.
                     All methods reveal per pass what the tree reveals, except soar, whose threshold is tuned. The lines
                     of tests have the marks of each problem, so all differences are paired
books                continuations of held-out paragraphs, 64 tokens, one per step. Better quality costs diversity here,
                     so nothing is tuned: all settings are shown, and each is compared with independent samples at the
                     temperature that gives the same distinct-2. Judges: a judge of `bench books`, which reads the
                     continuation given the prompt, or `encoder`, which measures S-COS
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.countdown import WINDOW
from d5p4.eval.lexical import self_bleu

from ..paper.tasks import load_task
from ..scoring.perplexity import CausalJudge, Scored
from ..statistics import from_resamples, interval, resampled_means
from ..tables import Row, Tables, half_width, markdown
from ..timing import wall
from ..train.programs_data import tasks as program_tasks
from . import RESULTS, chosen, countdown, generate, make_parser, solving, write
from .books import distinct_share, figures, plus_minus
from .countdown import UNMEASURED
from .solving import (
    DEFAULT,
    DISTINCT,
    PAPER,
    SURE,
    TREES,
    K,
    Knob,
    Method,
    Values,
    sweep,
)
from .units import Lines, add_options, read_lines, run_units


@dataclass(frozen=True)
class Sizes:
    """How many problems are decoded. The defaults were committed before the first unit was decoded."""

    tested: int = 1000  # problems of a test
    tuned: int = 200  # problems per setting for tuning
    prompts: int = 240  # paragraphs that are continued
    seeds: int = 3  # of random methods in a test


SMALL = Sizes(tested=3, tuned=2, prompts=3, seeds=1)
TASKS = ("countdown", "programs", "books")
SUBTASKS = {  # (task, the size of its problems), and a heading
    "countdown-4": ("countdown", 4, "countdown, four numbers"),
    "countdown-5": ("countdown", 5, "countdown, five numbers"),
    "programs-3": ("programs", 3, "programs, three operations"),
    "programs-4": ("programs", 4, "programs, four operations"),
}
BOOKS, LENGTH = "books", 64
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


@dataclass(frozen=True)
class Unit:
    """One call of `generate`: one method with one seed on all problems of a task. With a judge: the reading of its
    texts."""

    task: str  # a key of SUBTASKS, or "books"
    method: str
    problems: int
    cases: str = TUNING
    temperature: float = 1.0
    knob: Knob = None
    order: str = "confidence"
    change: str = ""
    seed: int = 0
    judge: str = ""
    judged: int = 0  # the number of prompts whose texts the judge reads

    @property
    def kind(self) -> Method:
        return (PROSE if self.task == BOOKS else methods_of(SUBTASKS[self.task][0]))[self.method]

    @property
    def setting(self) -> str:
        return solving.setting_of(vars(self), self.kind)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`. In books, every step reveals one token."""
        options = solving.options_of(self, self.kind)
        if self.task == BOOKS:
            return options | {"gen_length": LENGTH} | ({} if "reveal" in options else {"steps": LENGTH})
        task, size, _ = SUBTASKS[self.task]
        options |= {"gen_length": WINDOW[size]} if task == "countdown" else {}
        return options | solving.rule_options(self.kind.rule)

    def __str__(self) -> str:
        what = f"{self.judge} {self.task}".strip()
        return f"{what}, {self.cases}, {self.problems}: {self.method} ({self.setting}), seed {self.seed}"


# ---- the plan


def plan(lines: Mapping[Unit, Row], sizes: Sizes, tasks: Sequence[str]) -> Iterator[Unit]:
    """Yield all units that are known by now, the most important first: all methods with one seed, books, other seeds.

    A unit may come twice.
    """
    tested = list[Unit]()
    for name, (subtask, (task, *_)) in itertools.product(methods_of("countdown"), SUBTASKS.items()):
        if task in tasks:
            tuned = yield from tune(lines, subtask, name, sizes)
            settings = [tuned] if tuned else []
            settings += [replace(Unit(subtask, name, sizes.tuned), **DEFAULT)] if name in TREES.values() else []
            tested += (new := [replace(unit, problems=sizes.tested, cases=TEST) for unit in settings])
            yield from new
    if BOOKS in tasks:
        for name, method in PROSE.items():
            for order, heats in method.heats.items():
                for heat, value in itertools.product(heats, method.values):
                    yield Unit(BOOKS, name, sizes.prompts, TEST, heat, value, order)
    for seed, unit in itertools.product(range(1, sizes.seeds), tested):
        if unit.temperature:
            yield replace(unit, seed=seed)


def tune(lines: Mapping[Unit, Row], subtask: str, name: str, sizes: Sizes) -> Generator[Unit, None, Unit | None]:
    """Yield the units that tune a method. Return its best unit, or None as long as units are missing."""
    method = methods_of(SUBTASKS[subtask][0])[name]
    if not method.like:
        return (yield from sweep(lines, Unit(subtask, name, sizes.tuned), method))
    tuned = yield from tune(lines, subtask, method.like, sizes)
    return replace(tuned, method=name) if tuned else None


def judgements(lines: Mapping[Unit, Row], judges: Sequence[str]) -> Iterator[Unit]:
    """Yield the units in which the judges read the texts of the lines."""
    for name, unit in itertools.product(judges, lines):
        if "texts" in lines[unit]:
            yield replace(unit, judge=name, judged=unit.problems)


# ---- one unit


@dataclass
class Session:
    """What a process was started with."""

    device: str | None = None
    tf32: bool = False
    models: Mapping[str, str] = field(default_factory=dict)  # the model of each task, if it is not the shipped one
    data: Path | None = None
    paths: Sequence[Path] = ()
    words: Sequence[str] = ()


session = Session()


def start(given: Session) -> None:
    vars(session).update(vars(given))


@cache
def _loaded(task: str) -> dict[str, Any]:
    name = session.models.get(task, task)
    solving.start(name, session.device, session.tf32, session.words)
    return dict(vars(solving.session))


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
    """Run a unit and return its line."""
    if unit.judge:
        line = read_lines(Unit, session.paths)[replace(unit, judge="", judged=0)]
        sets = line["texts"][: unit.judged]
        return cosines(sets) if unit.judge == "encoder" else read_texts(unit.judge, line["prompts"], sets)
    task = unit.task.split("-")[0]
    vars(solving.session).update(_loaded(task))
    if task == BOOKS:
        return continued(unit)
    prompts, references = problems_of(unit.task, unit.cases, unit.problems)
    return solving.answer(task, prompts, unit.seed, unit.options(), references)


def continued(unit: Unit) -> Row:
    """Continue paragraphs. Return the line: the texts [P][4 or fewer] and the cost per prompt."""
    known, prompts = solving.session, paragraphs(unit.problems)
    call = partial(generate, known.model, prompts, seed=unit.seed, max_tokens_per_forward=known.tokens)
    result, seconds = wall(partial(call, **unit.options()), known.model.device)
    line: Row = {"about": known.facts, "seconds": round(seconds, 2), "prompts": prompts, "texts": result.texts}
    line |= {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()}
    return line | {"shown": f"{np.mean(line['rows']):.0f} rows in {np.mean(line['nfe']):.1f} passes, {seconds:.1f} s"}


@cache
def paragraphs(count: int) -> list[str]:
    examples = load_task("books", session.data, limit=count).examples
    if len(examples) < count:
        raise d5p4.D5P4Error(f"{session.data} has only {len(examples)} paragraphs to continue, not {count}")
    return [str(example.prompt) for example in examples]


@cache
def reader(name: str) -> CausalJudge:
    return CausalJudge(name, device=session.device)


def scored_continuations(judge: Any, prompts: Sequence[str], sets: Sequence[Sequence[str]]) -> Scored:
    """Return nats, tokens and bytes [P] of the texts of each prompt, given the prompt."""
    whole = [prompt + text for prompt, texts in zip(prompts, sets, strict=True) for text in texts]
    counts = np.array([len(texts) for texts in sets])
    before, after = (judge.score(texts, max_tokens_per_batch=1 << 12) for texts in (prompts, whole))
    starts = np.cumsum([0, *counts[:-1]])
    return Scored(*(np.add.reduceat(a, starts) - b * counts for a, b in zip(after, before, strict=True)))


def read_texts(name: str, prompts: Sequence[str], sets: Sequence[Sequence[str]]) -> Row:
    """Let a judge read continuations. Return nats, tokens and bytes per prompt, without those of the prompt."""
    judge = reader(name)
    sums, seconds = wall(partial(scored_continuations, judge, prompts[: len(sets)], sets), judge.model.device)
    figure = f"perplexity {sums.perplexity:.1f}, {sums.bits_per_byte:.3f} bits per byte, {seconds:.0f} s"
    return {"describe": judge.describe, "shown": figure} | {name: x.tolist() for name, x in sums._asdict().items()}


@cache
def encoder() -> Any:
    from ..scoring.encoder import Encoder

    return Encoder(device=session.device)


def cosines(sets: Sequence[Sequence[str]]) -> Row:
    """Return S-COS, the mean cosine between the texts of a prompt, for each prompt. A single text has none."""
    from d5p4.eval.similarity import average_cosine

    ends = np.cumsum([len(texts) for texts in sets])
    vectors = np.split(encoder().encode(list(itertools.chain(*sets))), ends[:-1])
    values = [average_cosine(rows) if len(rows) > 1 else None for rows in vectors]
    known = [cosine for cosine in values if cosine is not None]
    return {"cos": values, "shown": f"S-COS {np.mean(known):.3f}" if known else "no prompt has two texts"}


# ---- the committed lines


def compact(unit: Unit, line: Row) -> Row:
    """Return what is committed of a line: the marks per problem of tests, and means of everything else."""
    line = {name: value for name, value in line.items() if name not in ("prompts", "four")}
    if "texts" in line:
        texts = line.pop("texts")
        line |= {name: float(np.mean(line[name])) for name in ("rows", "nfe")}
        line["distinct_2"] = [distinct_share(answers, 2) for answers in texts]
        line["self_bleu"] = [self_bleu(answers) if answers else 0.0 for answers in texts]
    problems = line.pop("problems", None)
    if problems is not None and unit.cases == TEST:
        line["problems"] = {name: problems[name] for name in ("right", "different")}
    return {name: _rounded(value, 4 if isinstance(value, list) else 6) for name, value in line.items()}


def _rounded(value: Any, digits: int) -> Any:
    """Return a number, or a list of numbers, rounded to this many significant digits."""
    if isinstance(value, list):
        return [_rounded(one, digits) for one in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


# ---- tables


@dataclass(eq=False)
class Group:
    """The units that differ only in their seeds, and the means [P] of their measures over seeds."""

    unit: Unit
    seeds: int
    values: Values
    rows: float
    passes: float


def groups_of(lines: Mapping[Unit, Row], subtask: str, sizes: Sizes) -> dict[Unit, Group]:
    """Return the tested groups of a task, by their unit of seed 0."""
    members: dict[Unit, list[Row]] = {}
    for unit, line in lines.items():
        if (unit.task, unit.cases, unit.problems) == (subtask, TEST, sizes.tested):
            members.setdefault(replace(unit, seed=0), []).append(line)
    groups = {}
    for unit, seeds in members.items():
        values = solving.mean_values([solving.measures(line["problems"]) for line in seeds])
        rows, passes = (float(np.mean([np.mean(line[name]) for line in seeds])) for name in ("rows", "nfe"))
        groups[unit] = Group(unit, len(seeds), values, rows, passes)
    return groups


def coverage_table(lines: Mapping[Unit, Row], subtask: str, sizes: Sizes) -> str:
    """Return one row per tested setting, with its differences to the default tree and to best-of-n with the nearest
    number of rows, problem by problem."""
    groups = groups_of(lines, subtask, sizes)
    default = REFERENCE[SUBTASKS[subtask][0]]
    reference = groups.get(Unit(subtask, default, sizes.tested, TEST, **DEFAULT))
    ladder = [group for group in groups.values() if group.unit.method in SAMPLES]
    cells = []

    def difference(group: Group, other: Group) -> str:
        return half_width(interval(group.values["pass@4"] - other.values["pass@4"]), 1, 100)

    for group in sorted(groups.values(), key=lambda group: group.rows):
        unit = group.unit
        complete = group.seeds == sizes.seeds or not unit.temperature
        name = unit.method if complete else f"{unit.method} [seeds: {group.seeds}]"
        name += " (default)" if group is reference else ""
        shares = [half_width(interval(group.values[measure]), 1, 100) for measure in ("pass@1", "pass@4")]
        cost = [half_width(interval(group.values["different"]), 2), f"{group.rows:.0f}", f"{group.passes:.1f}"]
        to_tree = difference(group, reference) if reference is not None and group is not reference else None
        near = min(ladder, key=lambda other: abs(np.log(other.rows / group.rows)), default=None)
        to_best = f"{difference(group, near)} ({near.unit.method})" if near and near is not group else None
        cells.append([name, unit.setting, *shares, *cost, to_tree, to_best])
    header = ["method", "setting", "pass@1 %", "pass@4 %", "different right", "rows", "passes"]
    named = f"pass@4 minus {default}, default"
    return markdown([*header, named, "pass@4 minus best-of-n at the nearest rows"], cells) if cells else UNMEASURED


def tuning_table(lines: Mapping[Unit, Row], sizes: Sizes) -> str:
    """Return pass@4 of all settings that were tried, the best of each method in bold."""
    tried: dict[tuple[str, str], list[Unit]] = {}
    for unit in lines:
        if unit.task in SUBTASKS and unit.cases == TUNING and unit.problems == sizes.tuned:
            tried.setdefault((SUBTASKS[unit.task][2], unit.method), []).append(unit)
    cells = []
    for key, units in sorted(tried.items()):
        best = solving.choose(lines, units)
        entries = [(f"{unit.setting}: {100 * lines[unit]['pass@4']:.1f}", unit == best) for unit in units]
        cells.append([*key, "; ".join(f"**{entry}**" if bold else entry for entry, bold in entries)])
    return markdown(["task", "method", "pass@4 %"], cells) if cells else UNMEASURED


def prose_table(lines: Mapping[Unit, Row], sizes: Sizes) -> str:
    """Return one row per setting of books: the judges' perplexity, diversity, and bits per byte (by the first judge
    that has read all texts) against independent samples at equal distinct-2."""
    units = [unit for unit in lines if unit.task == BOOKS and unit.problems == sizes.prompts]
    decoded = [unit for unit in units if not unit.judge and "distinct_2" in lines[unit]]
    scores: dict[Unit, dict[str, Row]] = {unit: {} for unit in decoded}
    for unit in units:
        if unit.judge and replace(unit, judge="", judged=0) in scores:
            scores[replace(unit, judge="", judged=0)][unit.judge] = lines[unit]
    judges = [name for name in dict.fromkeys(unit.judge for unit in units) if name and name != "encoder"]
    curves = {unit: _curve(lines[unit], [scores[unit].get(name) for name in judges]) for unit in decoded}
    cells = []
    for unit in sorted(decoded, key=lambda unit: (lines[unit]["rows"], unit.method, unit.order)):
        line, quality = lines[unit], []
        for name in judges:
            score = scores[unit].get(name)
            quality.append(plus_minus(_figures(score), "perplexity", 1) if score else None)
        plain = [curves[one] for one in decoded if one.method == "independent" and one.order == unit.order]
        gain = at_equal_distinct(curves[unit], plain) if unit.method != "independent" else None
        cosine = [value for value in scores[unit].get("encoder", {}).get("cos", ()) if value is not None]
        spread = [half_width(interval(line[name]), digits) for name, digits in (("self_bleu", 1), ("distinct_2", 3))]
        spread.append(half_width(interval(cosine), 3) if len(cosine) > 1 else "–")
        cost = [f"{line['rows']:.0f}", f"{line['nfe']:.1f}"]
        cells.append([unit.method, unit.setting, *quality, *spread, half_width(gain, 3) if gain else None, *cost])
    names = [f"{name}: perplexity" for name in judges]
    measured = ["self-BLEU", "distinct-2", "S-COS", "bits per byte against independent", "rows", "passes"]
    return markdown(["method", "setting", *names, *measured], cells) if cells else UNMEASURED


def _figures(score: Row) -> dict[str, float]:
    return figures(Scored(*(np.array(score[name]) for name in Scored._fields)), together=1)


def _curve(line: Row, scores: Sequence[Row | None]) -> np.ndarray | None:
    """Return distinct-2, nats and bytes [P, 3] by the first judge that has read all texts."""
    for score in scores:
        if score is not None and len(score["nats"]) == len(line["distinct_2"]):
            return np.stack([line["distinct_2"], score["nats"], score["bytes"]], 1)
    return None


def at_equal_distinct(curve: np.ndarray | None, others: Sequence[np.ndarray | None]) -> list[float] | None:
    """Return the bits per byte of a unit minus those of independent sampling at the temperature with equal distinct-2.

    The figure is [difference, low, high] with a bootstrap over prompts. Bits per byte are interpolated in distinct-2
    between the sampled temperatures. None: there are no such temperatures.
    """
    known = [other for other in others if other is not None]
    if curve is None or len(known) < 2:
        return None
    means = resampled_means(np.concatenate([curve, *known], 1)).reshape(-1, 1 + len(known), 3)
    distinct, bits = means[..., 0], means[..., 1] / means[..., 2] / np.log(2)
    differences = np.full(len(means), np.nan)
    for i, (where, height) in enumerate(zip(distinct, bits, strict=True)):
        order = where[1:].argsort()
        differences[i] = height[0] - np.interp(where[0], where[1:][order], height[1:][order], np.nan, np.nan)
    made = from_resamples(differences)
    return None if np.isnan(made.value) else [round(x, 4) for x in (made.value, made.low, made.high)]


def tables(lines: Mapping[Unit, Row], sizes: Sizes | None = None) -> Tables:
    """Return all tables by name."""
    sizes = sizes or Sizes()
    made: dict[str, Any] = {subtask: partial(coverage_table, lines, subtask, sizes) for subtask in SUBTASKS}
    return made | {"books": partial(prose_table, lines, sizes), "tuning": partial(tuning_table, lines, sizes)}


def committed(path: Path = RESULTS / "rivals.jsonl.xz") -> Lines[Unit]:
    return read_lines(Unit, [path])


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("rivals", __doc__, small=True)
    parser.add_argument("--model", action="append", default=[], help="TASK=FOLDER: another model than the shipped one")
    parser.add_argument("--tasks", default=",".join(TASKS), help="tasks to run, separated by commas [all]")
    parser.add_argument("--data", type=Path, help="held-out books: a text file, or a folder of `d5p4_lab train corpus`")
    parser.add_argument("--judge", action="append", default=[], help="read texts: a judge of `bench books`, or encoder")
    add_options(parser)
    parser.add_argument("--results", type=Path, default=RESULTS / "rivals.jsonl.xz")
    args = parser.parse_args(arguments)
    tasks = chosen(args.tasks, TASKS, "task")
    sizes, models = SMALL if args.small else Sizes(), dict(text.split("=", 1) for text in args.model)
    lines: Lines[Unit] = read_lines(Unit, [args.results, *args.out])
    if args.draw:
        write(args.results, [compact(unit, line) for unit, line in lines.items()])
        drawn = tables(committed(args.results), sizes)
        print("\n\n".join(f"### {name}\n{table()}" for name, table in drawn.items()))
        return
    if BOOKS in tasks and args.data is None and not args.judge:
        print("books are left out: --data gives held-out books to continue", flush=True)
        tasks.remove(BOOKS)
    for task in tasks:
        ours = {unit: line for unit, line in lines.items() if unit.task.split("-")[0] == task}
        solving.refuse_other_weights(ours, models.get(task, task))

    def wanted(finished: Mapping[Unit, Row]) -> Iterator[Unit]:
        return judgements(finished, args.judge) if args.judge else plan(finished, sizes, tasks)

    command = ["bench", "rivals", *(["--tf32"] if args.tf32 else []), "--tasks", ",".join(tasks)]
    paths = (args.results, *args.out)
    given = Session(args.device, args.tf32, models, args.data, paths, command)
    run_units(args.out[0], lines, wanted, work, start, (given,), args.processes)
