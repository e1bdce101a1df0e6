"""Writes the output of an experiment: tables (Markdown), one figure (PNG) and a summary with claims (JSON)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from d5p4.errors import D5P4Error
from d5p4.store import write_json, write_text

from ..statistics import Figure

LARGEST_FIGURE = 200_000  # the file of a figure has at most this many bytes
# These colours of Okabe and Ito can be told apart by most colour-blind people. Methods also differ in marker and line.
STYLES: dict[str, dict[str, str]] = {
    "independent": {"color": "#000000", "marker": "o", "linestyle": ":"},
    "greedy beam": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    "best of n": {"color": "#999999", "marker": "P", "linestyle": "--"},
    "CAT, scores": {"color": "#F0E442", "marker": "^", "linestyle": "-."},
    "CAT, tokens": {"color": "#D55E00", "marker": "v", "linestyle": "-."},
    "diverse beam": {"color": "#56B4E9", "marker": "D", "linestyle": "--"},
    "D5P4+": {"color": "#0072B2", "marker": "*", "linestyle": "-"},
    "D5P4×": {"color": "#009E73", "marker": "X", "linestyle": "-"},
    "D5P4^P": {"color": "#009E73", "marker": "X", "linestyle": "-"},
    "D5P3": {"color": "#CC79A7", "marker": "h", "linestyle": "-"},
    "E-SMC": {"color": "#D55E00", "marker": "v", "linestyle": "-."},
    "random": {"color": "#999999", "marker": ".", "linestyle": ":"},
    "distinct": {"color": "#D55E00", "marker": "d", "linestyle": "-"},
}

LOOK: Any = {  # settings of matplotlib
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "legend.frameon": False,
    "lines.markersize": 6,
}

EDGE: dict[str, Any] = {"markeredgecolor": "black", "markeredgewidth": 0.4}  # a thin black edge around markers

Verdict = Literal["holds", "does not hold", "not clear", "not testable at this scale"]


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _line(self.columns), _line(["---"] * len(self.columns))]
        lines += [_line(row) for row in self.rows]
        return "\n".join(lines + (["", self.note] if self.note else []))


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the paper's evidence for it, our result and our verdict."""

    claim: str
    paper: str
    ours: str
    verdict: Verdict
    note: str = ""


@dataclass
class Drawing:
    tables: list[Table]
    figure: Any = None  # a matplotlib figure
    figures: dict[str, Any] = field(default_factory=dict)  # numbers for the summary, by name; see `plain`
    claims: list[Claim] = field(default_factory=list)

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write table.md, figure.png and summary.json into a folder."""
        head = [f"# {about['title']}", "", f"In the paper: {about['paper']}. {about['made']}", ""]
        write_text(folder / "table.md", "\n".join(head + ["\n\n".join(table.markdown() for table in self.tables), ""]))
        if self.figure is not None:
            file = folder / "figure.png"
            self.figure.savefig(file, dpi=110)
            _shrink(file)
            if file.stat().st_size > LARGEST_FIGURE:
                raise D5P4Error(
                    f"{file.name} has {file.stat().st_size} bytes, more than {LARGEST_FIGURE}; draw fewer points"
                )
            pyplot().close(self.figure)
        summary = dict(about) | {"figures": plain(self.figures), "claims": [asdict(claim) for claim in self.claims]}
        write_json(folder / "summary.json", summary)


def _shrink(file: Path) -> None:
    """Make the file of a figure smaller by using only 256 colours."""
    from PIL import Image  # comes with matplotlib

    with Image.open(file) as image:
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(cell, cells))} |"


def cell(text: object) -> str:
    """Put a text on one line and escape its vertical bars, so that the text fits into a Markdown table."""
    return " ".join(str(text).split()).replace("|", r"\|")


def plain(value: Any) -> Any:
    """Prepare a value for JSON: a `Figure` becomes [value, low, high], and floats are rounded to six digits."""
    if isinstance(value, Figure):
        return [plain(float(x)) for x in (value.value, value.low, value.high)]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else value
        return [plain(item) for item in items] if isinstance(items, (list, tuple)) else plain(items)
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    return value


def shown(figure: Figure, digits: int = 2, scale: float = 1.0) -> str:
    """Format a figure and its 95 % interval as "41.2 [39.0, 43.3]", or its value alone if there is no interval."""
    if figure.low != figure.low:
        return f"{scale * figure.value:.{digits}f}"
    return f"{scale * figure.value:.{digits}f} [{scale * figure.low:.{digits}f}, {scale * figure.high:.{digits}f}]"


def listed(names: Iterable[object], figures: Iterable[Figure], digits: int = 2, scale: float = 1.0) -> str:
    """Write named figures on one line, such as "judge 0.31 [0.28, 0.34]; smollm2 0.29 [0.26, 0.32]"."""
    return "; ".join(f"{name} {shown(f, digits, scale)}" for name, f in zip(names, figures, strict=True))


def pyplot() -> Any:
    """Return matplotlib.pyplot with our style, set up to draw into files only."""
    try:
        import matplotlib
    except ImportError as reason:
        raise D5P4Error("figures need matplotlib: pip install -e '.[lab]'") from reason
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(LOOK)
    return plt


def bars(figures: Sequence[Figure]) -> list[list[float]]:
    """Return the lengths [2][n] of the error bars below and above the n values, as matplotlib expects them."""
    return [[max(0.0, f.value - f.low) for f in figures], [max(0.0, f.high - f.value) for f in figures]]


def decided(difference: Figure) -> Verdict:
    """Return "holds" if the interval lies above 0, "does not hold" if the interval lies below 0, else "not clear"."""
    return "holds" if difference.low > 0 else "does not hold" if difference.high < 0 else "not clear"


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict that all judges or conditions share, or "not clear" if the verdicts differ."""
    return verdicts[0] if len(set(verdicts)) == 1 else "not clear"


def every(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim that has several parts: the worst of the verdicts on its parts."""
    for worst in ("does not hold", "not clear", "not testable at this scale"):
        if worst in verdicts:
            return worst
    return "holds"


def all_decided(differences: Iterable[Figure]) -> Verdict:
    """Return the verdict on the claim that all of these differences are above 0."""
    return every([decided(difference) for difference in differences])
