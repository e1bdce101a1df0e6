"""The figures of the lab (matplotlib): one look for all of them, and files that depend on the numbers alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d5p4.errors import D5P4Error

from .statistics import Figure

LOOK: Any = {  # settings of matplotlib
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "legend.frameon": False,
    "lines.markersize": 6,
    "savefig.dpi": 85,
    "svg.hashsalt": "d5p4",
    "svg.fonttype": "none",  # text stays text
}
EDGE: dict[str, Any] = {"markeredgecolor": "black", "markeredgewidth": 0.4}  # a thin black edge around markers


def pyplot() -> Any:
    """Return matplotlib.pyplot with our look, set up to draw into files only."""
    try:
        import matplotlib
    except ImportError as reason:
        raise D5P4Error("figures need matplotlib: pip install -e '.[lab]'") from reason
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(LOOK)
    return plt


def save(chart: Any, path: Path) -> None:
    """Write a figure of matplotlib to a .png or .svg file and close it. The same numbers give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, metadata={"Date" if path.suffix == ".svg" else "Software": None})
    pyplot().close(chart)


def bars(figures: Sequence[Figure]) -> list[list[float]]:
    """Return the lengths [2][n] of the error bars below and above the n values, as matplotlib expects them."""
    return [[max(0.0, f.value - f.low) for f in figures], [max(0.0, f.high - f.value) for f in figures]]
