"""Draws the targets and the tables of docs/performance.md from the results of `gpu.py`. COLUMNS has all tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..tables import Row, Tables, markdown, number
from . import rows_of

Cell = Callable[[Row], str]


def find(results: Mapping[str, Any], section: str, what: str, size: str = "") -> Row:
    """Return the first row of a section that has this name (and size), or {} if the section has no such row."""
    return next((r for r in rows_of(results, section) if r["what"] == what and size in ("", r.get("size"))), {})


def best_ms(row: Row, name: str) -> float | None:
    """Return our operation's time in a CUDA graph, or its eager time if the graph was not measured."""
    return row.get(f"{name}_graph_ms", row.get(f"{name}_ms"))


def targets(results: Mapping[str, Any]) -> list[Row]:
    """Return the targets for one H200 with the measured values. Results of --small count as not measured."""
    row = partial(find, {"sections": {}} if results.get("small") else results)
    stored, streamed = row("step", "step, logits in memory"), row("step", "step, streamed head")
    half, full = best_ms(row("step", "step, streamed head, half masked"), "ours"), best_ms(streamed, "ours")
    solver = partial(row, "solver", "partition MAP")
    all_rows, few = row("decode", "no duplicates"), row("decode", "about 30 % distinct")
    share = f"{few['distinct_share']:.0%}" if "distinct_share" in few else "about 30 %"
    lines: list[tuple[str, float | None, str, float, str]] = [
        ("step, logits in memory", best_ms(stored, "ours"), "≤", 2.0, "ms"),
        ("step, streamed head", full, "≤", 27.0, "ms"),
        ("step, streamed head: memory beyond weights and hidden rows", streamed.get("ours_gb"), "≤", 1.5, "GB"),
        ("step, streamed head: half masked against all", half / full if half and full else None, "≤", 0.55, ""),
        ("solver 32×32", best_ms(solver("32×32, P 1"), "ours"), "≤", 0.10, "ms"),
        ("solver 6×10", best_ms(solver("6×10, P 1"), "ours"), "≤", 0.010, "ms"),
        ("solver 64×32", best_ms(solver("64×32, P 1"), "ours"), "≤", 0.40, "ms"),
        ("solver, 64 prompts of 4×4", best_ms(solver("4×4, P 64"), "ours"), "≤", 0.012, "ms"),
        ("body 60 × 384: share of the matrix rate", row("body", "body", "60 × 384").get("ours_share"), "≥", 0.8, ""),
        ("the same of the sustained rate", row("body", "body", "60 × 384").get("sustained_share"), "≥", 0.8, ""),
        ("decode step against the baseline, no duplicates", all_rows.get("speedup"), "≥", 1.33, "×"),
        (f"decode step against the baseline, {share} distinct rows", few.get("speedup"), "≥", 4.2, "×"),
        ("padding of row counts", row("decode", "padding of row counts").get("padding_share"), "≤", 0.05, ""),
        ("decode: peak memory with weights", row("decode", "confidence order, T 1").get("ours_gb"), "≤", 24.0, "GB"),
    ]
    for name, cache in (("LLaDA-8B", "dual"), ("SDAR-8B", "exact")):
        for rows, least in ((4, 5.0), (16, 7.5), (60, 8.0)):
            ratio = row("block", name, f"{rows} × 32 of 384").get("ratio")
            lines.append((f"{name}, {rows} rows: one block against whole rows", ratio, "≥", least, "×"))
        tree, third, pool = (
            row("answers", f"{name}: {what}, {cache} cache{more}")
            for what, more in (("tree, K = 4", ""), ("tree, K = 4", ", 86 steps"), ("d5p4, 6 × 10", ""))
        )
        whole = row("answers", f"{name}: d5p4, 6 × 10, whole rows")
        faster = whole["ours_ms"] / pool["ours_ms"] if whole and pool else None
        cached, plain = f"with the {cache} cache", "plain_times"
        lines += [
            (f"{name}, tree of four answers {cached} against one answer without it", tree.get(plain), "≤", 1.1, "×"),
            (
                f"{name}, the tree in 86 steps against one answer without a cache in 256",
                third.get(plain),
                "≤",
                0.45,
                "×",
            ),
            (f"{name}, the tree against one answer, both {cached}", tree.get("cached_times"), "≤", 1.5, "×"),
            (f"{name}, d5p4 6×10: step {cached} against whole rows", faster, "≥", 6.0, "×"),
            (f"{name}, d5p4 6×10 {cached}: peak memory with weights", pool.get("ours_gb"), "≤", 24.0, "GB"),
        ]
    return [_verdict(*line) for line in lines]


def _verdict(what: str, measured: float | None, sign: str, target: float, unit: str) -> Row:
    row = {"what": what, "target": f"{sign} {number(target)} {unit}".strip(), "value": measured}
    if measured is None:
        return row | {"verdict": "not measured"}
    met = measured <= target if sign == "≤" else measured >= target
    short = number(measured)
    short = f"{measured:.4g}" if short == number(target) and not met else short
    return row | {"measured": f"{short} {unit}".strip(), "verdict": "met" if met else "missed"}


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
    "targets": {"what": _text("what"), "target": _text("target"), "measured": _text("measured"), "": _text("verdict")},
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
    if name == "targets":
        return targets(results)
    if name == "decode":
        return [find(results, name, what) for what in ("no duplicates", "about 30 % distinct", "first step")]
    return rows_of(results, name)


def tables(results: Mapping[str, Any]) -> Tables:
    def draw(name: str) -> str:
        columns = COLUMNS[name]
        return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in shown(results, name)])

    return {name: partial(draw, name) for name in COLUMNS}


def report(results: Mapping[str, Any]) -> str:
    """Return Markdown with the machine, all tables of the page, and all errors."""
    here = next(iter(rows_of(results, "machine")), {})
    parts = ["machine: " + ", ".join(f"{key} {number(value)}" for key, value in here.items())]
    parts += [f"### {name}\n{table()}" for name, table in tables(results).items()]
    for name, section in results["sections"].items():
        parts += [f"{name} failed: {section['error']}"] if "error" in section else []
        for row in section.get("rows", []):
            parts += [f"{row['what']}, {row.get('size')}, {k} failed: {v}" for k, v in row.get("errors", {}).items()]
    return "\n\n".join(parts)
