"""Measure how many held-out countdown problems a method solves with k = 4 answers, and how many right answers differ.

    python -m d5p4_lab bench countdown --model countdown --device cuda
    python -m d5p4_lab bench countdown --table

A method's parameter (its "knob") is tuned on `--tune` separate problems with one seed. The value with the best pass@4
is then tested on the test problems. Independent sampling, best-of-16 and greedy-beam have no knob except the
temperature, which is 1 for all methods. pass@1 is the share of right answers; "first answer" is the answer with the
best score. The JSON file is written after every run, and finished runs are not repeated, so the same command continues
a killed benchmark. `--table` only prints the Markdown tables of the JSON file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import d5p4
from d5p4.eval.countdown import WINDOW, Problem, canonical, is_right, problems
from d5p4.eval.stats import pass_at
from d5p4.methods import METHODS as REGISTERED
from d5p4.models.load import find

from ..provenance import about
from ..statistics import Interval, interval, relative_cut
from ..timing import wall
from . import RESULTS, Row, Tables, generate, half_width, make_parser, markdown, read, table_of, write

K, W = 4, 4
SOLVER = "local-search"  # the solver of the committed results
BETAS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TEST_SEED, TUNE_SEED = 0, 1  # of the problems
TESTED = 1000  # the largest value of --problems; tuning never uses these test problems
GUIDANCE = (1.5, 2.0)
TOKENS = 1 << 17  # a forward on a GPU has at most this many tokens, and a call of `generate` eight times as many


@dataclass(frozen=True)
class Method:
    """A method in the comparison: its options for `d5p4.generate`, and the knob to tune (None if there is no knob)."""

    name: str
    options: Mapping[str, Any]
    knob: str | None = None
    values: tuple[float, ...] = ()
    main: bool = True  # False for methods that serve only as controls; their runs come last
    guided: bool = False  # whether problems of 4 numbers also run with guidance


METHODS = (
    Method("independent", {"method": "independent"}, guided=True),
    Method("d5p4", {"method": "d5p4"}, "beta", BETAS, guided=True),
    Method("d5p4, distinct", {"method": "d5p4", "distinct": True}, "beta", BETAS),
    Method("best-of-16", {"method": "best-of-n", "rank": "entropy"}),
    Method("greedy-beam", {"method": "greedy-beam"}),
    Method("diverse-beam", {"method": "diverse-beam"}, "alpha", (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)),
    Method("best-of-16, no repeats", {"method": "best-of-n", "rank": "entropy", "repeats": False}, main=False),
    Method("independent, distinct", {"method": "independent", "distinct": True}, main=False),
    Method("greedy-beam, distinct", {"method": "greedy-beam", "distinct": True}, main=False),
    # d5p4x scales its kernel by e^(Q/beta): a small beta favours quality, and from 100 on only diversity counts.
    Method("d5p4x", {"method": "d5p4x"}, "beta", (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), main=False),
)


@dataclass(frozen=True)
class Run:
    """One call of `generate`: one method with one seed on all problems for tuning or for testing."""

    role: str  # "tune" or "test"
    method: Method
    numbers: int
    problems: int
    seed: int
    value: float | None = None  # the knob's value
    guidance: float = 1.0

    def identity(self) -> dict[str, Any]:
        """Return the entries of the results file by which a finished run is recognised."""
        return {
            "role": self.role,
            "method": self.method.name,
            "numbers": self.numbers,
            "problems": self.problems,
            "seed": self.seed,
            "knob": self.method.knob,
            "value": self.value,
            "guidance": self.guidance,
        }

    def options(self) -> dict[str, Any]:
        """Return the run's keyword arguments for `d5p4.generate`, which reveal one token per step."""
        window = WINDOW[self.numbers]
        common: dict[str, Any] = dict(k=K, w=W, gen_length=window, steps=window, block_length=window)
        common |= dict(temperature=1.0, order="confidence", distinct=False, guidance=self.guidance)
        chosen = common | dict(self.method.options) | ({self.method.knob: self.value} if self.method.knob else {})
        solves = "solver" in REGISTERED[chosen["method"]].parameters
        return ({"solver": SOLVER} if solves else {}) | chosen

    def __str__(self) -> str:
        knob = "" if self.method.knob is None else f", {self.method.knob} {self.value:g}"
        guidance = "" if self.guidance == 1 else f", guidance {self.guidance:g}"
        return f"{self.role} {self.numbers} numbers: {self.method.name}{knob}{guidance}, seed {self.seed}"


@cache
def cases(role: str, count: int, numbers: int) -> list[Problem]:
    """Return the problems of a run. Problems for tuning are never among the first TESTED problems for testing."""
    if role == "test":
        return problems(count, numbers, TEST_SEED)

    def key(problem: Problem) -> tuple[int, ...]:
        return *sorted(problem.numbers), problem.target

    test = {key(problem) for problem in problems(TESTED, numbers, TEST_SEED)}
    return [problem for problem in problems(2 * count, numbers, TUNE_SEED) if key(problem) not in test][:count]


@dataclass
class Record:
    """The results of a run. `right` and `distinct` have one character per problem, which keeps the file small."""

    run: dict[str, Any]  # Run.identity
    settings: dict[str, Any]  # the settings that differ from the library's defaults
    session: int  # the index in the file's list `sessions` of the session that made this run
    right: str  # one hexadecimal digit per problem; its bit i is 1 if answer i is right
    distinct: str  # per problem, letter number 5 t + f (a is 0): t different right texts have f canonical forms
    rows: float  # the mean number of rows (sequences) through the model per problem and step
    rows_nominal: float
    seconds: float

    def right_answers(self) -> np.ndarray:
        """Return bool [P, k]: whether each of the k answers to each of the P problems is right."""
        digits = np.array([int(digit, 16) for digit in self.right])
        return (digits[:, None] >> np.arange(K) & 1).astype(bool)

    def solved(self, n: int) -> np.ndarray:
        """pass@n per problem [P]."""
        return pass_at(self.right_answers(), n)

    def first(self) -> np.ndarray:
        """Return [P]: for each problem, 1 if the answer with the best score is right, otherwise 0."""
        return self.right_answers()[:, 0].astype(float)

    def different(self, canonical: bool) -> np.ndarray:
        """Return [P]: the number of different right answers to each problem, compared by text or by canonical form."""
        letters = np.array([ord(letter) - ord("a") for letter in self.distinct])
        return letters % (K + 1) if canonical else letters // (K + 1)


@dataclass
class Book:
    """The results file."""

    path: Path
    model: str = ""
    weights: str = ""  # the sha256 of all weight files, concatenated
    sessions: list[dict[str, str]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @staticmethod
    def open(path: Path) -> Book:
        results = read(path)
        if not results:
            return Book(path)
        try:
            records = [Record(**record) for record in results["records"]]
            return Book(path, results["model"], results["weights"], results["sessions"], records)
        except (KeyError, TypeError) as reason:
            raise d5p4.D5P4Error(f"{path} is not a results file of this benchmark ({reason})") from reason

    def find(self, run: Run) -> Record | None:
        wanted = run.identity()
        return next((record for record in self.records if record.run == wanted), None)

    def write(self) -> None:
        results = {
            "model": self.model,
            "weights": self.weights,
            "sessions": self.sessions,
            "summary": summary(self.records),
            "records": [asdict(record) for record in self.records],
        }
        lines = ",\n".join(f'"{name}": {_one_per_line(value)}' for name, value in results.items())
        write(self.path, f"{{\n{lines}\n}}\n")

    def best(self, method: Method, numbers: int, count: int) -> float | None:
        """Return the knob's value with the best pass@4 in a complete sweep (the smallest of equally good values)."""
        if method.knob is None:
            return None
        records = [self.find(run) for run in sweep(method, numbers, count)]
        scores = {record.run["value"]: record.solved(K).mean() for record in records if record is not None}
        if len(scores) < len(method.values):
            raise d5p4.D5P4Error(f"the sweep of {method.name} at {numbers} numbers is not complete yet")
        return max(sorted(scores), key=scores.__getitem__)


def _one_per_line(value: Any) -> str:
    """Return the JSON text of a value. If the value is a list, each entry is on its own line."""
    entries = [json.dumps(entry) for entry in value] if isinstance(value, list) else []
    return "[\n" + ",\n".join(entries) + "\n]" if entries else json.dumps(value)


def sweep(method: Method, numbers: int, count: int) -> list[Run]:
    return [Run("tune", method, numbers, count, 0, value) for value in method.values]


def plan(
    book: Book, chosen: Sequence[Method], numbers: Sequence[int], count: int, tune: int, seeds: int
) -> Iterator[Run]:
    """Yield the runs, the most important first. Guided runs and controls are last.

    A sweep (the runs that tune a method) must be in `book` before the method's tests, so finish each run in turn.
    """

    def tests(method: Method, n: int, guidance: float = 1.0) -> Iterator[Run]:
        yield from sweep(method, n, tune)
        value = book.best(method, n, tune)
        yield from (Run("test", method, n, count, seed, value, guidance) for seed in range(seeds))

    for n in numbers:
        for method in chosen:
            if method.main:
                yield from tests(method, n)
    if 4 in numbers:
        for guidance in GUIDANCE:
            for method in chosen:
                if method.guided:
                    yield from tests(method, 4, guidance)
    for n in numbers:
        for method in chosen:
            if not method.main:
                yield from tests(method, n)


def resolved(run: Run, model: d5p4.Model) -> dict[str, Any]:
    """Return a run's settings that differ from the library's defaults, because of the run or because of the model."""
    defaults, settings = d5p4.Settings().to_dict(), d5p4.Settings.make(model, **run.options()).to_dict()
    # Leave out the solver of the committed results, because they do not name it.
    params = {name: value for name, value in settings["params"].items() if (name, value) != ("solver", SOLVER)}
    return {name: value for name, value in (settings | {"params": params}).items() if value != defaults[name]}


def judge(puzzles: Sequence[Problem], texts: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Judge the answers, the texts [P][k]. Return the fields `right` and `distinct` of a `Record`."""
    right, distinct = "", ""
    for problem, answers in zip(puzzles, texts, strict=True):
        marks = [is_right(problem, answer) for answer in answers]
        right_texts = {answer for answer, mark in zip(answers, marks, strict=True) if mark}
        right += f"{sum(mark << i for i, mark in enumerate(marks)):x}"
        distinct += chr(ord("a") + (K + 1) * len(right_texts) + len(set(map(canonical, right_texts))))
    return right, distinct


def carry_out(run: Run, model: d5p4.Model, tokens: int, session: int) -> Record:
    puzzles = cases(run.role, run.problems, run.numbers)
    prompts = [problem.prompt for problem in puzzles]
    decode = partial(generate, model, prompts, seed=run.seed, max_tokens_per_forward=tokens, **run.options())
    result, seconds = wall(decode, model.head.weight.device)
    right, distinct = judge(puzzles, result.texts)
    steps = len(puzzles) * WINDOW[run.numbers]
    rows, nominal = (round(int(count.sum()) / steps, 3) for count in (result.rows, result.rows_nominal))
    settings = resolved(run, model)
    return Record(run.identity(), settings, session, right, distinct, rows, nominal, round(seconds, 2))


def forecast(run: Run, book: Book, session: int) -> float:
    """Estimate how many seconds a run will take, from the slowest run of the same method in this session.

    If the method has no run in this session, return twice the estimate from the slowest run of all methods.
    """

    def cost(run: Mapping[str, Any]) -> int:
        return run["problems"] * WINDOW[run["numbers"]] ** 2  # steps and tokens per row are both WINDOW

    wanted = run.identity()
    mine = [record for record in book.records if record.session == session]
    same = [r for r in mine if all(r.run[name] == wanted[name] for name in ("method", "guidance"))]
    rate = max((r.seconds / cost(r.run) for r in same or mine), default=0.0)
    return rate * cost(wanted) * (1 if same else 2)


@cache
def _cut(base: bytes, other: bytes) -> Interval:
    """Return `relative_cut` of two float64 arrays [P]. They are cached, because every write of the file needs them."""
    return relative_cut(np.frombuffer(base), np.frombuffer(other))


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return every tested method's figures, averaged over seeds: [mean, low end, high end of the 95 % interval]."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        run = record.run
        if run["role"] == "test":
            key = tuple(run[name] for name in ("numbers", "problems", "guidance", "method", "value"))
            groups.setdefault(key, []).append(record)
    rows = []
    for (numbers, count, guidance, name, value), group in groups.items():
        base = groups.get((numbers, count, 1.0, "independent", None))
        solved = {n: np.stack([r.solved(n) for r in group]) for n in (1, 2, 4)}
        figures = {f"pass@{n}": interval(values) for n, values in solved.items()}
        figures["first"] = interval(np.stack([r.first() for r in group]))
        figures["distinct_right"] = interval(np.stack([r.different(canonical=False) for r in group]))
        figures["distinct_forms"] = interval(np.stack([r.different(canonical=True) for r in group]))
        if base is not None and base is not group:
            before = np.stack([r.solved(K) for r in base]).mean(0)
            if before.mean() < 1:
                figures["unsolved_cut"] = _cut(before.tobytes(), solved[K].mean(0).tobytes())
        row = {"numbers": numbers, "method": name, "guidance": guidance, "knob": group[0].run["knob"], "value": value}
        row |= {"problems": count, "seeds": len(group), "session": group[-1].session}
        row |= {key: [round(float(x), 5) for x in figure] for key, figure in figures.items()}
        for name, digits in (("rows", 3), ("rows_nominal", 3), ("seconds", 1)):
            row[name] = round(float(np.mean([getattr(r, name) for r in group])), digits)
        rows.append(row)
    return rows


def results_table(rows: Sequence[Row], guided: bool = False) -> str:
    cells = []
    for row in rows:
        name = row["method"] + (f", guidance {row['guidance']:g}" if guided else "")
        if row["knob"] is not None:
            name += f" ({row['knob']} {row['value']:g})"
        if row["seeds"] != rows[0]["seeds"] or row["problems"] != rows[0]["problems"]:
            name += f" [{row['problems']} problems, {row['seeds']} seeds]"
        cut = row.get("unsolved_cut")
        cells.append(
            {
                "method": name,
                "first answer %": half_width(row["first"], 1, 100),
                **{f"pass@{n} %": half_width(row[f"pass@{n}"], 1, 100) for n in (1, 2, 4)},
                "unsolved at 4, cut %": cut and f"{100 * cut[0]:.0f} [{100 * cut[1]:.0f}, {100 * cut[2]:.0f}]",
                "different right": half_width(row["distinct_right"], 2),
                "canonical": half_width(row["distinct_forms"], 2),
                "rows per step": f"{row['rows']:.2f}",
                "nominal": f"{row['rows_nominal']:g}",
            }
        )
    return table_of(cells)


def sweeps_table(records: Sequence[Record]) -> str:
    """Return a table of pass@4 for each value of a method's knob. The best value is bold."""
    groups: dict[tuple[int, str, str], dict[float, float]] = {}
    for record in records:
        run = record.run
        if run["role"] == "tune":
            values = groups.setdefault((run["numbers"], run["method"], run["knob"]), {})
            values[run["value"]] = float(record.solved(K).mean())
    cells = []
    for (numbers, method, knob), scores in groups.items():
        best = max(sorted(scores), key=scores.__getitem__)
        shown = {value: f"{value:g}: {100 * score:.1f}" for value, score in scores.items()}
        marked = [f"**{text}**" if value == best else text for value, text in shown.items()]
        cells.append([str(numbers), method, f"{knob} {', '.join(marked)}"])
    return markdown(["numbers", "method", "knob: pass@4 %"], cells)


def card_table(rows: Sequence[Row]) -> str:
    """Return the table for the model's card: one sample, four samples, d5p4, and d5p4 with `distinct`."""
    cells = []
    for numbers, word in ((4, "four"), (5, "five")):
        named = {row["method"]: row for row in rows if row["numbers"] == numbers and row["guidance"] == 1}
        ways = [named[name] for name in ("independent", "d5p4", "d5p4, distinct")]
        figures = [ways[0]["pass@1"], *(row["pass@4"] for row in ways)]
        cells.append([f"{word} numbers: solved", *(f"{half_width(figure, 1, 100)} %" for figure in figures)])
        different = [half_width(row["distinct_right"], 2) for row in ways]
        cells.append([f"{word} numbers: different right answers", "", *different])
    return markdown(["", "one sample", "any of four samples", "any of four by d5p4", "and with `distinct`"], cells)


def tables(book: Book) -> Tables:
    """Return the tables by name: one for 4 numbers, one for 5 numbers, guidance, the sweeps and the model's card."""
    rows = summary(book.records)
    guided = {row["method"] for row in rows if row["guidance"] != 1}
    compared = [row for row in rows if row["numbers"] == 4 and row["method"] in guided]
    compared.sort(key=lambda row: (row["method"] != "independent", row["guidance"]))
    made: dict[str, Any] = {}
    for numbers in sorted({row["numbers"] for row in rows}):
        chosen = [row for row in rows if row["numbers"] == numbers and row["guidance"] == 1]
        made[str(numbers)] = partial(results_table, chosen)
    if compared:
        made["guidance"] = partial(results_table, compared, guided=True)
    return made | {"sweeps": partial(sweeps_table, book.records), "card": partial(card_table, rows)}


def report(book: Book) -> str:
    """Return Markdown: the origin of the figures, then the tables."""
    parts = [f"Model {book.model}, sha256 {book.weights[:16]}…; k = {K}, w = {W}, temperature 1, confidence order."]
    parts += dict.fromkeys("{date}: {machine}, torch {torch}, {dtype}".format_map(s) for s in book.sessions)
    counts = {record.run["role"]: record.run["problems"] for record in book.records}
    parts.append("; ".join(f"{count} problems to {role}" for role, count in sorted(counts.items())))
    heading = {"guidance": "Guidance, 4 numbers", "sweeps": "Sweeps"}
    for name, table in tables(book).items():
        if name != "card":
            parts += [f"### {heading.get(name, f'{name} numbers')}", table()]
    return "\n\n".join(parts)


def weights_hash(folder: Path) -> str:
    """Return one sha256 of all weight files together, as in the committed results, which have no hash per file."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _words(arguments: Sequence[str]) -> list[str]:
    """Return the words of the command without --out, because --out has no effect on the figures."""
    kept = [word for i, word in enumerate(arguments) if "--out" not in (word, *arguments[max(0, i - 1) : i])]
    return ["bench", "countdown", *(word for word in kept if not word.startswith("--out="))]


def main(arguments: Sequence[str]) -> None:
    began = time.perf_counter()
    parser = make_parser("countdown", __doc__)
    parser.add_argument("--model", default="countdown", help="a shipped name or a folder")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true", help="allow tf32 in float32 matrix products on a GPU")
    parser.add_argument("--problems", type=int, default=1000, help="number of test problems")
    parser.add_argument("--tune", type=int, default=500, help="number of problems for tuning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--numbers", default="4,5", help="counts of numbers per problem, separated by commas")
    parser.add_argument(
        "--methods", help=f"separated by semicolons (default: all): {'; '.join(m.name for m in METHODS)}"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run that would end after this many minutes"
    )
    parser.add_argument("--tokens", type=int, default=None, help="at most this many tokens per forward")
    parser.add_argument("--out", type=Path, default=RESULTS / "countdown.json")
    parser.add_argument("--table", action="store_true", help="only print the tables of --out")
    args = parser.parse_args(arguments)
    book = Book.open(args.out)
    if args.table:
        if not book.records:
            raise d5p4.D5P4Error(f"{args.out} has no results yet: run the benchmark without --table first")
        print(report(book))
        return
    try:
        numbers = [int(part) for part in args.numbers.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not set(numbers) <= set(WINDOW):
        raise d5p4.D5P4Error(
            f"numbers={args.numbers!r} must be some of {', '.join(map(str, WINDOW))}, separated by commas"
        )
    if not 2 <= args.problems <= TESTED or args.tune < 2 or args.seeds < 1:
        raise d5p4.D5P4Error(
            f"problems={args.problems} must be 2 to {TESTED}, tune={args.tune} at least 2, seeds={args.seeds} above 0"
        )

    named = {method.name: method for method in METHODS}
    names = [name.strip() for name in args.methods.split(";")] if args.methods else list(named)
    if unknown := [name for name in names if name not in named]:
        raise d5p4.D5P4Error(f"methods={unknown[0]!r} is not one of {'; '.join(named)}")

    digest = weights_hash(find(args.model))
    if book.weights not in ("", digest):
        raise d5p4.D5P4Error(f"{args.out} has figures of other weights ({book.weights[:16]}…); give another --out")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    model = d5p4.load(args.model, args.device, args.dtype)
    book.model, book.weights = Path(args.model).name, digest
    dtype = f"{model.dtype}".removeprefix("torch.") + (" (tf32)" if args.tf32 else "")
    for earlier in book.sessions:
        if earlier["dtype"] != dtype:
            raise d5p4.D5P4Error(f"{args.out} has figures in {earlier['dtype']}, not {dtype}; give another --out")
    tokens = args.tokens or (TOKENS if model.device.type == "cuda" else 1 << 14)
    session = len(book.sessions)
    book.sessions.append(about(model.device, _words(arguments)) | {"dtype": dtype})
    for n in numbers:  # untimed short runs, because the first run also loads the kernels
        carry_out(Run("test", METHODS[0], n, 8, 0), model, tokens, session)
    print(f"{book.sessions[-1]['machine']}, torch {torch.__version__}, {dtype}", flush=True)

    for run in plan(book, [named[name] for name in names], numbers, args.problems, args.tune, args.seeds):
        finished = book.find(run)
        if finished is not None:
            if finished.settings != resolved(run, model):
                raise d5p4.D5P4Error(
                    f"{args.out} has '{run}' with other settings, {finished.settings}; give another --out"
                )
            continue
        spent = time.perf_counter() - began
        if spent + forecast(run, book, session) > 60 * args.minutes:
            print(f"stopped after {spent:.0f} s: there is no time left for {run}", flush=True)
            break
        record = carry_out(run, model, tokens, session)
        book.records.append(record)
        book.write()
        solved = "/".join(f"{100 * record.solved(n).mean():.1f}" for n in (1, 2, 4))
        different = record.different(canonical=False).mean()
        print(
            f"{time.perf_counter() - began:6.0f} s  {run}: pass@1/2/4 {solved}, {different:.2f} different right, "
            f"{record.rows:.2f} of {record.rows_nominal:g} rows, {record.seconds:.1f} s",
            flush=True,
        )
    print("\n" + report(book))
