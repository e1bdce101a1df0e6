"""Writes the output of an experiment: tables (Markdown), one figure (PNG) and a summary with claims (JSON)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from d5p4.errors import D5P4Error
from d5p4.store import write_json, write_text

from ..statistics import Figure, tail

LARGEST_FIGURE = 200_000  # the file of a figure has at most this many bytes
# These colours of Okabe and Ito can be told apart by most colour-blind people. Methods also differ in marker and line.
STYLES: dict[str, dict[str, str]] = {
    "independent": {"color": "#000000", "marker": "o", "linestyle": ":"},
    "greedy beam": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    "best of n": {"color": "#999999", "marker": "P", "linestyle": "--"},
    "best of n, internal": {"color": "#999999", "marker": "d", "linestyle": "-."},
    "best of n, F1 oracle": {"color": "#999999", "marker": "o", "linestyle": ":"},
    "CAT, scores": {"color": "#F0E442", "marker": "^", "linestyle": "-."},
    "CAT, tokens": {"color": "#D55E00", "marker": "v", "linestyle": "-."},
    "diverse beam": {"color": "#56B4E9", "marker": "D", "linestyle": "--"},
    "D5P4+": {"color": "#0072B2", "marker": "*", "linestyle": "-"},
    "D5P4×": {"color": "#009E73", "marker": "X", "linestyle": "-"},
    "D5P4^P": {"color": "#009E73", "marker": "X", "linestyle": "-"},
    "D5P3": {"color": "#CC79A7", "marker": "h", "linestyle": "-"},
    "E-SMC": {"color": "#D55E00", "marker": "v", "linestyle": "-."},
    "E-SMC, textbook": {"color": "#E69F00", "marker": "^", "linestyle": "-."},
    "random": {"color": "#999999", "marker": ".", "linestyle": ":"},
    "distinct": {"color": "#D55E00", "marker": "d", "linestyle": "-"},
    "tree (ours)": {"color": "#CC79A7", "marker": "p", "linestyle": "-"},
    "tree (ours), T 0.7": {"color": "#CC79A7", "marker": "h", "linestyle": "--"},
    "independent, T": {"color": "#000000", "marker": "H", "linestyle": ":"},
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

LARGEST_FACTOR = 1e6  # stands for an interval without width, which stays decided at every factor

Verdict = Literal["holds", "does not hold", "not clear", "not testable at this scale"]


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        parts = [f"### {self.title}", markdown(self.columns, self.rows), self.note]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Evidence:
    """What figures say about a claim. `decided`, `within`, `every`, `some` and `agreed` make evidence.

    Multiply the half-widths of all intervals by one factor. The claim holds up to the factor `holds`, and does not hold
    up to the factor `fails`; at most one of them is above 0. The verdict is that of factor
    1, the intervals as they are. The factor at which a verdict changes also gives its p-value, and the sample size that
    would decide the claim: n units give intervals as wide as 1/√n.

    chances   by verdict: how many figures had the chance to bring it about alone; `p` is corrected for this number
    reach     how far the interval of the figure that decides last reaches beyond the border that it would have to leave
    untested  whether a part of the claim cannot be tested at this scale
    """

    figures: tuple[Figure, ...]
    holds: float
    fails: float
    chances: tuple[int, int] = (1, 1)  # for "holds", for "does not hold"
    reach: float = 0.0
    untested: bool = False

    def verdict(self, factor: float = 1.0) -> Verdict:
        """Return the verdict after the half-widths of all intervals are multiplied by a factor."""
        if self.holds > factor:
            return "holds"
        if self.fails > factor:
            return "does not hold"
        return "not testable at this scale" if self.untested else "not clear"

    @property
    def factor(self) -> float:
        """The factor at which the verdict changes between decided and not clear; 0 if nothing decides the claim."""
        return max(self.holds, self.fails)

    @property
    def p(self) -> float | None:
        """The p-value of `factor` (see `statistics.tail`), times `chances`; None if there is no interval.

        If figures have different numbers of units, the smallest counts, whose tails are the heaviest. An interval
        without width says that n units are equal. Then p is at least that of a sign test, 2^(1 - n).
        """
        if not self.figures or self.untested:
            return None
        units = min((figure.n for figure in self.figures if figure.n), default=0)
        equal = [2.0 ** (1 - figure.n) for figure in self.figures if figure.low == figure.high and figure.n]
        return min(1.0, max([tail(self.factor, units), *equal]) * self.chances[0 if self.holds >= self.fails else 1])


Judged = Evidence | Verdict
"""A verdict, with its evidence if there is any. Exact counts and single measurements have no interval: a plain verdict.
"""


@dataclass(frozen=True)
class Claim:
    """A claim, the paper's evidence for it, our result and our verdict. Claims of ours begin with "Ours".

    scale  `ours` shows the figures of the verdict times this number
    """

    claim: str
    paper: str
    ours: str
    verdict: Judged
    note: str = ""
    scale: float = 1.0

    def record(self) -> dict[str, Any]:
        """The claim as summary.json has it; `claims.py` makes the page of claims from these records."""
        evidence = as_evidence(self.verdict)
        figures = [[self.scale * f.value, *sorted((self.scale * f.low, self.scale * f.high))] for f in evidence.figures]
        return {
            "claim": self.claim,
            "paper": self.paper,
            "ours": self.ours,
            "verdict": evidence.verdict(),
            "note": self.note,
            "figures": plain(figures),
            "n": sorted({f.n for f in evidence.figures}),
            "p": None if evidence.p is None else float(f"{evidence.p:.3g}"),
            "factor": plain(min(evidence.factor, LARGEST_FACTOR)),
            "leans": "for" if evidence.holds >= evidence.fails else "against",
            "reach": plain(abs(self.scale) * evidence.reach),
        }


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
            self.figure.savefig(file, dpi=85)
            file.write_bytes(with_few_colours(file.read_bytes()))
            if file.stat().st_size > LARGEST_FIGURE:
                raise D5P4Error(
                    f"{file.name} has {file.stat().st_size} bytes, more than {LARGEST_FIGURE}; draw fewer points"
                )
            pyplot().close(self.figure)
        summary = dict(about) | {"figures": plain(self.figures), "claims": [claim.record() for claim in self.claims]}
        write_json(folder / "summary.json", summary)


def with_few_colours(picture: bytes) -> bytes:
    """Return a PNG with 64 colours. A plot then has about a third of the bytes and looks the same."""
    from PIL import Image  # comes with matplotlib

    small = BytesIO()
    plot = Image.open(BytesIO(picture)).convert("RGB")
    plot.quantize(64, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


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


def as_evidence(judged: Judged) -> Evidence:
    """Return evidence unchanged. A plain verdict becomes evidence without figures, whatever the factor."""
    if isinstance(judged, Evidence):
        return judged
    holds, fails = (math.inf if judged == word else 0.0 for word in ("holds", "does not hold"))
    return Evidence((), holds, fails, untested=judged == "not testable at this scale")


def decided(figure: Figure, above: float = 0.0) -> Evidence:
    """The claim that a figure is above a number. It holds if the whole interval is, and fails if the interval is below.

    An interval that touches the number decides nothing. For a claim that a figure is below 0, give `-figure`.
    """
    if math.isnan(figure.low) or math.isnan(figure.high):
        return Evidence((figure,), 0.0, 0.0)
    holds = _factor(figure.value - above, figure.value - figure.low)
    fails = _factor(above - figure.value, figure.high - figure.value)
    return Evidence((figure,), holds, fails, reach=max(above - figure.low, figure.high - above))


def within(figure: Figure, margin: float) -> Evidence:
    """The claim that a figure is between -margin and margin. It fails if the whole interval is beyond one of them."""
    return replace(every([decided(figure, -margin), decided(-figure, -margin)]), figures=(figure,), chances=(1, 1))


def every(parts: Iterable[Judged]) -> Evidence:
    """The claim that all parts hold. It does not hold if one part does not hold."""
    evidence = [as_evidence(part) for part in parts]
    holds, fails = min(part.holds for part in evidence), max(part.fails for part in evidence)
    chances = max(part.chances[0] for part in evidence), sum(part.chances[1] for part in evidence)
    last = max(evidence, key=lambda part: part.fails) if fails > holds else min(evidence, key=lambda part: part.holds)
    return _joined(evidence, holds, fails, chances, last)


def some(parts: Iterable[Judged]) -> Evidence:
    """The claim that one part or more holds. It does not hold if no part holds."""
    return _opposite(every([_opposite(as_evidence(part)) for part in parts]))


def agreed(judges: Iterable[Judged]) -> Evidence:
    """One claim under several judges or conditions: the verdict that all share, or "not clear" if they differ."""
    evidence = [as_evidence(judge) for judge in judges]
    holds, fails = min(judge.holds for judge in evidence), min(judge.fails for judge in evidence)
    chances = max(judge.chances[0] for judge in evidence), max(judge.chances[1] for judge in evidence)
    return _joined(evidence, holds, fails, chances, min(evidence, key=lambda judge: judge.factor))


def all_decided(differences: Iterable[Figure]) -> Evidence:
    """The claim that all of these differences are above 0."""
    return every([decided(difference) for difference in differences])


def _factor(distance: float, half_width: float) -> float:
    """How many half-widths fit between a value and a border; 0 if the value is not on the right side of the border."""
    if not distance > 0:
        return 0.0
    return distance / half_width if half_width > 0 else math.inf


def _joined(
    parts: Sequence[Evidence], holds: float, fails: float, chances: tuple[int, int], last: Evidence
) -> Evidence:
    figures = tuple(figure for part in parts for figure in part.figures)
    return Evidence(figures, holds, fails, chances, last.reach, any(part.untested for part in parts))


def _opposite(evidence: Evidence) -> Evidence:
    chances = evidence.chances[::-1]
    return replace(evidence, holds=evidence.fails, fails=evidence.holds, chances=chances)
