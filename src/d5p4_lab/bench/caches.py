"""Measure what the approximate caches `prefix` and `dual` change in puzzles of `countdown`.

    python -m d5p4_lab bench caches --device cuda

Every row decodes the same puzzles with the tree and the defaults of `countdown`: without blocks, and with blocks with
and without a cache. "Same answers" is the share of puzzles whose set of texts equals that of the row with the same
blocks and without a cache. Figures are means with 95 % intervals over puzzles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import d5p4
from d5p4.eval.countdown import WINDOW, problems

from ..provenance import about
from ..statistics import interval
from ..tables import Row, Tables, half_width, markdown
from ..timing import wall
from . import RESULTS, generate, make_parser, show, write
from .solving import judge, measures

BLOCKS = (12, 6)  # the lengths of blocks
PUZZLES = 100  # of four and of five numbers


def measure(model: Any, numbers: int, count: int) -> list[Row]:
    """Decode the puzzles in every way."""
    prompts = [problem.prompt for problem in problems(count, numbers=numbers, seed=1)]
    rows, plain = [], {}
    cached = [{"block_length": block, "cache": cache} for block in BLOCKS for cache in ("none", "prefix", "dual")]
    for way in ({}, *cached):
        call = partial(generate, model, prompts, method="tree", k=4, seed=0, gen_length=WINDOW[numbers], **way)
        result, seconds = wall(call, model.device)
        block, cache = way.get("block_length"), way.get("cache", "none")
        row: Row = {"task": f"puzzles of {numbers} numbers", "block": block, "cache": cache}
        row |= {"seconds": round(seconds, 1)}
        row |= {name: interval(getattr(result, name).tolist()) for name in ("rows", "tokens_run", "nfe")}
        values = measures(judge("countdown", prompts, result.texts))
        row |= {name: interval(values[name]) for name in ("pass@4", "first", "different")}
        if cache == "none":
            plain[block] = result.texts
        else:
            pairs = zip(result.texts, plain[block], strict=True)
            row["same"] = interval([float(set(texts) == set(others)) for texts, others in pairs])
        rows.append(show(row))
    return rows


def table(results: Sequence[Row]) -> str:
    cells = []
    for row in results[1:]:
        solved = [half_width(row[name], 1, 100) for name in ("pass@4", "first")]
        equal = half_width(row["same"], 1, 100) if "same" in row else None
        cost = [half_width(row["rows"], 0), half_width(row["tokens_run"], 0)]
        shared = [row["task"], row["block"] or "none", row["cache"]]
        cells.append([*shared, *solved, half_width(row["different"], 2), equal, *cost])
    kinds = ["solved %", "first right %", "different right"]
    return markdown(["task", "block", "cache", *kinds, "same answers %", "rows", "positions run"], cells)


def tables(results: Sequence[Row]) -> Tables:
    return {"puzzles": partial(table, results)}


def main(arguments: Sequence[str]) -> None:
    args = make_parser("caches", __doc__, RESULTS / "caches.jsonl.xz").parse_args(arguments)
    model = d5p4.load("countdown", args.device, "float32")
    rows = [row for numbers in (4, 5) for row in measure(model, numbers, PUZZLES)]
    results = [{"about": about(model.device, ["bench", "caches"])}, *rows]
    write(args.out, results)
    print(table(results))
