"""The output of an experiment: tables (Markdown), one figure (PNG), and a summary with claims and verdicts (JSON)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from d5p4.store import write_json, write_text

from ..figures import save
from ..statistics import Figure, tail
from ..tables import Table, listed

# These colours of Okabe and Ito can be told apart by most colour-blind people. Methods also differ in marker and line.
STYLES: dict[str, dict[str, str]] = {
    name: {"color": color, "marker": marker, "linestyle": line}
    for name, color, marker, line in (
        ("independent", "#000000", "o", ":"),
        ("greedy beam", "#E69F00", "s", "--"),
        ("CAT, scores", "#F0E442", "^", "-."),
        ("CAT, tokens", "#D55E00", "v", "-."),
        ("diverse beam", "#56B4E9", "D", "--"),
        ("D5P4+", "#0072B2", "*", "-"),
        ("D5P4×", "#009E73", "X", "-"),
        ("tree (ours)", "#CC79A7", "p", "-"),
        ("independent, T", "#000000", "H", ":"),
    )
}
Verdict = Literal["holds", "does not hold", "not clear", "not measured"]
UNTESTED: Verdict = "not measured"


@dataclass(frozen=True)
class Evidence:
    """What figures say about a claim. `decided`, `within`, `every`, `some` and `agreed` make evidence.

    Multiply the half-widths of all intervals by one factor. The claim holds up to the factor `holds`, and does not hold
    up to the factor `fails`; at most one of them is above 0. The verdict is that of factor 1. The factor at which it
    changes also gives its p-value.
    """

    figures: tuple[Figure, ...]
    holds: float
    fails: float
    chances: tuple[int, int] = (1, 1)  # how many figures could make it hold, or fail, alone; `p` is corrected for this
    untested: bool = False  # whether a part of the claim cannot be tested at this scale

    def verdict(self, factor: float = 1.0) -> Verdict:
        if self.holds > factor:
            return "holds"
        if self.fails > factor:
            return "does not hold"
        return "not measured" if self.untested else "not clear"

    @property
    def factor(self) -> float:
        """The factor at which the verdict changes between decided and not clear; 0 if nothing decides the claim."""
        return max(self.holds, self.fails)

    @property
    def p(self) -> float | None:
        """The p-value of `factor` for the smallest number of units, times `chances`; None if there is no interval.

        An interval without width says that n units are equal. Then p is at least that of a sign test, 2^(1 - n).
        """
        if not self.figures or self.untested:
            return None
        units = min((figure.n for figure in self.figures if figure.n), default=0)
        equal = [2.0 ** (1 - figure.n) for figure in self.figures if figure.low == figure.high and figure.n]
        return min(1.0, max([tail(self.factor, units), *equal]) * self.chances[0 if self.holds >= self.fails else 1])


Judged = Evidence | Verdict  # exact counts and single measurements have no interval: a plain verdict


@dataclass(frozen=True)
class Claim:
    """A claim, the paper's evidence for it, our result and our verdict. Claims of ours begin with "Ours"."""

    claim: str
    paper: str
    ours: str
    verdict: Judged
    note: str = ""
    scale: float = 1.0  # the summary shows the figures of the verdict times this number

    def record(self) -> dict[str, Any]:
        evidence = _evidence(self.verdict)
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
        }


def positive(
    claim: str, paper: str, what: str, figures: Mapping[str, Figure], digits: int = 2, note: str = "", least: float = 0
) -> Claim:
    """The claim that all of these figures are above `least`. `what` says what they are; their names are the keys."""
    verdict = every(decided(figure, least) for figure in figures.values())
    return Claim(claim, paper, f"{what}: {listed(figures, figures.values(), digits)}", verdict, note)


@dataclass
class Drawing:
    tables: list[Table]
    figure: Any = None  # a matplotlib figure
    figures: dict[str, Any] = field(default_factory=dict)  # numbers for the summary, by name; see `plain`
    claims: list[Claim] = field(default_factory=list)

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        head = f"# {about['title']}\n\nIn the paper: {about['paper']}. {about['made']}"
        write_text(folder / "table.md", "\n\n".join([head, *(table.markdown() for table in self.tables)]) + "\n")
        if self.figure is not None:
            save(self.figure, folder / "figure.png")
        summary = dict(about) | {"figures": plain(self.figures), "claims": [claim.record() for claim in self.claims]}
        write_json(folder / "summary.json", summary)


def plain(value: Any) -> Any:
    """Prepare a value for JSON: a `Figure` becomes [value, low, high], and floats are rounded to six digits."""
    if isinstance(value, Figure):
        return plain([float(x) for x in (value.value, value.low, value.high)])
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    return value


# --- evidence ---


def _evidence(judged: Judged) -> Evidence:
    if isinstance(judged, Evidence):
        return judged
    holds, fails = (math.inf if judged == word else 0.0 for word in ("holds", "does not hold"))
    return Evidence((), holds, fails, untested=judged == "not measured")


def decided(figure: Figure, above: float = 0.0) -> Evidence:
    """The claim that a figure is above a number. It holds if the whole interval is, and fails if the interval is below.

    For a claim that a figure is below 0, give `-figure`.
    """
    if math.isnan(figure.low) or math.isnan(figure.high):
        return Evidence((figure,), 0.0, 0.0)
    holds = _factor(figure.value - above, figure.value - figure.low)
    fails = _factor(above - figure.value, figure.high - figure.value)
    return Evidence((figure,), holds, fails)


def within(figure: Figure, margin: float) -> Evidence:
    """The claim that a figure is between -margin and margin. It fails if the whole interval is beyond one of them."""
    return replace(every([decided(figure, -margin), decided(-figure, -margin)]), figures=(figure,), chances=(1, 1))


def every(parts: Iterable[Judged]) -> Evidence:
    """The claim that all parts hold. It does not hold if one part does not hold."""
    evidence = [_evidence(part) for part in parts]
    holds, fails = min(part.holds for part in evidence), max(part.fails for part in evidence)
    chances = max(part.chances[0] for part in evidence), sum(part.chances[1] for part in evidence)
    return _joined(evidence, holds, fails, chances)


def some(parts: Iterable[Judged]) -> Evidence:
    """The claim that one part or more holds. It does not hold if no part holds."""
    return _opposite(every([_opposite(_evidence(part)) for part in parts]))


def agreed(judges: Iterable[Judged]) -> Evidence:
    """One claim under several judges or conditions: the verdict that all share, or "not clear" if they differ."""
    evidence = [_evidence(judge) for judge in judges]
    holds, fails = min(judge.holds for judge in evidence), min(judge.fails for judge in evidence)
    chances = max(judge.chances[0] for judge in evidence), max(judge.chances[1] for judge in evidence)
    return _joined(evidence, holds, fails, chances)


def all_decided(differences: Iterable[Figure]) -> Evidence:
    return every([decided(difference) for difference in differences])


def _factor(distance: float, half_width: float) -> float:
    """How many half-widths fit between a value and a border; 0 if the value is on the wrong side of the border."""
    return 0.0 if not distance > 0 else distance / half_width if half_width > 0 else math.inf


def _joined(parts: Sequence[Evidence], holds: float, fails: float, chances: tuple[int, int]) -> Evidence:
    figures = tuple(figure for part in parts for figure in part.figures)
    return Evidence(figures, holds, fails, chances, any(part.untested for part in parts))


def _opposite(evidence: Evidence) -> Evidence:
    return replace(evidence, holds=evidence.fails, fails=evidence.holds, chances=evidence.chances[::-1])
