"""Draws the tables of docs/performance.md from the results of `gpu.py`. COLUMNS has all tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..tables import Row, Tables, markdown, number
from . import rows_of

Cell = Callable[[Row], str]


def best_ms(row: Row, name: str) -> float | None:
    """Return our operation's time in a CUDA graph, or its eager time if the graph was not measured."""
    return row.get(f"{name}_graph_ms", row.get(f"{name}_ms"))


def _value(key: str, factor: float = 1.0) -> Cell:
    return lambda row: "–" if row.get(key) is None else number(float(row[key]) * factor)


def _best(name: str, factor: float = 1.0) -> Cell:
    return lambda row: "–" if best_ms(row, name) is None else number(float(best_ms(row, name) or 0) * factor)


def _share(key: str) -> Cell:
    return lambda row: f"{row[key]:.0%}" if key in row else "–"


def _text(key: str) -> Cell:
    return lambda row: str(row.get(key, ""))


OPERATION: dict[str, Cell] = {
    "what": _text("what"),
    "size": _text("size"),
    "ours, ms": _best("ours"),
    "plain torch, ms": _value("plain_ms"),
    "paper's way, ms": _value("baseline_ms"),
    "floor, ms": _value("floor_ms"),
    "ours, GB": _value("ours_gb"),
    "paper's way, GB": _value("baseline_gb"),
}
COLUMNS: dict[str, dict[str, Cell]] = {
    "step": OPERATION,
    "vocab": OPERATION,
    "sample": OPERATION,
    "gram": OPERATION,
    "solver": {
        "groups × children, prompts": _text("size"),
        "ours, µs": _best("ours", 1e3),
        "paper's way in a graph, µs": _value("baseline_graph_ms", 1e3),
        "paper's way, µs": _value("baseline_ms", 1e3),
        "plain torch, ms": _value("plain_ms"),
    },
    "mmr": {
        "groups × children, prompts": _text("size"),
        "plain torch, ms": _value("plain_ms"),
        "paper's way in a graph, ms": _value("baseline_graph_ms"),
        "paper's way, ms": _value("baseline_ms"),
    },
    "body": {
        "rows × tokens": _text("size"),
        "ours, ms": _value("ours_ms"),
        "eager, ms": _value("baseline_ms"),
        "the products, ms": _value("floor_ms"),
        "share of the rate": _share("ours_share"),
        "share of the sustained rate": _share("sustained_share"),
        "eager, share": _share("baseline_share"),
        "ours, GB beyond weights": _value("ours_gb"),
    },
    "block": {
        "model": _text("what"),
        "rows × tokens": _text("size"),
        "whole rows, ms": _value("whole_ms"),
        "their floor, ms": _value("whole_floor_ms"),
        "one block, ms": _value("block_ms"),
        "its floor, ms": _value("block_floor_ms"),
        "times faster": _value("ratio"),
    },
    "answers": {
        "decode": _text("what"),
        "steps": _value("steps"),
        "ms per step": _value("ours_ms"),
        "kernels, ms": _value("device_ms"),
        "times one plain answer": _value("plain_times"),
        "times one cached answer": _value("cached_times"),
        "peak, GB": _value("ours_gb"),
    },
    "decode": {
        "pool": _text("what"),
        "measured": _text("size"),
        "distinct rows": _share("distinct_share"),
        "ours, ms": _value("ours_ms"),
        "paper's way, ms": _value("baseline_ms"),
        "times faster": _value("speedup"),
    },
}


def shown(results: Mapping[str, Any], name: str) -> Sequence[Row]:
    """Return the rows of a table as the page shows them."""
    if name == "decode":
        rows = {row["what"]: row for row in rows_of(results, name)}
        return [rows[what] for what in ("no duplicates", "about 30 % distinct", "first step") if what in rows]
    return rows_of(results, name)


def tables(results: Mapping[str, Any]) -> Tables:
    def draw(name: str) -> str:
        columns = COLUMNS[name]
        return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in shown(results, name)])

    return {name: partial(draw, name) for name in COLUMNS}


def report(results: Mapping[str, Any]) -> str:
    """Return Markdown with all tables of the page and all errors."""
    parts = [f"### {name}\n{table()}" for name, table in tables(results).items()]
    for name, section in results["sections"].items():
        parts += [f"{name} failed: {section['error']}"] if "error" in section else []
        for row in section.get("rows", []):
            parts += [f"{row['what']}, {row.get('size')}, {k} failed: {v}" for k, v in row.get("errors", {}).items()]
    return "\n\n".join(parts)
