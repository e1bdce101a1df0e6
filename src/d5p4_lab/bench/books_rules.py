"""Measure the prose of `books`: judges' perplexity, distinct-2 and repetition of every way to decode, and its cost.

    python -m d5p4_lab bench books_rules --device cuda --processes 4 --data val.txt.xz --out books.jsonl
    python -m d5p4_lab bench books_rules --judge judge --judge smollm2 --out books.jsonl
    python -m d5p4_lab bench books_rules --draw --out books.jsonl

The first command continues the first sentences of held-out paragraphs, k = 4 texts of at most 64 tokens per prompt. The
second command lets judges read these texts (see `bench books` for the judges); it needs no --data and may run on
another machine. Both commands add one line per unit to --out as soon as the unit ends, and both continue after a kill.
The third command writes the figures to --results and prints the tables; a stage without lines keeps its figures.

The stages, the most important units first:
prose   the tree, independent sampling and d5p4, one token per step: by temperature, order, diversity and spare beams
length  the tree with texts of 64, 128 and 256 tokens, by diversity. No judge reads them. 256 tokens are all that the
        model takes, so these texts have no prompt, and at temperature 0 all sets are equal
rules   independent sampling and d5p4 at temperature 1 under every reveal rule. The adaptive rules need an order by
        position, so they use `top`; the schedule is shown with `top` too, beside the model's own order

A judge's figures are those of the continuation alone, given the prompt: nats, tokens and bytes of the prompt with the
text, minus those of the prompt.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import d5p4
from d5p4.models.load import find
from d5p4.provenance import weights_hash

from ..paper.tasks import load_task
from ..provenance import about
from ..scoring.perplexity import CausalJudge, Scored
from ..statistics import from_resamples, interval, resampled_means
from ..timing import wall
from . import RESULTS, Row, Tables, chosen, generate, half_width, make_parser, markdown, read, write
from .books import distinct_share, figures, plus_minus
from .countdown import spread
from .units import Lines, read_lines, rule_options, run_units

K = W = 4
LENGTH = 64  # tokens per text
STAGES = ("prose", "length", "rules")
KINDS = (  # (reveal rule, order, steps)
    *(("schedule", order, steps) for order in ("ancestral", "top") for steps in (64, 32, 16)),
    *((f"threshold {tau:g}", "top", None) for tau in (0.4, 0.7, 0.9, 0.99)),
    *((f"factor {factor:g}", "top", None) for factor in (1.0, 2.0, 3.0)),
    *((f"entropy-bound {bound:g}", "top", None) for bound in (0.2, 1.0, 4.0)),
)
HEATS = (1.0, 0.7, 0.5, 1.2, 0.3, 0.0)
ORDERS = ("top", "left", "random")
KNOBS = {"d5p4": "beta", "tree": "diversity"}
LENGTHS = (64, 128, 256)
TOKENS = 1 << 17  # a forward on a GPU has at most this many tokens


@dataclass(frozen=True)
class Unit:
    """One call of `generate`, or, with a judge, the reading of its texts."""

    stage: str
    method: str
    rule: str
    order: str
    steps: int | None  # None for adaptive rules
    prompts: int
    temperature: float = 1.0
    knob: float | None = None  # the method's parameter of KNOBS; None is its default
    spare: int = 0
    length: int = LENGTH
    seed: int = 0
    judge: str = ""
    judged: int = 0  # the number of prompts whose texts the judge reads

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `d5p4.generate`."""
        options = {"method": self.method, "k": K, "spare": self.spare, "gen_length": self.length, "order": self.order}
        options |= {"temperature": self.temperature, "logprobs": True}
        options |= {"w": W} if self.method == "d5p4" else {}
        options |= {KNOBS[self.method]: self.knob} if self.knob is not None else {}
        return options | rule_options(self.rule) | ({"steps": self.steps} if self.steps else {})

    def __str__(self) -> str:
        steps = f", {self.steps} steps" if self.steps else ""
        return f"{self.judge or 'decode'}: {self.method}, {self.rule}{steps}, {setting(vars(self))}"


def setting(unit: Mapping[str, Any]) -> str:
    """Return the order, the temperature, the knob and the spare beams of a unit, given its fields."""
    knob = f"{KNOBS[unit['method']]} {unit['knob']:g}" if unit["knob"] is not None else ""
    parts = [unit["order"], f"T {unit['temperature']:g}", knob, f"spare {unit['spare']}" if unit["spare"] else ""]
    return ", ".join(filter(None, parts))


def units_of(stage: str, prompts: int) -> Iterator[Unit]:
    """Yield the units of a stage that decode."""
    one_by_one = Unit(stage, "tree", "schedule", "top", LENGTH, prompts, length=LENGTH)
    if stage == "rules":
        for (rule, order, steps), method in itertools.product(KINDS, ("independent", "d5p4")):
            yield replace(one_by_one, method=method, rule=rule, order=order, steps=steps)
        return
    if stage == "length":
        few = max(2, prompts // 4)
        for heat, value, size in itertools.product((1.0, 0.0), (0.0, 0.5, 1.0, 2.0, 4.0), LENGTHS):
            yield replace(one_by_one, prompts=few, temperature=heat, knob=value, spare=K, length=size, steps=size)
        return
    for heat, order, value in itertools.product(HEATS, ORDERS, (0.0, 1.0)):
        yield replace(one_by_one, temperature=heat, order=order, knob=value)
        if heat and not value:
            yield replace(one_by_one, method="independent", temperature=heat, order=order)
        if order == "top":
            yield replace(one_by_one, temperature=heat, order=order, knob=value, spare=K)
    for order in ORDERS:  # the tree repeats less than samples do, so a higher temperature is needed to compare
        yield replace(one_by_one, method="independent", temperature=1.5, order=order)
    for heat in (1.0, 0.85, 0.7):
        yield replace(one_by_one, method="independent", temperature=heat, order="ancestral")
        for value in (20.0, 100.0):
            yield replace(one_by_one, method="d5p4", temperature=heat, order="ancestral", knob=value)


def plan(
    lines: Mapping[Unit, Row], prompts: int, stages: Sequence[str], judges: Sequence[str], judged: int
) -> Iterator[Unit]:
    """Yield the units of the stages that decode, then the units that judge what is decoded by now."""
    for stage in stages:
        yield from units_of(stage, prompts)
    for name in judges:
        for unit in lines:
            if not unit.judge and unit.stage != "length":
                yield replace(unit, judge=name, judged=judged)


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


def decode(unit: Any) -> Row:
    """Write the texts. Return the line: the texts [P][k or fewer] and the cost per prompt.

    Here and in `read_texts`, other benchmarks may give their own units, with the names that are used here.
    """
    model = _model()
    tokens = TOKENS if model.device.type == "cuda" else 1 << 14
    given: Row = {"prompts": _prompts(unit.prompts)} if unit.length < model.max_length else {"sets": unit.prompts}
    call = partial(generate, model, seed=unit.seed, max_tokens_per_forward=tokens, **given, **unit.options())
    result, seconds = wall(call, model.device)
    facts = about(model.device, session.words) | {"dtype": session.dtype, "weights": weights_hash(find(session.model))}
    line: Row = {"about": facts, "seconds": round(seconds, 2), "prompts": given.get("prompts"), "texts": result.texts}
    line |= {"rows": result.rows.tolist(), "nfe": result.nfe.tolist()} | spread(result)
    line["shown"] = f"{np.mean(line['rows']):.0f} rows in {np.mean(line['nfe']):.1f} passes, {seconds:.1f} s"
    return line


def read_texts(unit: Any) -> Row:
    """Let a judge read the texts of a unit. Return the line: nats, tokens and bytes per prompt, without the prompt."""
    line = read_lines(type(unit), session.paths)[replace(unit, judge="", judged=0)]
    prompts, judge, sets = line["prompts"][: unit.judged], _judge(unit.judge), line["texts"][: unit.judged]
    whole = [prompt + text for prompt, texts in zip(prompts, sets, strict=True) for text in texts]
    counts = [len(texts) for texts in sets]
    score = partial(judge.score, whole, max_tokens_per_batch=1 << 12)
    scored, seconds = wall(score, judge.model.device)
    before = _prompt_scores(unit.judge, tuple(prompts))
    starts = np.cumsum([0, *counts[:-1]])
    sums = Scored(*(np.add.reduceat(a, starts) - b * counts for a, b in zip(scored, before, strict=True)))
    figure = f"perplexity {sums.perplexity:.1f}, {sums.bits_per_byte:.3f} bits per byte, {seconds:.0f} s"
    return {"describe": judge.describe, "shown": figure} | {name: x.tolist() for name, x in sums._asdict().items()}


@cache
def _prompt_scores(name: str, prompts: tuple[str, ...]) -> Scored:
    return _judge(name).score(prompts, max_tokens_per_batch=1 << 12)


def _distinct(texts: Sequence[str]) -> float:
    """Return the share of different bigrams of words; texts without bigrams repeat none."""
    return distinct_share(texts, 2) if any(len(text.split()) > 1 for text in texts) else 1.0


def measures(line: Row) -> dict[str, list[float]]:
    """Return the measures of a unit per prompt. Repetition is the share of bigrams that a text has already used."""
    texts = line["texts"]
    kinds = {"distinct_2": [_distinct(answers) for answers in texts]}
    kinds["repetition"] = [1 - float(np.mean([_distinct([text]) for text in answers])) for answers in texts]
    kinds["four"] = [float(len(set(answers)) == K) for answers in texts]
    return {"nfe": line["nfe"], "rows": line["rows"]} | kinds


def summary(lines: Mapping[Unit, Row]) -> dict[str, Any]:
    """Return the contents of the results file: one row per way to decode, without the texts."""
    units = [unit for unit in lines if not unit.judge]
    rows, curves = [], {unit: _curve(lines, unit) for unit in units}
    for unit in units:
        row = {name: value for name, value in vars(unit).items() if name not in ("seed", "judge", "judged")}
        row |= {name: [round(x, 4) for x in interval(values)] for name, values in measures(lines[unit]).items()}
        row |= {name: lines[unit][name] for name in ("spread", "logdet")} | {"judges": {}}
        for other, score in lines.items():
            if other.judge and replace(other, judge="", judged=0) == unit:
                scored = Scored(*(np.array(score[name]) for name in Scored._fields))
                row["judges"][score["describe"]] = figures(scored, together=1)
        if unit.stage == "prose" and unit.method != "independent":
            plain = replace(unit, method="independent", knob=None, spare=0)
            sampled = [curves[other] for other in units if replace(other, temperature=unit.temperature) == plain]
            row["gain"] = at_equal_distinct(curves[unit], sampled)
        rows.append(row)
    origins = {str(lines[unit]["about"]): lines[unit]["about"] for unit in units}
    return {"about": list(origins.values()), "rows": rows}


def _curve(lines: Mapping[Unit, Row], unit: Unit) -> np.ndarray | None:
    """Return distinct-2, nats and bytes of a unit's texts [P, 3] by the first judge that has read all of them."""
    for other, score in lines.items():
        if other.judge and other.judged == unit.prompts and replace(other, judge="", judged=0) == unit:
            return np.stack([measures(lines[unit])["distinct_2"], score["nats"], score["bytes"]], 1)
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


def tables(results: Mapping[str, Any]) -> Tables:
    stages = {stage: [row for row in results.get("rows", ()) if row["stage"] == stage] for stage in STAGES}
    return {"rules": partial(rules_table, stages["rules"])} | {
        name: partial(prose_table, stages[name]) for name in ("prose", "length")
    }


def rules_table(rows: Sequence[Row]) -> str:
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


def _place(row: Row) -> tuple[Any, ...]:
    return row["method"], row["order"], row["spare"], row["knob"] or 0, row["temperature"], row["length"]


def prose_table(rows: Sequence[Row]) -> str:
    """Return the table of the stage `prose`, with the bits per byte under each judge, or of the stage `length`."""
    if not rows:
        return "not measured yet"
    judges = list(dict.fromkeys(name for row in rows for name in row["judges"]))
    cells = []
    for row in sorted(rows, key=_place):
        scores = [row["judges"].get(name) for name in judges]
        quality = [plus_minus(score, "bits_per_byte", 3) if score else None for score in scores]
        quality += [half_width(row["gain"], 3) if row.get("gain") else None] if judges else []
        texts = [half_width(row[name], 3) for name in ("distinct_2", "repetition")]
        texts += [half_width(row["four"], 1, 100), row["spread"], row["logdet"]]
        costs = [half_width(row["rows"], 0), half_width(row["nfe"], 1)]
        cells.append([row["method"], setting(row), row["length"], *quality, *texts, *costs])
    names = [*(f"{judge}: bits per byte" for judge in judges), *(["against independent"] if judges else [])]
    measured = ["distinct-2", "repetition", "four texts %", "spread of l", "log det S", "rows", "passes"]
    return markdown(["method", "setting", "tokens", *names, *measured], cells)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("books_rules", __doc__)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="books")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, help="held-out books: a text file, or a folder of `d5p4_lab train corpus`")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to decode, separated by commas [all]")
    parser.add_argument("--judge", action="append", default=[], help="a judge: folder, hub id, .gguf file, or smollm2")
    parser.add_argument("--judged", type=int, help="the number of prompts whose texts the judges read [all]")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no unit after this many minutes")
    parser.add_argument("--out", type=Path, action="append", required=True, help="file of lines; --draw takes several")
    parser.add_argument("--draw", action="store_true", help="compute the figures of --out and write --results")
    parser.add_argument("--results", type=Path, default=RESULTS / "books_rules.json.xz")
    args = parser.parse_args(arguments)
    stages = chosen(args.stages, STAGES, "stage")
    lines: Lines[Unit] = read_lines(Unit, args.out)
    if args.draw:
        results, last = summary(lines), read(args.results)
        measured = {row["stage"] for row in results["rows"]}
        results["rows"] += [row for row in last.get("rows", ()) if row["stage"] not in measured]
        results["about"] += [origin for origin in last.get("about", ()) if origin not in results["about"]]
        write(args.results, results)
        print("\n\n".join(f"### {name}\n{table()}" for name, table in tables(results).items()))
        return
    if args.data is None and not args.judge:
        raise d5p4.D5P4Error(
            "give held-out books to continue with --data, or judges of the texts in --out with --judge"
        )
    command = ["bench", "books_rules", "--prompts", str(args.prompts)]
    given = Session(args.model, args.device, args.dtype, args.data, args.out, command)
    judged = args.judged or args.prompts

    def wanted(finished: Mapping[Unit, Row]) -> Iterator[Unit]:
        return plan(finished, args.prompts, stages if args.data else (), args.judge, judged)

    run_units(args.out[0], lines, wanted, work, start, (given,), args.processes, args.minutes)
