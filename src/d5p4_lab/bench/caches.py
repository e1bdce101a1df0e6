"""Measure what the approximate caches `prefix` and `dual` change in puzzles of `countdown` and prose of `books`.

    python -m d5p4_lab bench caches --device cuda --data val.txt.xz

Every row decodes the same prompts with the tree: puzzles with the defaults of `countdown`, prose with k = 4 texts of 64
tokens at temperature 1, one token per step. The first row of a task has no blocks, and the others have blocks with and
without a cache. "Same answers" is the share of prompts whose set of texts equals that of the row with the same blocks
and without a cache. `judge` reads the continuations, given their prompts. Figures are means with 95 % intervals over
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import d5p4
from d5p4.eval.countdown import WINDOW, problems

from ..paper.tasks import load_task
from ..provenance import about
from ..scoring.perplexity import CausalJudge
from ..statistics import interval
from ..tables import Row, Tables, half_width, markdown
from ..timing import wall
from . import RESULTS, generate, make_parser, show, write
from .books import distinct_share, figures, plus_minus
from .rivals import scored_continuations
from .solving import judge, measures

BLOCKS = {"puzzles": (12, 6), "prose": (16, 8)}  # the lengths of blocks
PUZZLES = 100  # of four and of five numbers
PROMPTS, LENGTH = 16, 64  # paragraphs of prose to continue, and the tokens of a continuation


def measure(
    task: str,
    model: Any,
    prompts: Sequence[str],
    blocks: Sequence[int],
    options: Mapping[str, Any],
    quality: Callable[[Sequence[Sequence[str]]], Row],
) -> list[Row]:
    """Decode the prompts in every way. `quality` returns the figures of the texts."""
    rows, plain = [], {}
    cached = [{"block_length": block, "cache": cache} for block in blocks for cache in ("none", "prefix", "dual")]
    for way in ({}, *cached):
        call = partial(generate, model, prompts, method="tree", k=4, seed=0, **options, **way)
        result, seconds = wall(call, model.device)
        block, cache = way.get("block_length"), way.get("cache", "none")
        row: Row = {"task": task, "block": block, "cache": cache, "seconds": round(seconds, 1)}
        row |= {name: interval(getattr(result, name).tolist()) for name in ("rows", "tokens_run", "nfe")}
        row |= quality(result.texts)
        if cache == "none":
            plain[block] = result.texts
        else:
            pairs = zip(result.texts, plain[block], strict=True)
            row["same"] = interval([float(set(texts) == set(others)) for texts, others in pairs])
        rows.append(show(row))
    return rows


def puzzle_rows(model: Any, numbers: int, count: int) -> list[Row]:
    prompts = [problem.prompt for problem in problems(count, numbers=numbers, seed=1)]

    def quality(texts: Sequence[Sequence[str]]) -> Row:
        values = measures(judge("countdown", prompts, texts))
        return {name: interval(values[name]) for name in ("pass@4", "first", "different")}

    options = {"gen_length": WINDOW[numbers]}
    return measure(f"puzzles of {numbers} numbers", model, prompts, BLOCKS["puzzles"], options, quality)


def prose_rows(model: Any, count: int, data: Path, reader: CausalJudge) -> list[Row]:
    prompts = [str(example.prompt) for example in load_task("books", data, limit=count).examples]

    def quality(texts: Sequence[Sequence[str]]) -> Row:
        sums = scored_continuations(reader, prompts, texts)
        distinct = interval([distinct_share(answers, 2) for answers in texts])
        return {"judge": figures(sums, together=1), "distinct_2": distinct}

    return measure("prose", model, prompts, BLOCKS["prose"], {"gen_length": LENGTH, "temperature": 1.0}, quality)


def table(results: Sequence[Row], prose: bool) -> str:
    cells = []
    for row in results[1:]:
        if (row["task"] == "prose") != prose:
            continue
        shared = [row["task"], row["block"] or "none", row["cache"]]
        equal = half_width(row["same"], 1, 100) if "same" in row else None
        cost = [half_width(row["rows"], 0), half_width(row["tokens_run"], 0)]
        if prose:
            quality = [plus_minus(row["judge"], "bits_per_byte", 3), half_width(row["distinct_2"], 3)]
        else:
            quality = [half_width(row[name], 1, 100) for name in ("pass@4", "first")]
            quality.append(half_width(row["different"], 2))
        cells.append([*shared, *quality, equal, *cost])
    if not cells:
        return "not measured yet"
    kinds = ["judge: bits per byte", "distinct-2"] if prose else ["solved %", "first right %", "different right"]
    return markdown(["task", "block", "cache", *kinds, "same answers %", "rows", "positions run"], cells)


def tables(results: Sequence[Row]) -> Tables:
    return {"puzzles": partial(table, results, False), "prose": partial(table, results, True)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("caches", __doc__, RESULTS / "caches.jsonl.xz")
    parser.add_argument("--data", type=Path, help="held-out books: a text file, or a folder of `d5p4_lab train corpus`")
    args = parser.parse_args(arguments)
    countdown = d5p4.load("countdown", args.device, "float32")
    rows = [row for numbers in (4, 5) for row in puzzle_rows(countdown, numbers, PUZZLES)]
    if args.data is not None:
        books = d5p4.load("books", args.device, "float32")
        rows += prose_rows(books, PROMPTS, args.data, CausalJudge("smollm2", device=args.device))
    results = [{"about": about(countdown.device, ["bench", "caches"])}, *rows]
    write(args.out, results)
    for name, draw in tables(results).items():
        print(f"### {name}\n{draw()}\n")
