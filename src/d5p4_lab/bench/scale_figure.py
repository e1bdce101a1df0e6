"""The drawing of docs/scale.md: bytes a step, rows a second by prompts together, the gain of batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by most eyes, on white


def figure(scale: Mapping[str, Any], path: Path) -> None:
    """Needs matplotlib. The ground is white, so that it can be read on dark pages too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "d5p4"  # the same numbers give the same file
    sections = scale["sections"]

    def rows(name: str) -> list[Row]:
        return sections.get(name, {}).get("rows", [])

    chart, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained", facecolor="white")
    _bytes(panels[0], [row for row in rows("bytes") if "sent" in row])
    _rates(panels[1], rows("rows"))
    _gains(panels[2], rows("rows"), rows("batching"))
    for panel in panels:
        panel.grid(alpha=0.3)
        if not panel.has_data():
            panel.text(0.5, 0.5, "not measured yet", ha="center", transform=panel.transAxes)
    where = {section["machine"] for name, section in sections.items() if name in ("rows", "batching")}
    if where:
        chart.suptitle(f"rows and gains: {', '.join(sorted(where))}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(chart)


def _bytes(panel: Any, rows: Sequence[Row]) -> None:
    if not rows:
        return
    bars = {"authors' gather,\nfp32": rows[0]["authors_mb"], "all-gather,\nbf16": rows[0]["gather_mb"]}
    names = {"all rows differ": "ours", "some rows are equal": "ours, some\nrows equal"}
    bars |= {names[row["what"]]: row["sent_mb"] for row in rows if row["what"] in names}
    colours = ["#999999", "#999999", COLOURS[0], COLOURS[0]]
    drawn = panel.bar(list(bars), list(bars.values()), color=colours[: len(bars)])
    panel.bar_label(drawn, [f"{value:.3g}" for value in bars.values()])
    panel.set(title=f"sent a rank and step\n({rows[0]['size']})", ylabel="MB")
    panel.title.set_fontsize(10)
    panel.tick_params(axis="x", labelsize=8)
    panel.margins(y=0.12)


def _lines(panel: Any, rows: Sequence[Row], key: str) -> None:
    for colour, what in zip(COLOURS, dict.fromkeys(row["what"] for row in rows), strict=False):
        points = [(row["prompts"], row[key]) for row in rows if row["what"] == what]
        panel.loglog(*zip(*points, strict=True), "o-", color=colour, label=what, base=10)
    counts = sorted({row["prompts"] for row in rows})
    panel.set_xticks(counts[::2], [str(count) for count in counts[::2]])
    panel.minorticks_off()
    panel.legend(fontsize=8)


def _rates(panel: Any, rows: Sequence[Row]) -> None:
    if rows:
        _lines(panel, rows, "rows_per_s")
        panel.set(xlabel="prompts decoded together", ylabel="rows a second")
        panel.set_title("rows through the model", fontsize=10)


def _gains(panel: Any, rows: Sequence[Row], files: Sequence[Row]) -> None:
    if rows:
        _lines(panel, rows, "gain")
        top = max(row["gain"] for row in [*rows, *files] if "gain" in row)
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= 1.5 * top]
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
        panel.set(xlabel="prompts decoded together", ylabel="times the rows a second of one")
    for row in files:
        if row["what"] == "batched, default budget":
            panel.axhline(row["gain"], color="#666666", linestyle=":", label="countdown, a whole file by run_file")
            panel.legend(fontsize=8)
    panel.set_title("gain over one prompt at a time", fontsize=10)
