"""How many held-out countdown problems each method solves with k = 4 answers, and how many different right answers.

    python -m d5p4_lab bench countdown --model countdown --device cuda
    python -m d5p4_lab bench countdown --table

A method's knob is swept on problems of their own (`--tune` of them, one seed); the value with the best pass@4 goes to
the test problems. Independent sampling, best-of-16 and greedy-beam have no knob besides the temperature, which is 1 for
all. pass@1 is the mean over the k answers; "first answer" is the one with the best score. The JSON file is written
after every run, and runs it already holds are not repeated: a killed benchmark goes on where it was. `--table` prints
the Markdown tables from that file alone.
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
from d5p4.models.load import find

from ..provenance import about
from ..statistics import Interval, interval, relative_cut
from ..timing import wall
from . import RESULTS, Row, Tables, generate, half_width, make_parser, markdown, read, write

K, W = 4, 4
BETAS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TEST_SEED, TUNE_SEED = 0, 1  # of the problems
TESTED = 1000  # the most test problems; sweeps keep away from all of them
GUIDANCE = (1.5, 2.0)
TOKENS = 1 << 17  # a forward on a GPU; `generate` takes as many prompts at once as eight of them hold


@dataclass(frozen=True)
class Method:
    """A method as it is compared: options of `d5p4.generate`, and the knob to sweep if it has one."""

    name: str
    options: Mapping[str, Any]
    knob: str | None = None
    values: tuple[float, ...] = ()
    main: bool = True  # the others are controls and run last
    guided: bool = False  # also run with guidance, at 4 numbers


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
    # e^(Q/beta): a small beta asks for quality, and from 100 on there is only diversity
    Method("d5p4x", {"method": "d5p4x"}, "beta", (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), main=False),
)


@dataclass(frozen=True)
class Run:
    """One call of `generate`: a method on all problems of a set, with one seed."""

    role: str  # "tune" or "test"
    method: Method
    numbers: int
    problems: int
    seed: int
    value: float | None = None  # of the knob
    guidance: float = 1.0

    def identity(self) -> dict[str, Any]:
        """What the run is called in the file."""
        return {
            "role": self.role, "method": self.method.name, "numbers": self.numbers, "problems": self.problems,
            "seed": self.seed, "knob": self.method.knob, "value": self.value, "guidance": self.guidance,
        }  # fmt: skip

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `d5p4.generate`: one token a step."""
        window = WINDOW[self.numbers]
        fixed: dict[str, Any] = dict(
            k=K, w=W, gen_length=window, steps=window, block_length=window, temperature=1.0, order="confidence",
            distinct=False, guidance=self.guidance,
        )  # fmt: skip
        return fixed | dict(self.method.options) | ({self.method.knob: self.value} if self.method.knob else {})

    def __str__(self) -> str:
        knob = "" if self.method.knob is None else f", {self.method.knob} {self.value:g}"
        guidance = "" if self.guidance == 1 else f", guidance {self.guidance:g}"
        return f"{self.role} {self.numbers} numbers: {self.method.name}{knob}{guidance}, seed {self.seed}"


@cache
def cases(role: str, count: int, numbers: int) -> list[Problem]:
    """The problems of a run; those to tune on are never among the first TESTED test problems."""
    if role == "test":
        return problems(count, numbers, TEST_SEED)

    def key(problem: Problem) -> tuple[int, ...]:
        return *sorted(problem.numbers), problem.target

    test = {key(problem) for problem in problems(TESTED, numbers, TEST_SEED)}
    return [problem for problem in problems(2 * count, numbers, TUNE_SEED) if key(problem) not in test][:count]


@dataclass
class Record:
    """What a run left: one character a problem in each text, so that the file stays small."""

    run: dict[str, Any]  # Run.identity
    settings: dict[str, Any]  # resolved settings that are not the library's defaults
    session: int  # which entry of the file's `sessions` ran it
    right: str  # hexadecimal digit: bit i is set when answer i is right
    distinct: str  # letter 5 t + f of a..y: t different right texts, f of them when operand and step order do not count
    rows: float  # rows run, a problem and step
    rows_nominal: float
    seconds: float

    def right_answers(self) -> np.ndarray:
        """bool [P, k]."""
        digits = np.array([int(digit, 16) for digit in self.right])
        return (digits[:, None] >> np.arange(K) & 1).astype(bool)

    def solved(self, n: int) -> np.ndarray:
        """pass@n of each problem [P]."""
        return pass_at(self.right_answers(), n)

    def first(self) -> np.ndarray:
        """Whether the answer with the best score is right [P]."""
        return self.right_answers()[:, 0].astype(float)

    def different(self, canonical: bool) -> np.ndarray:
        """Different right answers of each problem [P]."""
        letters = np.array([ord(letter) - ord("a") for letter in self.distinct])
        return letters % (K + 1) if canonical else letters // (K + 1)


@dataclass
class Book:
    """The results file."""

    path: Path
    model: str = ""
    weights: str = ""  # sha256 of the weight files, one after another
    sessions: list[dict[str, str]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @staticmethod
    def open(path: Path) -> Book:
        held = read(path)
        if not held:
            return Book(path)
        try:
            records = [Record(**record) for record in held["records"]]
            return Book(path, held["model"], held["weights"], held["sessions"], records)
        except (KeyError, TypeError) as reason:
            raise d5p4.D5P4Error(f"{path} is not a results file of this benchmark ({reason})") from reason

    def find(self, run: Run) -> Record | None:
        wanted = run.identity()
        return next((record for record in self.records if record.run == wanted), None)

    def write(self) -> None:
        held = {
            "model": self.model, "weights": self.weights, "sessions": self.sessions, "summary": summary(self.records),
            "records": [asdict(record) for record in self.records],
        }  # fmt: skip
        lines = ",\n".join(f'"{name}": {_one_a_line(value)}' for name, value in held.items())
        write(self.path, f"{{\n{lines}\n}}\n")

    def best(self, method: Method, numbers: int, count: int) -> float | None:
        """The knob's value with the best pass@4 in a sweep that is complete; the smallest among equals."""
        if method.knob is None:
            return None
        found = [self.find(run) for run in sweep(method, numbers, count)]
        scores = {record.run["value"]: record.solved(K).mean() for record in found if record is not None}
        if len(scores) < len(method.values):
            raise d5p4.D5P4Error(f"the sweep of {method.name} at {numbers} numbers is not complete")
        return max(sorted(scores), key=scores.__getitem__)


def _one_a_line(value: Any) -> str:
    """JSON in which a list has an entry a line."""
    entries = [json.dumps(entry) for entry in value] if isinstance(value, list) else []
    return "[\n" + ",\n".join(entries) + "\n]" if entries else json.dumps(value)


def sweep(method: Method, numbers: int, count: int) -> list[Run]:
    return [Run("tune", method, numbers, count, 0, value) for value in method.values]


def plan(
    book: Book, chosen: Sequence[Method], numbers: Sequence[int], count: int, tune: int, seeds: int
) -> Iterator[Run]:
    """Runs in order of importance: each method's sweep before its test, guidance and controls last.

    A sweep's result is read from the book when the test begins, so runs must be carried out as they come.
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
    """The settings of a run, the model's own defaults among them, that are not the library's."""
    plain, settings = d5p4.Settings().to_dict(), d5p4.Settings.make(model, **run.options()).to_dict()
    return {name: value for name, value in settings.items() if value != plain[name]}


def judge(asked: Sequence[Problem], texts: Sequence[Sequence[str]]) -> tuple[str, str]:
    """`right` and `distinct` of a record, from the k answers [P][k] to each problem."""
    right, distinct = "", ""
    for problem, answers in zip(asked, texts, strict=True):
        marks = [is_right(problem, answer) for answer in answers]
        found = {answer for answer, mark in zip(answers, marks, strict=True) if mark}
        right += f"{sum(mark << i for i, mark in enumerate(marks)):x}"
        distinct += chr(ord("a") + (K + 1) * len(found) + len(set(map(canonical, found))))
    return right, distinct


def carry_out(run: Run, model: d5p4.Model, tokens: int, session: int) -> Record:
    asked = cases(run.role, run.problems, run.numbers)
    prompts = [problem.prompt for problem in asked]
    decode = partial(generate, model, prompts, seed=run.seed, max_tokens_per_forward=tokens, **run.options())
    result, seconds = wall(decode, model.head.weight.device)
    share = len(asked) * WINDOW[run.numbers]
    rows, nominal = int(result.rows.sum()) / share, int(result.rows_nominal.sum()) / share
    return Record(
        run.identity(), resolved(run, model), session, *judge(asked, result.texts),
        round(rows, 3), round(nominal, 3), round(seconds, 2),
    )  # fmt: skip


def forecast(run: Run, book: Book, session: int) -> float:
    """Seconds a run will take, judged by this session's slowest of the same method, or twice the slowest of all."""

    def cost(run: Mapping[str, Any]) -> int:
        return run["problems"] * WINDOW[run["numbers"]] ** 2  # steps, and tokens of a row

    wanted = run.identity()
    mine = [record for record in book.records if record.session == session]
    same = [r for r in mine if all(r.run[name] == wanted[name] for name in ("method", "guidance"))]
    rate = max((r.seconds / cost(r.run) for r in same or mine), default=0.0)
    return rate * cost(wanted) * (1 if same else 2)


@cache
def _cut(base: bytes, other: bytes) -> Interval:
    """`relative_cut` of float64 [P]; its bootstrap would otherwise be done again at every writing of the file."""
    return relative_cut(np.frombuffer(base), np.frombuffer(other))


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The figures of every method tested, seeds together: [mean, low, high] of a 95 % interval over problems."""
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
        rows.append(
            {
                "numbers": numbers, "method": name, "guidance": guidance, "knob": group[0].run["knob"],
                "value": value, "problems": count, "seeds": len(group), "session": group[-1].session,
            }
            | {key: [round(float(x), 5) for x in figure] for key, figure in figures.items()}
            | {
                "rows": round(float(np.mean([r.rows for r in group])), 3),
                "rows_nominal": round(float(np.mean([r.rows_nominal for r in group])), 3),
                "seconds": round(float(np.mean([r.seconds for r in group])), 1),
            }
        )  # fmt: skip
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
        cells.append([
            name, half_width(row["first"], 1, 100), *(half_width(row[f"pass@{n}"], 1, 100) for n in (1, 2, 4)),
            None if cut is None else f"{100 * cut[0]:.0f} [{100 * cut[1]:.0f}, {100 * cut[2]:.0f}]",
            half_width(row["distinct_right"], 2), half_width(row["distinct_forms"], 2), f"{row['rows']:.2f}",
            f"{row['rows_nominal']:g}",
        ])  # fmt: skip
    header = ["method", "first answer %", "pass@1 %", "pass@2 %", "pass@4 %", "unsolved at 4, cut %",
              "different right", "canonical", "rows a step", "nominal"]  # fmt: skip
    return markdown(header, cells)


def sweeps_table(records: Sequence[Record]) -> str:
    """pass@4 by value of the knob, the best in bold."""
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
    """What the model's card says: one sample, four samples, four by d5p4 and with `distinct`."""
    cells = []
    for numbers, word in ((4, "four"), (5, "five")):
        named = {row["method"]: row for row in rows if row["numbers"] == numbers and row["guidance"] == 1}
        ways = [named[name] for name in ("independent", "d5p4", "d5p4, distinct")]
        figures = [ways[0]["pass@1"], *(row["pass@4"] for row in ways)]
        cells.append([f"{word} numbers: solved", *(f"{half_width(figure, 1, 100)} %" for figure in figures)])
        cells.append([f"{word} numbers: different right answers", "",
                      *(half_width(row["distinct_right"], 2) for row in ways)])  # fmt: skip
    return markdown(["", "one sample", "any of four samples", "any of four by d5p4", "and with `distinct`"], cells)


def tables(book: Book) -> Tables:
    """One table for each count of numbers, one for guidance, one for the sweeps, one for the model's card."""
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
    """Markdown: where the figures come from, and the tables."""
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
    """sha256 of the weight files' bytes, as in files already written; `d5p4.provenance` joins a digest of each."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _words(given: Sequence[str]) -> list[str]:
    """The command without the place of its output, which says nothing about the figures."""
    kept = [word for i, word in enumerate(given) if "--out" not in (word, *given[max(0, i - 1) : i])]
    return ["bench", "countdown", *(word for word in kept if not word.startswith("--out="))]


def main(arguments: Sequence[str]) -> None:
    began = time.perf_counter()
    parser = make_parser("countdown", __doc__)
    parser.add_argument("--model", default="countdown", help="a shipped name or a folder")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true", help="let float32 products use a GPU's tf32")
    parser.add_argument("--problems", type=int, default=1000, help="test problems")
    parser.add_argument("--tune", type=int, default=500, help="problems of a sweep")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--numbers", default="4,5", help="how many numbers a problem has, with commas between")
    parser.add_argument("--methods", help=f"some of {'; '.join(m.name for m in METHODS)}, semicolons between (all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument("--tokens", type=int, default=None, help="tokens of one forward")
    parser.add_argument("--out", type=Path, default=RESULTS / "countdown.json")
    parser.add_argument("--table", action="store_true", help="only print the tables of --out")
    args = parser.parse_args(arguments)
    book = Book.open(args.out)
    if args.table:
        if not book.records:
            raise d5p4.D5P4Error(f"{args.out} holds no results yet")
        print(report(book))
        return
    try:
        numbers = [int(part) for part in args.numbers.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not set(numbers) <= set(WINDOW):
        raise d5p4.D5P4Error(f"numbers={args.numbers!r} must be some of {', '.join(map(str, WINDOW))}, commas between")
    if not 2 <= args.problems <= TESTED or args.tune < 2 or args.seeds < 1:
        raise d5p4.D5P4Error(
            f"{args.problems} problems, {args.tune} to tune on and {args.seeds} seeds: 2, 2 and 1 are the least, and "
            f"{TESTED} problems the most"
        )

    named = {method.name: method for method in METHODS}
    names = [name.strip() for name in args.methods.split(";")] if args.methods else list(named)
    if unknown := [name for name in names if name not in named]:
        raise d5p4.D5P4Error(f"methods={unknown[0]!r} is not one of {'; '.join(named)}")

    digest = weights_hash(find(args.model))
    if book.weights not in ("", digest):
        raise d5p4.D5P4Error(f"{args.out} holds figures of other weights ({book.weights[:16]}…); give another --out")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    model = d5p4.load(args.model, args.device, args.dtype)
    book.model, book.weights = Path(args.model).name, digest
    dtype = f"{model.dtype}".removeprefix("torch.") + (" (tf32)" if args.tf32 else "")
    for earlier in book.sessions:
        if earlier["dtype"] != dtype:
            raise d5p4.D5P4Error(f"{args.out} holds figures in {earlier['dtype']}, not {dtype}; give another --out")
    tokens = args.tokens or (TOKENS if model.device.type == "cuda" else 1 << 14)
    session = len(book.sessions)
    book.sessions.append(about(model.device, _words(arguments)) | {"dtype": dtype})
    for n in numbers:  # kernels are loaded before anything is timed
        carry_out(Run("test", METHODS[0], n, 8, 0), model, tokens, session)
    print(f"{book.sessions[-1]['machine']}, torch {torch.__version__}, {dtype}", flush=True)

    for run in plan(book, [named[name] for name in names], numbers, args.problems, args.tune, args.seeds):
        held = book.find(run)
        if held is not None:
            if held.settings != resolved(run, model):
                raise d5p4.D5P4Error(f"{args.out} holds '{run}' with settings {held.settings}; give another --out")
            continue
        spent = time.perf_counter() - began
        if spent + forecast(run, book, session) > 60 * args.minutes:
            print(f"stopped after {spent:.0f} s: no time for {run}", flush=True)
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
