"""What the JSON of `gpu.py` says: targets, Markdown tables, the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = {
    "what": "what", "axis": "grows", "size": "size", "ours_graph_ms": "ours in a graph, ms", "ours_ms": "ours, ms",
    "plain_ms": "plain, ms", "baseline_ms": "baseline, ms", "baseline_graph_ms": "baseline in a graph, ms",
    "baseline_select_ms": "its selection, ms", "baseline_sample_ms": "its sampling, ms", "floor_ms": "floor, ms",
    "logits_graph_ms": "from logits in a graph, ms", "logits_ms": "from logits, ms", "logits_floor_ms": "one read, ms",
    "states_graph_ms": "from hidden rows in a graph, ms", "states_ms": "from hidden rows, ms",
    "states_floor_ms": "the head's products, ms", "speedup": "times faster", "ours_share": "ours, of the rate",
    "sustained_share": "ours, of the sustained rate",
    "baseline_share": "baseline, of the rate", "distinct_share": "distinct rows", "padding_share": "padding",
    "largest_extra_ms": "largest extra, ms", "ours_gb": "ours, GB", "logits_gb": "from logits, GB",
    "states_gb": "from hidden rows, GB", "plain_gb": "plain, GB", "baseline_gb": "baseline, GB",
    "problems": "problems", "gain_nats": "mean gain over greedy, nats", "gain_least": "least gain, nats",
    "equal_share": "same set as float64", "largest_loss": "largest loss, nats", "torch": "torch", "triton": "triton",
    "driver": "driver", "bandwidth_tbs": "copy, TB/s", "rate_tflops": "matrix rate, TFLOP/s",
    "sustained_tflops": "sustained, TFLOP/s",
    "head_rate_tflops": "head's shape, TFLOP/s", "skipped": "skipped", "target": "target", "measured": "measured",
    "verdict": "verdict",
}  # fmt: skip


def find(results: Mapping[str, Any], section: str, what: str, size: str = "") -> Row:
    """The first row of a section with this name (and size); {} when it was not measured."""
    rows = results["sections"].get(section, {}).get("rows", [])
    return next((row for row in rows if row["what"] == what and size in ("", row.get("size"))), {})


def best_ms(row: Row, name: str) -> float | None:
    """In a CUDA graph where that was measured, eager otherwise."""
    return row.get(f"{name}_graph_ms", row.get(f"{name}_ms"))


def targets(results: Mapping[str, Any]) -> list[Row]:
    """What is asked for on one H200 against what was measured; tiny sizes answer nothing."""
    row = partial(find, {"sections": {}} if results.get("small") else results)
    stored, streamed = row("step", "step, logits in memory"), row("step", "step, streamed head")
    half, full = best_ms(row("step", "step, streamed head, half masked"), "ours"), best_ms(streamed, "ours")
    solver = partial(row, "solver", "partition MAP")
    few = row("decode", "about 30 % distinct")
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
        ("decode step against the baseline, no duplicates", row("decode", "no duplicates").get("speedup"), "≥", 1.33,
         "×"),
        (f"decode step against the baseline, {share} distinct rows", few.get("speedup"), "≥", 4.2, "×"),
        ("padding of row counts", row("decode", "padding of row counts").get("padding_share"), "≤", 0.05, ""),
        ("decode: peak memory with weights", row("decode", "confidence order, T 1").get("ours_gb"), "≤", 24.0, "GB"),
    ]  # fmt: skip
    return [_verdict(*line) for line in lines]


def _verdict(what: str, measured: float | None, sign: str, target: float, unit: str) -> Row:
    row = {"what": what, "target": f"{sign} {number(target)} {unit}".strip(), "value": measured}
    if measured is None:
        return row | {"verdict": "not measured"}
    met = measured <= target if sign == "≤" else measured >= target
    return row | {"measured": f"{number(measured)} {unit}".strip(), "verdict": "met" if met else "missed"}


def number(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Markdown, its cells aligned; columns in which no row has anything are left out."""
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    cells = [[COLUMNS[key] for key in keys], *([number(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def report(results: Mapping[str, Any]) -> str:
    """All tables of a JSON, and what failed."""
    parts = []
    for name, section in results["sections"].items():
        rows = section.get("rows", [])
        parts.append(f"### {name}\n{section.get('about', '')}\n")
        parts += [table(rows) + "\n"] if rows else []
        failed = [f"{r['what']}, {r.get('size')}, {k}: {v}" for r in rows for k, v in r.get("errors", {}).items()]
        failed += [section["error"]] if "error" in section else []
        parts += [f"* failed: {text}" for text in failed]
    return "\n".join([*parts, "### targets\n", table(targets(results))])


def figure(results: Mapping[str, Any], path: Path) -> None:
    """Growth with n, L, V and P, the solver by size, whole decode steps. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "d5p4"  # the same numbers give the same file
    sections = results["sections"]
    chart, panels = pyplot.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    names = {"n": "candidates n", "L": "answer positions L", "V": "vocabulary V", "P": "prompts P"}
    for panel, (axis, name) in zip(panels.flat, names.items(), strict=False):
        _growth(panel, [row for row in sections.get("growth", {}).get("rows", []) if row["axis"] == axis])
        _finish(panel, f"selection and sampling, by {name}", name, "ms a step")
    _solver(panels.flat[4], sections.get("solver", {}).get("rows", []))
    _finish(panels.flat[4], "solver, kernel given", "candidates n", "ms")
    panels.flat[4].legend(fontsize=8)
    _decode(panels.flat[5], results)
    _finish(panels.flat[5], "whole decode step, model included", "", "ms a step")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=5, title="selection and sampling")
    here = sections.get("machine", {}).get("rows", [{}])[0]
    chart.suptitle(f"{here.get('what', '')}, torch {here.get('torch', '')}; base: {results.get('base', '')}")
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(chart)


def _growth(panel: Any, rows: Sequence[Row]) -> None:
    for name, label, colour, style in (
        ("baseline", "baseline, from logits", "C3", "-"), ("logits", "ours, from logits", "C0", "-"),
        ("logits_floor", "one read of the logits", "C0", ":"), ("states", "ours, from hidden rows", "C2", "-"),
        ("states_floor", "the head's products", "C2", ":"),
    ):  # fmt: skip
        _line(panel, [(row["value"], best_ms(row, name)) for row in rows], f".{style}", colour, label)
    values = sorted({row["value"] for row in rows})
    panel.set_xticks(values, map(str, values))
    panel.minorticks_off()


def _solver(panel: Any, rows: Sequence[Row]) -> None:
    for name, label, prompts, colour in (
        ("baseline", "baseline, n starts", 1, "C3"), ("ours", "ours", 1, "C0"), ("ours", "ours, 64 prompts", 64, "C2"),
    ):  # fmt: skip
        points = [
            (row["n"], row.get("baseline_ms") if name == "baseline" else best_ms(row, name))
            for row in rows
            if row["prompts"] == prompts
        ]
        _line(panel, points, "o", colour, label)


def _decode(panel: Any, results: Mapping[str, Any]) -> None:
    bars = {"baseline": find(results, "decode", "baseline step").get("baseline_ms")}
    for what in ("no duplicates", "about 30 % distinct", "first step"):
        bars["\n".join(what.rsplit(maxsplit=1))] = find(results, "decode", what).get("ours_ms")
    known = {label: ms for label, ms in bars.items() if ms is not None}
    drawn = panel.bar(
        list(known), list(known.values()), color=["C3" if label == "baseline" else "C0" for label in known]
    )
    panel.bar_label(drawn, [number(ms) for ms in known.values()])
    panel.margins(y=0.1)


def _line(panel: Any, points: Sequence[tuple[float, float | None]], style: str, colour: str, label: str) -> None:
    known = sorted((x, y) for x, y in points if y is not None)
    if known:
        panel.loglog([x for x, _ in known], [y for _, y in known], style, color=colour, label=label)


def _finish(panel: Any, title: str, across: str, up: str) -> None:
    panel.set(title=title, xlabel=across, ylabel=up)
    panel.set_visible(panel.has_data())
    panel.grid(alpha=0.3)
