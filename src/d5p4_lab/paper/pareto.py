"""Quality against diversity in open-ended generation: fronts of every method, and how their knobs move along them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..statistics import figure, from_resamples
from .drawing import STYLES, Claim, Drawing, Verdict, decided, every, pyplot, shown
from .open_ended import BOX, GREEDY, INDEPENDENT, PAPER, sweeps
from .plane import PLANE, Means, area, by_judges, curves, draw_plane, means, perplexity, plane_table, points, unbiased
from .setup import Case, Experiment, Setup

SEARCH = ("D5P4+", "D5P4×", "diverse beam", "CAT, scores", "CAT, tokens")
STABLE = np.log(1.05)  # perplexity within 5 %
ALIKE = 0.25  # of the area
PAPER_FRONTS = "Fig. pareto: D5P4+ and D5P4× lowest, then DivBS, then CAT"


def draw(setup: Setup) -> Drawing:
    found = {judge: means(setup, setup.cases, judge) for judge in setup["judges"]}
    lines = curves(setup.cases)
    areas = {judge: _areas(m, lines) for judge, m in found.items()}
    orders = [(a, b) for a in ("D5P4+", "D5P4×") for b in ("diverse beam", "CAT, scores", "CAT, tokens")]
    orders += [("diverse beam", "CAT, scores"), ("diverse beam", "CAT, tokens")]
    claims = [
        *(_beats_independent(found, lines[name]) for name in SEARCH),
        *(_order(setup, areas, better, worse) for better, worse in orders),
        _alike(setup, areas),
        _stable_first(found, lines["D5P4+"]),
        *(_rises_later(setup, found, lines[name]) for name in SEARCH if len(lines[name]) > 2),
    ]
    numbers = {
        "area": {judge: {name: from_resamples(a) for name, a in each.items()} for judge, each in areas.items()}
    }
    told = "; ".join(
        f"{name} {', '.join(shown(from_resamples(areas[judge][name]), 4) for judge in setup['judges'])}"
        for name in SEARCH
    )
    note = f"Area dominated, up to the corner of independent sampling's perplexity and greedy beam's cosine: {told}"
    table = plane_table(setup, "Every point of the sweeps", setup.cases, note + f" ({', '.join(setup['judges'])}).")
    return Drawing([table], _figure(setup, lines), numbers, claims)


def _corner(m: Means) -> np.ndarray:
    """Independent sampling's perplexity, and the cosine of greedy beam search or of independent sampling."""
    return np.array([m[INDEPENDENT][0, 0], max(m[INDEPENDENT][0, 1], m[GREEDY][0, 1])])


def _areas(m: Means, lines: dict[str, list[Case]]) -> dict[str, np.ndarray]:
    # Greedy beam search is where every knob at zero ends, so it belongs to each front.
    fronts = {name: [m[GREEDY], *(m[case.name] for case in lines[name])] for name in SEARCH}
    return {name: unbiased(area(front, _corner(m))) for name, front in fronts.items()}


def _order(setup: Setup, areas: Mapping[str, Mapping[str, np.ndarray]], better: str, worse: str) -> Claim:
    differences = [from_resamples(each[better] - each[worse]) for each in areas.values()]
    told, verdict = by_judges(setup, differences, [decided(d) for d in differences])
    return Claim(f"The front of {better} is better than that of {worse}", PAPER_FRONTS, f"area more: {told}", verdict)


def _alike(setup: Setup, areas: Mapping[str, Mapping[str, np.ndarray]]) -> Claim:
    differences = [from_resamples(each["D5P4+"] - each["D5P4×"]) for each in areas.values()]
    margins = [ALIKE * each["D5P4+"][0] for each in areas.values()]
    close: list[Verdict] = [
        "holds" if -m < d.low and d.high < m else "does not hold" if d.low > 0 or d.high < 0 else "not clear"
        for d, m in zip(differences, margins, strict=True)
    ]
    told, verdict = by_judges(setup, differences, close)
    claim = f"D5P4+ and D5P4× reach fronts alike (within {ALIKE:.0%} of the area)"
    return Claim(claim, PAPER_FRONTS, f"area of D5P4+ minus that of D5P4×: {told}", verdict)


def _judged(found: Mapping[str, Means], rule: Callable[[Means, Case], Verdict], line: Sequence[Case]) -> (
    tuple[list[Case], Verdict]
):
    """Values that pass a rule under every judge, and the verdict: one passes, all fail surely, or neither."""
    each = {case.name: [rule(m, case) for m in found.values()] for case in line}
    passed = [case for case in line if set(each[case.name]) == {"holds"}]
    failed = all("does not hold" in verdicts for verdicts in each.values())
    return passed, "holds" if passed else "does not hold" if failed else "not clear"


def _values(cases: Sequence[Case]) -> str:
    return ", ".join(case.name.split(", ")[-1] for case in cases) or "no value"


def _beats_independent(found: Mapping[str, Means], line: Sequence[Case]) -> Claim:
    def rule(m: Means, case: Case) -> Verdict:
        apart = [from_resamples(column) for column in (m[INDEPENDENT] - m[case.name]).T]
        return every([decided(d) for d in apart])

    passed, verdict = _judged(found, rule, line)
    return Claim(
        f"{line[0].group} beats independent sampling in perplexity and in cosine at once",
        "Fig. pareto: all search methods do",
        f"values surely better in both under all judges: {_values(passed)}",
        verdict,
        "every value is surely worse in one of the two" if verdict == "does not hold" else "",
    )


def _stable_first(found: Mapping[str, Means], line: Sequence[Case]) -> Claim:
    def rule(m: Means, case: Case) -> Verdict:
        nats, cosine = (from_resamples(column) for column in (m[line[0].name] - m[case.name]).T)
        return every([decided(nats.plus(STABLE)), decided(cosine)])

    passed, verdict = _judged(found, rule, line[1:])
    return Claim(
        "A first regime: larger β makes texts more different while perplexity stays",
        "Fig. pareto and dynamics: cosine falls while perplexity stays",
        f"values of β with a cosine surely lower, and a perplexity surely less than 5 % higher, than at "
        f"{line[0].value:g}: {_values(passed)}",
        verdict,
    )


def _rises_later(setup: Setup, found: Mapping[str, Means], line: Sequence[Case]) -> Claim:
    low, middle, high = line[0], line[(len(line) - 1) // 2], line[-1]

    def slope(m: Means, a: Case, b: Case) -> np.ndarray:
        """Rise of log perplexity a decade of the parameter: the two parts of the sweep need not be equally wide."""
        decades = np.log10((b.value or 0) / (a.value or 1))
        return (m[b.name] - m[a.name])[:, 0] / decades if decades else np.full(len(m[a.name]), np.nan)

    differences = [from_resamples(slope(m, middle, high) - slope(m, low, middle)) for m in found.values()]
    told, verdict = by_judges(setup, differences, [decided(d) for d in differences], 3)
    return Claim(
        f"A second regime of {line[0].group}: perplexity rises faster in the upper part of the sweep",
        "Fig. pareto: beyond a threshold perplexity rises sharply, for all methods",
        f"rise of log perplexity a decade above {middle.value:g} minus that below: {told}",
        verdict,
        "split at the middle value; where the threshold lies decides much",
    )


def _figure(setup: Setup, lines: dict[str, list[Case]]) -> object:
    plt = pyplot()
    judge = setup["judges"][-1]
    picture, axes = plt.subplot_mosaic([["plane", "ppl"], ["plane", "cos"]], figsize=(10.5, 4.8), width_ratios=(1.5, 1))
    draw_plane(axes["plane"], setup, setup.cases, judge, name_ends_of=("D5P4+", "D5P4×", "diverse beam", "CAT, scores"))
    axes["plane"].legend(fontsize=8)
    axes["plane"].set_title("Fronts")
    found = points(setup, setup.cases, judge)
    for name in ("D5P4+", "D5P4×", "diverse beam", "CAT, scores"):
        values = [case.value or 0 for case in lines[name]]
        ppl = [perplexity(found[case.name][:, 0]).value for case in lines[name]]
        cos = [figure(found[case.name][:, 1]).value for case in lines[name]]
        axes["ppl"].plot(values, ppl, **STYLES[name], linewidth=1.2)
        axes["cos"].plot(values, cos, **STYLES[name], linewidth=1.2)
    for axis in (axes["ppl"], axes["cos"]):
        axis.set_xscale("log")
    axes["ppl"].set_title("What the knob does")
    axes["ppl"].set_ylabel("perplexity")
    axes["cos"].set_ylabel("S-COS")
    axes["cos"].set_xlabel("value of β, α or T")
    return picture


EXPERIMENT = Experiment(
    "pareto", "Quality against diversity, writing from nothing", "Figures pareto and dynamics",
    {"box": BOX, "paper": PAPER}, draw, sweeps, PLANE, scorers=("ppl", "cos"),
)  # fmt: skip
