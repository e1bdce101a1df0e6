"""Measure the prose of `books` under every reveal rule: judges' perplexity and distinct-2 against forward passes.

    python -m d5p4_lab bench books_rules --device cuda --processes 4 --data val.txt.xz --out books.jsonl
    python -m d5p4_lab bench books_rules --judge judge --judge smollm2 --out books.jsonl
    python -m d5p4_lab bench books_rules --draw --out books.jsonl

The first command continues the first sentences of held-out paragraphs, k = 4 texts of at most 64 tokens per prompt at
temperature 1. The second command lets judges read these texts (see `bench books` for the judges); it needs no --data
and may run on another machine. Both commands add one line per unit to --out as soon as the unit ends, and both continue
after a kill. The third command writes the figures to --results and prints the table.

A judge's figures are those of the continuation alone, given the prompt: nats, tokens and bytes of the prompt with the
text, minus those of the prompt. The adaptive rules need an order by position, so they use `top`; the schedule is shown
with `top` too, beside the model's own order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.eval.perplexity import CausalJudge, Scored
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..paper.tasks import load_task
from ..provenance import about
from ..statistics import interval
from ..timing import wall
from . import RESULTS, Row, generate, half_width, make_parser, markdown, read, write
from .books import distinct_share, figures, plus_minus
from .units import Lines, read_lines, rule_options, run_units

K = W = 4
LENGTH = 64  # tokens per text
METHODS = ("independent", "d5p4")
KINDS = (  # (reveal rule, order, steps)
    *(("schedule", order, steps) for order in ("ancestral", "top") for steps in (64, 32, 16)),
    *((f"threshold {tau:g}", "top", None) for tau in (0.4, 0.7, 0.9, 0.99)),
    *((f"factor {factor:g}", "top", None) for factor in (1.0, 2.0, 3.0)),
    *((f"entropy-bound {bound:g}", "top", None) for bound in (0.2, 1.0, 4.0)),
)
TOKENS = 1 << 17  # a forward on a GPU has at most this many tokens


@dataclass(frozen=True)
class Unit:
    """One call of `generate`, or, with a judge, the reading of its texts."""

    method: str
    rule: str
    order: str
    steps: int | None  # None for adaptive rules
    prompts: int
    seed: int = 0
    judge: str = ""
    judged: int = 0  # the number of prompts whose texts the judge reads

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`."""
        common = {"method": self.method, "k": K, "w": W, "gen_length": LENGTH, "temperature": 1.0, "order": self.order}
        return common | rule_options(self.rule) | ({"steps": self.steps} if self.steps else {})

    def __str__(self) -> str:
        steps = f", {self.steps} steps" if self.steps else ""
        return f"{self.judge or 'decode'}: {self.method}, {self.rule}{steps}, {self.order}"


def plan(lines: Mapping[Unit, Row], prompts: int, decode: bool, judges: Sequence[str], judged: int) -> Iterator[Unit]:
    """Yield the units that decode (if `decode`), then the units that judge what is decoded by now."""
    units = [Unit(method, *kind, prompts) for kind in KINDS for method in METHODS]
    yield from units if decode else ()
    for name in judges:
        yield from (replace(unit, judge=name, judged=judged) for unit in units if unit in lines)


@dataclass
class Session:
    """What a process needs to know."""

    model: str = ""
    device: str | None = None
    dtype: str = ""
    data: Path | None = None
    paths: list[Path] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


session = Session()


def start(given: Session) -> None:
    vars(session).update(vars(given))


@cache
def _model() -> Any:
    return d5p4.load(session.model, session.device, session.dtype)


@cache
def _prompts(count: int) -> list[str]:
    examples = load_task("books", session.data, limit=count).examples
    if len(examples) < count:
        raise d5p4.D5P4Error(f"{session.data} has only {len(examples)} paragraphs to continue, not {count}")
    return [str(example.prompt) for example in examples]


@cache
def _judge(name: str) -> CausalJudge:
    return CausalJudge(name, device=session.device)


def work(unit: Unit) -> Row:
    return read_texts(unit) if unit.judge else decode(unit)


def decode(unit: Unit) -> Row:
    """Continue the prompts. Return the line: the texts [P][k] and the cost per prompt."""
    model, prompts = _model(), _prompts(unit.prompts)
    tokens = TOKENS if model.device.type == "cuda" else 1 << 14
    call = partial(generate, model, prompts, seed=unit.seed, max_tokens_per_forward=tokens, **unit.options())
    result, seconds = wall(call, model.device)
    facts = about(model.device, session.words) | {"dtype": session.dtype, "weights": weights_hash(find(session.model))}
    line: Row = {"about": facts, "seconds": round(seconds, 2), "prompts": prompts, "texts": result.texts}
    line |= {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()}
    line["shown"] = f"{np.mean(line['rows']):.0f} rows in {np.mean(line['nfe']):.1f} passes, {seconds:.1f} s"
    return line


def read_texts(unit: Unit) -> Row:
    """Let a judge read the texts of a unit. Return the line: nats, tokens and bytes of each text, without prompts."""
    line = read_lines(Unit, session.paths)[replace(unit, judge="", judged=0)]
    prompts, judge = line["prompts"][: unit.judged], _judge(unit.judge)
    whole = [prompt + text for prompt, texts in zip(prompts, line["texts"], strict=False) for text in texts]
    counts = [len(texts) for texts in line["texts"][: unit.judged]]
    before = [np.repeat(column, counts) for column in _prompt_scores(unit.judge, tuple(prompts))]
    score = partial(judge.score, whole, max_tokens_per_batch=1 << 12)
    scored, seconds = wall(score, judge.model.device)
    scores = Scored(*(after - start for after, start in zip(scored, before, strict=True)))
    figure = f"perplexity {scores.perplexity:.1f}, {scores.bits_per_byte:.3f} bits per byte, {seconds:.0f} s"
    columns = {name: column.tolist() for name, column in scores._asdict().items()}
    return {"describe": judge.describe, "shown": figure} | columns


@cache
def _prompt_scores(name: str, prompts: tuple[str, ...]) -> Scored:
    return _judge(name).score(prompts, max_tokens_per_batch=1 << 12)


def summary(lines: Mapping[Unit, Row], prompts: int) -> dict[str, Any]:
    """Return the contents of the results file: one row per way to decode, without the texts."""
    rows, units = [], [unit for unit in plan(lines, prompts, True, (), 0) if unit in lines]
    for unit in units:
        line = lines[unit]
        row: Row = {"rule": unit.rule, "steps": unit.steps, "order": unit.order, "method": unit.method}
        costs = {name: line[name] for name in ("nfe", "rows")}
        costs["distinct_2"] = [distinct_share(texts, 2) for texts in line["texts"]]
        row |= {name: [round(x, 4) for x in interval(values)] for name, values in costs.items()}
        row["judges"] = {}
        for other, score in lines.items():
            if other.judge and replace(other, judge="", judged=0) == unit:
                scored = Scored(*(np.array(score[name]) for name in Scored._fields))
                row["judges"][score["describe"]] = figures(scored, together=K)
        rows.append(row)
    origins = {str(lines[unit]["about"]): lines[unit]["about"] for unit in units}
    return {"about": list(origins.values()), "prompts": prompts, "rows": rows}


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    rows = results.get("rows", ())
    judges = list(dict.fromkeys(name for row in rows for name in row["judges"]))
    cells = []
    for row in rows:
        rule = row["rule"] + (f", {row['steps']} steps" if row["steps"] else "")
        scores = [row["judges"].get(name) for name in judges]
        kinds = (("perplexity", 1), ("bits_per_byte", 3))
        quality = [plus_minus(score, *kind) if score else None for score in scores for kind in kinds]
        cost = [half_width(row["nfe"], 1), half_width(row["rows"], 0)]
        cells.append([rule, row["order"], row["method"], *cost, *quality, half_width(row["distinct_2"], 3)])
    names = [name for judge in judges for name in (f"{judge}: perplexity", "bits per byte")]
    return markdown(["rule", "order", "method", "passes", "rows", *names, "distinct-2"], cells)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("books_rules", __doc__)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="books")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, help="held-out books: a text file, or a folder of `d5p4_lab train corpus`")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--judge", action="append", default=[], help="a judge: folder, hub id, .gguf file, or smollm2")
    parser.add_argument("--judged", type=int, help="the number of prompts whose texts the judges read [all]")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--out", type=Path, action="append", required=True, help="file of lines; --draw takes several")
    parser.add_argument("--draw", action="store_true", help="compute the figures of --out and write --results")
    parser.add_argument("--results", type=Path, default=RESULTS / "books_rules.json")
    args = parser.parse_args(arguments)
    lines: Lines[Unit] = read_lines(Unit, args.out)
    if args.draw:
        write(args.results, summary(lines, args.prompts))
        print(table(read(args.results)))
        return
    if args.data is None and not args.judge:
        raise d5p4.D5P4Error(
            "give held-out books to continue with --data, or judges of the texts in --out with --judge"
        )
    command = ["bench", "books_rules", "--prompts", str(args.prompts)]
    given = Session(args.model, args.device, args.dtype, args.data, args.out, command)
    judged = args.judged or args.prompts

    def wanted(finished: Mapping[Unit, Row]) -> Iterator[Unit]:
        return plan(finished, args.prompts, args.data is not None, args.judge, judged)

    run_units(args.out[0], lines, wanted, work, start, (given,), args.processes, args.minutes)
