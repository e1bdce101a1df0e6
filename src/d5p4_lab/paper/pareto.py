"""Quality against diversity of unprompted texts: each method's front (its best trade-offs) and parameter effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..statistics import figure, from_resamples
from .drawing import STYLES, Claim, Drawing, Evidence, agreed, all_decided, decided, every, pyplot, shown, some, within
from .open_ended import BOX, GREEDY, INDEPENDENT, PAPER, sweeps
from .plane import PLANE, Means, area, by_judges, curves, draw_plane, means, perplexity, plane_table, points, unbiased
from .setup import Case, Experiment, Setup

SEARCH = ("D5P4+", "D5P4×", "diverse beam", "CAT, scores", "CAT, tokens")
STABLE = np.log(1.05)  # perplexity counts as stable if it rises by less than 5 %
ALIKE = 0.25  # two fronts count as alike if their areas differ by less than this share of the area of D5P4+
PAPER_FRONTS = "Fig. pareto: D5P4+ and D5P4× lowest, then DivBS, then CAT"


def draw(setup: Setup) -> Drawing:
    by_judge = {judge: means(setup, setup.cases, judge) for judge in setup["judges"]}
    lines = curves(setup.cases)
    areas = {judge: _areas(m, lines) for judge, m in by_judge.items()}
    orders = [(a, b) for a in ("D5P4+", "D5P4×") for b in ("diverse beam", "CAT, scores", "CAT, tokens")]
    orders += [("diverse beam", "CAT, scores"), ("diverse beam", "CAT, tokens")]
    claims = [
        *(_beats_independent(by_judge, lines[name]) for name in SEARCH),
        *(_order(setup, areas, better, worse) for better, worse in orders),
        _alike(setup, areas),
        _stable_first(by_judge, lines["D5P4+"]),
        *(_rises_later(setup, by_judge, lines[name]) for name in SEARCH if len(lines[name]) > 2),
    ]
    figures = {judge: {name: from_resamples(a) for name, a in by_method.items()} for judge, by_method in areas.items()}
    sizes = "; ".join(f"{name} {', '.join(shown(figures[judge][name], 4) for judge in figures)}" for name in SEARCH)
    note = (
        "A better front dominates a larger area, up to the corner at independent sampling's perplexity and greedy beam "
        f"search's cosine. The areas, with perplexity under {' and under '.join(figures)}, are: {sizes}."
    )
    table = plane_table(setup, "Every point of the sweeps", setup.cases, note)
    return Drawing([table], _figure(setup, lines), {"area": figures}, claims)


def _corner(m: Means) -> np.ndarray:
    """Return a point [nats, cosine], the corner. The area of a front is the area between the front and the corner.

    The nats come from independent sampling. The cosine comes from independent sampling or greedy beam search,
    whichever cosine is larger.
    """
    return np.array([m[INDEPENDENT][0, 0], max(m[INDEPENDENT][0, 1], m[GREEDY][0, 1])])


def _areas(m: Means, lines: dict[str, list[Case]]) -> dict[str, np.ndarray]:
    # Every method with a parameter near 0 acts like greedy beam search, which is therefore a point of every front.
    fronts = {name: [m[GREEDY], *(m[case.name] for case in lines[name])] for name in SEARCH}
    return {name: unbiased(area(front, _corner(m))) for name, front in fronts.items()}


def _order(setup: Setup, areas: Mapping[str, Mapping[str, np.ndarray]], better: str, worse: str) -> Claim:
    differences = [from_resamples(by_method[better] - by_method[worse]) for by_method in areas.values()]
    text, verdict = by_judges(setup, differences, [decided(d) for d in differences])
    claim = f"The front of {better} is better than that of {worse}"
    return Claim(claim, PAPER_FRONTS, f"area of {better} minus that of {worse}: {text}", verdict)


def _alike(setup: Setup, areas: Mapping[str, Mapping[str, np.ndarray]]) -> Claim:
    differences = [from_resamples(by_method["D5P4+"] - by_method["D5P4×"]) for by_method in areas.values()]
    margins = [ALIKE * by_method["D5P4+"][0] for by_method in areas.values()]
    close = [within(d, margin) for d, margin in zip(differences, margins, strict=True)]
    text, evidence = by_judges(setup, differences, close)
    claim = f"The fronts of D5P4+ and D5P4× are alike (within {ALIKE:.0%} of the area)"
    return Claim(claim, PAPER_FRONTS, f"area of D5P4+ minus that of D5P4×: {text}", evidence)


def _judged(
    by_judge: Mapping[str, Means], rule: Callable[[Means, Case], Evidence], line: Sequence[Case]
) -> tuple[list[Case], Evidence]:
    """Return the cases for which a rule holds under all judges, and the evidence that there is such a case."""
    by_case = [agreed(rule(m, case) for m in by_judge.values()) for case in line]
    passed = [case for case, evidence in zip(line, by_case, strict=True) if evidence.verdict() == "holds"]
    return passed, some(by_case)


def _values(cases: Sequence[Case]) -> str:
    return ", ".join(case.name.split(", ")[-1] for case in cases) or "none"


def _beats_independent(by_judge: Mapping[str, Means], line: Sequence[Case]) -> Claim:
    def rule(m: Means, case: Case) -> Evidence:
        apart = [from_resamples(column) for column in (m[INDEPENDENT] - m[case.name]).T]
        return all_decided(apart)

    passed, evidence = _judged(by_judge, rule, line)
    return Claim(
        f"{line[0].group} beats independent sampling in perplexity and in cosine at once",
        "Fig. pareto: all search methods beat it",
        f"parameter values that are surely better in both, under all judges: {_values(passed)}",
        evidence,
        "every value is surely worse in perplexity or in cosine" if evidence.verdict() == "does not hold" else "",
    )


def _stable_first(by_judge: Mapping[str, Means], line: Sequence[Case]) -> Claim:
    def rule(m: Means, case: Case) -> Evidence:
        nats, cosine = (from_resamples(column) for column in (m[line[0].name] - m[case.name]).T)
        return every([decided(nats, -STABLE), decided(cosine)])

    passed, evidence = _judged(by_judge, rule, line[1:])
    return Claim(
        "A first regime: larger β makes texts more different while perplexity stays the same",
        "Fig. pareto and dynamics: cosine falls while perplexity stays the same",
        f"values of β whose cosine is surely lower than at {line[0].value:g} and whose perplexity is surely less than "
        f"5 % higher: {_values(passed)}",
        evidence,
    )


def _rises_later(setup: Setup, by_judge: Mapping[str, Means], line: Sequence[Case]) -> Claim:
    low, middle, high = line[0], line[(len(line) - 1) // 2], line[-1]

    def slope(m: Means, a: Case, b: Case) -> np.ndarray:
        """The rise of log perplexity from case `a` to case `b`, divided by log10 of (b's value / a's value)."""
        decades = np.log10((b.value or 0) / (a.value or 1))
        return (m[b.name] - m[a.name])[:, 0] / decades if decades else np.full(len(m[a.name]), np.nan)

    differences = [from_resamples(slope(m, middle, high) - slope(m, low, middle)) for m in by_judge.values()]
    text, verdict = by_judges(setup, differences, [decided(d) for d in differences], 3)
    return Claim(
        f"A second regime of {line[0].group}: perplexity rises faster in the upper part of the sweep",
        "Fig. pareto: beyond a threshold perplexity rises sharply, for all methods",
        f"rise of log perplexity per decade above {middle.value:g} minus the rise below {middle.value:g}: {text}",
        verdict,
        "the sweep is split at its middle value; another threshold could change the verdict",
    )


def _figure(setup: Setup, lines: dict[str, list[Case]]) -> object:
    plt = pyplot()
    judge = setup["judges"][-1]
    picture, axes = plt.subplot_mosaic([["plane", "ppl"], ["plane", "cos"]], figsize=(10.5, 4.8), width_ratios=(1.5, 1))
    draw_plane(axes["plane"], setup, setup.cases, judge, name_ends_of=("D5P4+", "D5P4×", "diverse beam", "CAT, scores"))
    axes["plane"].legend(fontsize=8)
    axes["plane"].set_title("Fronts")
    by_case = points(setup, setup.cases, judge)
    for name in ("D5P4+", "D5P4×", "diverse beam", "CAT, scores"):
        values = [case.value or 0 for case in lines[name]]
        ppl = [perplexity(by_case[case.name][:, 0]).value for case in lines[name]]
        cos = [figure(by_case[case.name][:, 1]).value for case in lines[name]]
        axes["ppl"].plot(values, ppl, **STYLES[name], linewidth=1.2)
        axes["cos"].plot(values, cos, **STYLES[name], linewidth=1.2)
    for axis in (axes["ppl"], axes["cos"]):
        axis.set_xscale("log")
    axes["ppl"].set_title("Effect of the parameter")
    axes["ppl"].set_ylabel("perplexity")
    axes["cos"].set_ylabel("S-COS")
    axes["cos"].set_xlabel("value of β, α or T")
    return picture


EXPERIMENT = Experiment(
    name="pareto",
    title="Quality against diversity, writing without a prompt",
    paper="Figures pareto and dynamics",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=sweeps,
    digest=PLANE,
    scorers=("ppl", "cos"),
)
