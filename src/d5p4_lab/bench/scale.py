"""Measure the speed of many prompts: rows per second by batch size, whole files, equal rows.

    python -m d5p4_lab bench scale [--sections rows,batching,...] [--out FILE]
    python -m d5p4_lab bench scale --device cpu --small --out out/scale-small.jsonl

Several runs of this program can add sections to the same file. A time is the best of a
few repeats after a warm-up. Memory is the allocator's peak, including the weights, in GB of 10^9 bytes.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import d5p4
from d5p4.eval.countdown import WINDOW

from ..puzzles import problems
from ..tables import Row, Tables
from ..timing import fastest
from . import generate, rows_of, sections, show
from .random_models import CONFIG, TINY, random_model

NUMBERS = 4  # per puzzle
OPENINGS = ["It was a dark night", "The old man", "When they came to the river", "She looked at him and"]
WHOLE = 1 << 24  # a budget of this many tokens per forward never divides a batch
COLD = 0.03  # at this low temperature the model with random weights draws many equal rows


@dataclass(frozen=True)
class Plan:
    """The sizes that are measured."""

    shape: Mapping[str, Any] = field(default_factory=lambda: CONFIG)  # the shape of the large model
    prompt: int = 128  # each prompt of the large model has this many tokens
    answer: int = 128
    steps: int = 8  # each decode of the large model takes this many steps
    puzzles: tuple[int, ...] = tuple(2**i for i in range(11))  # numbers of puzzles per batch
    large: tuple[int, ...] = (1, 2, 4, 8)
    file: int = 1024  # puzzles per file
    alone: int = 64  # the number of puzzles that are also decoded one at a time
    shares: int = 64  # the number of puzzles on which the share of distinct rows is measured
    texts: int = 8  # the number of texts on which the share of distinct rows is measured
    repeats: int = 2
    window: int = WINDOW[NUMBERS]  # tokens of a puzzle's answer
    pool: tuple[int, int] = (16, 4)  # k and w of the pools whose share of distinct rows is measured
    text_length: int = 192  # a row of `books` may have at most 256 tokens


SMALL = Plan(
    TINY,
    4,
    8,
    4,
    puzzles=(1, 2),
    large=(1, 2),
    file=6,
    alone=2,
    shares=2,
    texts=1,
    repeats=1,
    window=6,
    pool=(2, 2),
    text_length=8,
)


class Bench(sections.Bench):
    """Loads the models on first use, and decodes prompts with them."""

    plan: Plan

    @cached_property
    def countdown(self) -> Any:
        return d5p4.load("countdown", self.device)

    @cached_property
    def large(self) -> Any:
        """A model of LLaDA-8B's shape with random weights."""
        return random_model(self.plan.shape, self.device, self.dtype)

    def forget(self) -> None:
        """Free the large model's memory."""
        self.__dict__.pop("large", None)
        self.free()

    def decode(self, what: str, model: Any, prompts: Sequence[Any], repeats: int | None = None, **options: Any) -> Row:
        """Decode prompts with `generate`. Return the rates, the share of distinct rows and the peak memory."""
        call = partial(generate, model, list(prompts), seed=0, **options)
        self.free()  # only once, not before every repeat, because a long run does not free its memory either
        result, seconds = fastest(call, self.device, repeats or self.plan.repeats)
        rows, nominal = int(result.rows.sum()), int(result.rows_nominal.sum())
        row: Row = {"what": what, "prompts": len(prompts), "seconds": seconds}
        row |= {"prompts_per_s": len(prompts) / seconds, "rows_per_s": rows / seconds}
        row |= {"distinct_share": rows / nominal, "steps": int(result.nfe[0])}
        if self.cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return row

    def puzzles(self, count: int) -> list[str]:
        return [problem.prompt for problem in problems(count, NUMBERS)]

    def ids(self, count: int) -> list[list[int]]:
        """Return `count` different prompts of token ids for the large model."""
        most = self.plan.shape["vocab_size"] // 2
        return [[(7 * i + 13 * number) % most for i in range(self.plan.prompt)] for number in range(count)]

    @property
    def puzzle(self) -> dict[str, Any]:
        """The options of `generate` for a puzzle. One token is revealed per step."""
        return dict(method="d5p4", k=4, w=4, gen_length=self.plan.window, steps=self.plan.window)

    @property
    def answer(self) -> dict[str, Any]:
        return dict(k=4, w=4, gen_length=self.plan.answer, steps=self.plan.steps)


def rows(bench: Bench) -> list[Row]:
    """Measure rows and prompts per second for different numbers of prompts decoded together. A step is one forward."""
    plan, measured = bench.plan, []
    cases: list[tuple[str, str, Callable[[int], list[Any]], tuple[int, ...], dict[str, Any]]] = [
        ("countdown", "countdown", bench.puzzles, plan.puzzles, bench.puzzle),
        ("8B, rows differ", "large", bench.ids, plan.large, bench.answer),
        (f"8B, temperature {COLD:g}", "large", bench.ids, plan.large, bench.answer | {"temperature": COLD}),
    ]
    for what, name, prompts, counts, options in cases:
        model = getattr(bench, name)  # loads the model before the measurement, so that its memory is counted
        bench.decode(what, model, prompts(1), 1, **options)  # warm up
        alone = None
        for count in counts:
            row = bench.decode(what, model, prompts(count), max_tokens_per_forward=WHOLE, **options)
            alone = alone or row["rows_per_s"]  # gains compare rows, because prompts need different numbers of rows
            measured.append(show(row | {"gain": row["rows_per_s"] / alone}))
    return measured


def batching(bench: Bench) -> list[Row]:
    """Measure `run_file` on files of puzzles, in batches limited by a token budget, against one prompt at a time."""
    plan, model, puzzles = bench.plan, bench.countdown, bench.puzzles(bench.plan.file)
    first = puzzles[: plan.alone]
    bench.decode("warm-up", model, first[:2], 1, **bench.puzzle)

    def one_by_one() -> list[d5p4.Result]:
        return [generate(model, prompt, keys=[i], seed=0, **bench.puzzle) for i, prompt in enumerate(first)]

    results, seconds = fastest(one_by_one, bench.device, 1)
    rates = {"prompts_per_s": len(first) / seconds, "rows_per_s": sum(int(r.rows[0]) for r in results) / seconds}
    measured: list[Row] = [show({"what": "one prompt at a time", "prompts": len(first), "seconds": seconds, **rates})]
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "puzzles.jsonl")
        source.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(puzzles)))
        for what, options in (
            ("batched, default budget", {}),
            ("batched, 16384 tokens per forward", {"max_tokens_per_forward": 1 << 14}),
            ("batched, deterministic", {"deterministic": True}),
        ):
            output = Path(name, f"{len(measured)}.jsonl")
            report = d5p4.run_file(model, source, output, seed=0, **bench.puzzle | options)
            row: Row = {"what": what, "prompts": plan.file, "seconds": report.seconds}
            row |= {"prompts_per_s": plan.file / report.seconds, "rows_per_s": report.rows / report.seconds}
            row["gain"] = row["prompts_per_s"] / measured[0]["prompts_per_s"]
            if "deterministic" not in options:  # answers with and without it may differ
                lines = [json.loads(line)["answers"] for line in output.read_text().splitlines()]
                row["same_share"] = (
                    sum(r.texts[0] == line for r, line in zip(results, lines, strict=False)) / plan.alone
                )
            measured.append(show(row))
    return measured


def distinct(bench: Bench) -> list[Row]:
    """Measure the share of distinct rows in pools of k = 16, w = 4 that the shipped models decode."""
    plan, measured = bench.plan, []
    books, texts = d5p4.load("books", bench.device), (2 * OPENINGS)[: plan.texts]
    for what, model, prompts, window in (
        ("countdown", bench.countdown, bench.puzzles(plan.shares), plan.window),
        ("books", books, texts, plan.text_length),
    ):
        for tokens in (1, 4):
            options = dict(k=plan.pool[0], w=plan.pool[1], gen_length=window, steps=window // tokens)
            row = bench.decode(what, model, prompts, 1, **options)
            measured.append(show(row | {"tokens_a_step": tokens}))
    return measured


SECTIONS: sections.Sections[Bench] = {f.__name__: f for f in (rows, batching, distinct)}


def percent(key: str) -> sections.Cell:
    return lambda row: f"{100 * row[key]:.1f} %" if key in row else None


COLUMNS: dict[str, dict[str, sections.Cell]] = {
    "distinct": {
        "model": "what",
        "tokens per step": "tokens_a_step",
        "prompts": "prompts",
        "steps": "steps",
        "distinct rows": percent("distinct_share"),
    },
    "rows": {
        "model": "what",
        "prompts together": "prompts",
        "distinct rows": percent("distinct_share"),
        "rows/s": "rows_per_s",
        "prompts/s": "prompts_per_s",
        "gain in rows/s": "gain",
        "peak, GB": "peak_gb",
    },
    "batching": {
        "file of puzzles": "what",
        "prompts": "prompts",
        "seconds": "seconds",
        "prompts/s": "prompts_per_s",
        "gain": "gain",
        "prompts with the same answers as one by one": percent("same_share"),
    },
}


def table(results: Mapping[str, Any], name: str) -> str:
    """Return the table of one section, followed by the name of the machine that measured it."""
    text = sections.table(results, name, COLUMNS[name])
    if not rows_of(results, name):
        return text
    section = results["sections"][name]
    origin = f"{section['machine']}, torch {section['torch']}" + ", tiny sizes" * section["small"]
    return f"{text}\n\nMeasured on: {origin}."


def tables(results: Mapping[str, Any]) -> Tables:
    return {name: partial(table, results, name) for name in COLUMNS}


def make_bench(small: bool, device: torch.device) -> Bench:
    return Bench(SMALL if small else Plan(), device)


def main(arguments: Sequence[str]) -> None:
    sections.main("scale", __doc__, SECTIONS, make_bench, tables, arguments)
