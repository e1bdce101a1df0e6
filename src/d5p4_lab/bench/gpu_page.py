"""Draws the targets, tables and figure of docs/performance.md from the JSON of `gpu.py`.

On the page, each table stands between <!-- gpu: NAME --> and <!-- end -->, where NAME is a key of COLUMNS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..figures import pyplot, save
from . import Row, Tables, markdown, number, rows_of

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
        ("solver 32×32: mean gain over n-start greedy", solver("32×32, P 1").get("gain_nats"), "≥", 0.0, "nat"),
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
        lines += [
            (
                f"{name}, tree of four answers with the {cache} cache against one answer without it",
                tree.get("plain_times"),
                "≤",
                1.1,
                "×",
            ),
            (
                f"{name}, the tree in 86 steps against one answer without a cache in 256",
                third.get("plain_times"),
                "≤",
                0.45,
                "×",
            ),
            (
                f"{name}, the tree against one answer, both with the {cache} cache",
                tree.get("cached_times"),
                "≤",
                1.5,
                "×",
            ),
            (f"{name}, d5p4 6×10: step with the {cache} cache against whole rows", faster, "≥", 6.0, "×"),
            (
                f"{name}, d5p4 6×10 with the {cache} cache: peak memory with weights",
                pool.get("ours_gb"),
                "≤",
                24.0,
                "GB",
            ),
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


def _same(row: Row) -> str:
    return f"{round(row['equal_share'] * row['problems'])} of {row['problems']}" if "equal_share" in row else ""


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
SOLVER: dict[str, Cell] = {
    "groups × children, prompts": _text("size"),
    "ours, µs": _best("ours", 1e3),
    "paper's way in a graph, µs": _value("baseline_graph_ms", 1e3),
    "paper's way, µs": _value("baseline_ms", 1e3),
    "plain torch, ms": _value("plain_ms"),
}
VALUE: dict[str, Cell] = {
    "mean gain over n-start greedy, nats": _value("gain_nats"),
    "least gain": _value("gain_least"),
    "same set as float64": _same,
}
COLUMNS: dict[str, dict[str, Cell]] = {
    "targets": {"what": _text("what"), "target": _text("target"), "measured": _text("measured"), "": _text("verdict")},
    "step": OPERATION,
    "vocab": OPERATION,
    "sample": OPERATION,
    "gram": OPERATION,
    "solver": SOLVER | VALUE,
    "mmr": SOLVER,
    "growth": {
        "grows": _text("axis"),
        "size": _text("size"),
        "from logits, ms": _best("logits"),
        "one read of them, ms": _value("logits_floor_ms"),
        "from hidden rows, ms": _best("states"),
        "the head's products, ms": _value("states_floor_ms"),
        "from hidden rows, GB": _value("states_gb"),
        "paper's way from logits, ms": _value("baseline_ms"),
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
        "body alone, ms": _value("body_ms"),
        "head alone, ms": _value("head_ms"),
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
        return results.get("targets", [])
    if name == "decode":
        return [find(results, name, what) for what in ("no duplicates", "about 30 % distinct", "first step")]
    rows = rows_of(results, name)
    if name == "block":
        return [row for row in rows if "block_floor_ms" in row]
    return [row for row in rows if row["what"] == "body"] if name == "body" else rows


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


def figure(results: Mapping[str, Any], path: Path) -> None:
    """Draw the step's time by candidates, positions, vocabulary and prompts, the solver's time, and decode steps."""
    names = {"n": "candidates n", "L": "answer positions L", "V": "vocabulary V", "P": "prompts P"}
    chart, panels = pyplot().subplots(2, 3, figsize=(13, 7.5))
    for panel, (axis, name) in zip(panels.flat, names.items(), strict=False):
        _growth(panel, [row for row in rows_of(results, "growth") if row["axis"] == axis])
        _finish(panel, f"selection and sampling, by {name}", name, "ms per step")
    _solver(panels.flat[4], rows_of(results, "solver"))
    _finish(panels.flat[4], "solver, kernel given", "candidates n", "ms")
    panels.flat[4].legend(fontsize=8)
    _decode(panels.flat[5], results)
    _finish(panels.flat[5], "whole decode step, model included", "", "ms per step")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=5, title="selection and sampling")
    here = next(iter(rows_of(results, "machine")), {})
    chart.suptitle(f"{here.get('what', '')}, torch {here.get('torch', '')}; base: {results.get('base', '')}")
    save(chart, path)


def _growth(panel: Any, rows: Sequence[Row]) -> None:
    for name, label, colour, style in (
        ("baseline", "baseline, from logits", "C3", "-"),
        ("logits", "ours, from logits", "C0", "-"),
        ("logits_floor", "one read of the logits", "C0", ":"),
        ("states", "ours, from hidden rows", "C2", "-"),
        ("states_floor", "the head's products", "C2", ":"),
    ):
        _line(panel, [(row["value"], best_ms(row, name)) for row in rows], f".{style}", colour, label)
    values = sorted({row["value"] for row in rows})
    panel.set_xticks(values, map(str, values))
    panel.minorticks_off()


def _solver(panel: Any, rows: Sequence[Row]) -> None:
    for name, label, prompts, colour in (
        ("baseline", "baseline, n starts", 1, "C3"),
        ("ours", "ours", 1, "C0"),
        ("ours", "ours, 64 prompts", 64, "C2"),
    ):
        time = partial(best_ms, name=name) if name == "ours" else lambda row: row.get("baseline_ms")
        _line(panel, [(row["n"], time(row)) for row in rows if row["prompts"] == prompts], "o", colour, label)


def _decode(panel: Any, results: Mapping[str, Any]) -> None:
    bars = {"baseline": find(results, "decode", "baseline step").get("baseline_ms")}
    for what in ("no duplicates", "about 30 % distinct", "first step"):
        bars["\n".join(what.rsplit(maxsplit=1))] = find(results, "decode", what).get("ours_ms")
    known = {label: ms for label, ms in bars.items() if ms is not None}
    colours = ["C3" if label == "baseline" else "C0" for label in known]
    panel.bar_label(panel.bar(list(known), list(known.values()), color=colours), [number(ms) for ms in known.values()])
    panel.margins(y=0.1)


def _line(panel: Any, points: Sequence[tuple[float, float | None]], style: str, colour: str, label: str) -> None:
    known = sorted((x, y) for x, y in points if y is not None)
    if known:
        panel.loglog([x for x, _ in known], [y for _, y in known], style, color=colour, label=label)


def _finish(panel: Any, title: str, across: str, up: str) -> None:
    panel.set(title=title, xlabel=across, ylabel=up)
    panel.set_visible(panel.has_data())
    panel.grid(alpha=0.3)
