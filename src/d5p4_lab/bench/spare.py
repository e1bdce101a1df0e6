"""Measure the gain and cost of spare beams, and how many of four answers differ, on held-out puzzles of `countdown`.

    python -m d5p4_lab bench spare [--device cuda] [--puzzles 500] [--out FILE]    prints the table of docs/serving.md
    python -m d5p4_lab bench spare --table                                         prints the table of the last run

The settings are k = w = 4, temperature 1 and one seed. "Four different" is the share of puzzles whose four texts all
differ. "Different right" counts the right answers per puzzle that differ by more than the order of operands. "Rows"
is the number of distinct rows per puzzle that go through the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import d5p4
from d5p4.eval.countdown import canonical, is_right, problems
from d5p4.jobs.decoder import default_budget

from ..provenance import about
from ..statistics import interval
from . import RESULTS, Row, generate, half_width, make_parser, markdown, read, show, write

K = 4
CASES: tuple[Row, ...] = (
    {"method": "independent", "distinct": False, "spare": 0},
    {"method": "independent", "distinct": True, "spare": 0},
    {"method": "independent", "distinct": True, "spare": 4},
    {"method": "d5p4", "distinct": False, "spare": 0},
    {"method": "d5p4", "distinct": False, "spare": 2},
    {"method": "d5p4", "distinct": True, "spare": 0},
    {"method": "d5p4", "distinct": True, "spare": 1},
    {"method": "d5p4", "distinct": True, "spare": 2},
    {"method": "d5p4", "distinct": True, "spare": 4},
)


def measure(model: Any, numbers: int, count: int, case: Row) -> Row:
    """Decode the puzzles, and return every figure as [mean, low, high] over puzzles."""
    puzzles = problems(count, numbers=numbers, seed=9)
    prompts = [problem.prompt for problem in puzzles]
    result = generate(model, prompts, k=K, seed=1, max_tokens_per_forward=default_budget(model), **case)
    pairs = list(zip(puzzles, result.texts, strict=True))
    right = [[text for text in texts if is_right(problem, text)] for problem, texts in pairs]
    figures = {
        "different": [100.0 * (len(set(texts)) == K) for texts in result.texts],
        "right": [float(len(set(map(canonical, texts)))) for texts in right],
        "solved": [100.0 * bool(texts) for texts in right],
        "first": [100.0 * is_right(problem, texts[0]) for problem, texts in pairs],
        "rows": result.rows.double().tolist(),
    }
    return {"numbers": numbers, **case} | {name: list(interval(values)) for name, values in figures.items()}


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table, followed by the origin of the figures."""
    rows = []
    for row in results["rows"]:
        extra = (", `distinct`" if row["distinct"] else "") + (f", spare {row['spare']}" if row["spare"] else "")
        different, solved, first = (f"{half_width(row[name], 1)} %" for name in ("different", "solved", "first"))
        right, count = half_width(row["right"], 2), half_width(row["rows"], 0)
        rows.append([str(row["numbers"]), row["method"] + extra, different, right, solved, first, count])
    origin = results["about"]
    source = f"{origin['machine']}, torch {origin['torch']}, {results['dtype']}; `{origin['command']}`"
    text = markdown(["numbers", "", "four different", "different right", "solved", "first right", "rows"], rows)
    return f"{text}\n\n{results['puzzles']} held-out puzzles each, ± 95 % ({source})"


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("spare", __doc__)
    parser.add_argument("--device", default=None)
    parser.add_argument("--puzzles", type=int, default=500)
    parser.add_argument("--numbers", default="4,5,3")
    parser.add_argument("--out", type=Path, default=RESULTS / "spare.json")
    parser.add_argument("--table", action="store_true", help="print the table of the last run")
    options = parser.parse_args(arguments)
    if not options.table:
        model = d5p4.load("countdown", options.device, "float32")
        numbers = [int(number) for number in options.numbers.split(",")]
        rows = [show(measure(model, count, options.puzzles, case)) for count in numbers for case in CASES]
        origin = about(model.device, ["bench", "spare", "--puzzles", str(options.puzzles)])
        write(options.out, {"about": origin, "puzzles": options.puzzles, "dtype": "float32", "rows": rows})
    print(table(read(options.out)))
