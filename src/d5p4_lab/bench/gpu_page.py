"""The tables of docs/performance.md, from the JSON of `gpu.py`: what stands between its markers is replaced.

A table lies between <!-- gpu: NAME --> and <!-- end -->; NAME is one of TABLES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from d5p4_lab.bench.gpu_report import Row, best_ms, find, number

Cell = Callable[[Row], str]


def _value(key: str, factor: float = 1.0) -> Cell:
    return lambda row: "–" if row.get(key) is None else number(float(row[key]) * factor)


def _best(name: str, factor: float = 1.0) -> Cell:
    return lambda row: "–" if best_ms(row, name) is None else number(float(best_ms(row, name) or 0) * factor)


def _share(key: str) -> Cell:
    return lambda row: f"{row[key]:.0%}" if key in row else "–"


def _text(key: str) -> Cell:
    return lambda row: str(row.get(key, ""))


def _same(row: Row) -> str:
    return f"{round(row['equal_share'] * row['problems'])} of {row['problems']}" if "equal_share" in row else ""


OPERATION: dict[str, Cell] = {
    "what": _text("what"), "size": _text("size"), "ours, ms": _best("ours"), "plain torch, ms": _value("plain_ms"),
    "paper's way, ms": _value("baseline_ms"), "floor, ms": _value("floor_ms"), "ours, GB": _value("ours_gb"),
    "paper's way, GB": _value("baseline_gb"),
}  # fmt: skip
SOLVER: dict[str, Cell] = {
    "groups × children, prompts": _text("size"), "ours, µs": _best("ours", 1e3),
    "paper's way in a graph, µs": _value("baseline_graph_ms", 1e3), "paper's way, µs": _value("baseline_ms", 1e3),
    "plain torch, ms": _value("plain_ms"),
}  # fmt: skip
VALUE: dict[str, Cell] = {
    "mean gain over n-start greedy, nats": _value("gain_nats"), "least gain": _value("gain_least"),
    "same set as float64": _same,
}  # fmt: skip
TABLES: dict[str, dict[str, Cell]] = {
    "targets": {"what": _text("what"), "target": _text("target"), "measured": _text("measured"), "": _text("verdict")},
    "step": OPERATION,
    "vocab": OPERATION,
    "sample": OPERATION,
    "gram": OPERATION,
    "solver": SOLVER | VALUE,
    "mmr": SOLVER,
    "growth": {
        "grows": _text("axis"), "size": _text("size"), "from logits, ms": _best("logits"),
        "one read of them, ms": _value("logits_floor_ms"), "from hidden rows, ms": _best("states"),
        "the head's products, ms": _value("states_floor_ms"), "from hidden rows, GB": _value("states_gb"),
        "paper's way from logits, ms": _value("baseline_ms"),
    },
    "body": {
        "rows × tokens": _text("size"), "ours, ms": _value("ours_ms"), "eager, ms": _value("baseline_ms"),
        "the products, ms": _value("floor_ms"), "share of the rate": _share("ours_share"),
        "share of the sustained rate": _share("sustained_share"), "eager, share": _share("baseline_share"),
        "ours, GB beyond weights": _value("ours_gb"),
    },
    "decode": {
        "pool": _text("what"), "measured": _text("size"), "distinct rows": _share("distinct_share"),
        "ours, ms": _value("ours_ms"), "paper's way, ms": _value("baseline_ms"), "times faster": _value("speedup"),
    },
}  # fmt: skip


def rows_of(results: Mapping[str, Any], name: str) -> Sequence[Row]:
    if name == "targets":
        return results["targets"]
    rows = results["sections"].get(name, {}).get("rows", [])
    if name == "decode":
        return [find(results, name, what) for what in ("no duplicates", "about 30 % distinct", "first step")]
    return [row for row in rows if row["what"] == "body"] if name == "body" else rows


def fill(page: str, results: Mapping[str, Any]) -> str:
    """The page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        columns = TABLES[match[1]]
        lines = [list(columns), ["---"] * len(columns)]
        lines += [[cell(row) for cell in columns.values()] for row in rows_of(results, match[1])]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"<!-- gpu: {match[1]} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- gpu: (\w+) -->.*?<!-- end -->", made, page, flags=re.DOTALL)
