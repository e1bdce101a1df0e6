"""Quality against diversity of unprompted texts: each method's front (its best trade-offs) and parameter effects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np

from ..figures import pyplot
from ..statistics import Figure, from_resamples
from ..tables import listed, shown
from . import open_ended
from .drawing import STYLES, Claim, Drawing, Evidence, agreed, all_decided, decided, every, some, within
from .open_ended import BOX, GREEDY, INDEPENDENT, PAPER, PLANE, REAL, TREE, WARM, Means, curves, means, sweeps, unbiased
from .setup import Case, Experiment, Setup

SEARCH = ("D5P4+", "D5P4×", "diverse beam", "CAT, scores", "CAT, tokens")
STABLE = np.log(1.05)  # perplexity counts as stable if it rises by less than 5 %
ALIKE = 0.25  # two fronts count as alike if their areas differ by less than this share of the area of D5P4+
BREAKDOWN = 0.25  # a sweep has broken down where its perplexity is this share above that of greedy beam search
TREE_AT_1 = "tree at T 1"
OURS = (TREE, WARM, TREE_AT_1)  # fronts of methods that do not search, so greedy beam search is not their limit
PAPER_FRONTS = "Fig. pareto: D5P4+ and D5P4× lowest, then DivBS, then CAT"
SPOKEN = {  # the names of methods in sentences, where they differ from those in figures
    "diverse beam": "diverse beam search",
    "CAT, scores": "CAT (scores)",
    "CAT, tokens": "CAT (tokens)",
    TREE: "the tree",
    WARM: "independent sampling",
    TREE_AT_1: "the tree at temperature 1",
}


@dataclass(frozen=True)
class Fronts:
    """What the claims compare: the cases of each method, and the means of all cases under each judge."""

    setup: Setup
    lines: Mapping[str, Sequence[Case]]
    means: Mapping[str, Means]

    def cases(self, group: str) -> list[Case]:
        """The cases of a front. `WARM` includes independent sampling at temperature 1."""
        if group == TREE_AT_1:
            return [case for case in self.lines[TREE] if case.value == 1]
        return [*(self.lines[INDEPENDENT] if group == WARM else ()), *self.lines.get(group, ())]

    def front(self, group: str) -> list[str]:
        """The names of the cases on a front. With a parameter near 0, every search method is greedy beam search."""
        return [*([] if group in OURS else [GREEDY]), *(case.name for case in self.cases(group))]

    def area(self, m: Means, group: str, floor: float = -np.inf) -> np.ndarray:
        """The area [1 + R] between a front and the corner; cosines below `floor` count as `floor`.

        The corner has the nats of independent sampling, and its cosine or that of greedy beam search, the larger one.
        """
        corner = np.array([m[INDEPENDENT][0, 0], max(m[INDEPENDENT][0, 1], m[GREEDY][0, 1])])
        return unbiased(open_ended.area([np.maximum(m[name], [-np.inf, floor]) for name in self.front(group)], corner))

    def by_judge(self, value: Callable[[Means], np.ndarray], *groups: str) -> list[Figure]:
        """A value [1 + R] of the means, under each judge. Its n is the number of sets of the smallest group's cases."""
        units = min(max(case.units for case in self.cases(group)) for group in groups)
        return [from_resamples(value(m), units) for m in self.means.values()]

    def apart(self, value: Callable[[Means, str], np.ndarray], a: str, b: str) -> list[Figure]:
        """A value [1 + R] of group `a` minus that of group `b`, under each judge."""
        return self.by_judge(lambda m: value(m, a) - value(m, b), a, b)

    def listed(self, figures: Sequence[Figure], digits: int = 4) -> str:
        return listed(self.setup["judges"], figures, digits)


def draw(setup: Setup) -> Drawing:
    lines = curves(setup.cases)
    fronts = Fronts(setup, lines, {judge: means(setup, setup.cases, judge) for judge in setup["judges"]})
    orders = [(a, b) for a in ("D5P4+", "D5P4×") for b in ("diverse beam", "CAT, scores", "CAT, tokens")]
    orders += [("diverse beam", "CAT, scores"), ("diverse beam", "CAT, tokens")]
    claims = [
        *(_beats_independent(fronts, name) for name in SEARCH),
        *(_order(fronts, better, worse) for better, worse in orders),
        _alike(fronts),
        _stable_first(fronts),
        *(_rises_later(fronts, name) for name in SEARCH if len(lines[name]) > 2),
        _breaks_first(fronts, ("CAT, scores", "CAT, tokens"), ("diverse beam",)),
        _breaks_first(fronts, ("diverse beam",), ("D5P4+", "D5P4×")),
        *(_ours(fronts) if TREE in lines else ()),
    ]
    groups = [*SEARCH, *(group for group in OURS if TREE in lines and fronts.cases(group))]
    areas = {name: fronts.by_judge(partial(fronts.area, group=name), name) for name in groups}
    figures = {judge: {name: areas[name][place] for name in groups} for place, judge in enumerate(setup["judges"])}
    sizes = "; ".join(f"{name} {', '.join(shown(one, 4) for one in both)}" for name, both in areas.items())
    note = (
        "S-COS is the mean cosine of two texts of a set. A better front dominates a larger area in the plane of log "
        "perplexity and S-COS, up to the corner at independent sampling's perplexity and greedy beam search's cosine. "
        "Greedy beam search belongs to the front of every search method, because it is the limit of a small "
        f"parameter. CAT, scores, draws candidates by a softmax of their scores; CAT, tokens, is greedy beam search "
        f"at a higher token temperature. The areas, with perplexity under {' and under '.join(figures)}, are: {sizes}."
    )
    table = open_ended.plane_table(setup, "Every point of the sweeps", setup.cases, note)
    return Drawing([table], _figure(setup, lines), {"area": figures}, claims)


def _spoken(name: str) -> str:
    return SPOKEN.get(name, name)


def _differ(fronts: Fronts, better: str, worse: str, differences: Sequence[Figure]) -> str:
    return f"area of {_spoken(better)} minus that of {_spoken(worse)}: {fronts.listed(differences)}"


def _order(fronts: Fronts, better: str, worse: str) -> Claim:
    """The claim that one front is better. Its note says what is left of the difference where both sweeps have points.

    A sweep that goes on to lower cosines dominates a larger area, even if it is not better where both have points.
    """

    def lowest(m: Means) -> dict[str, float]:
        return {name: min(m[case.name][0, 1] for case in fronts.lines[name]) for name in (better, worse)}

    def common(m: Means) -> np.ndarray:
        floor = max(lowest(m).values())
        return fronts.area(m, better, floor) - fronts.area(m, worse, floor)

    differences, both = fronts.apart(fronts.area, better, worse), fronts.by_judge(common, better, worse)
    *_, last = fronts.means.values()
    ends = ", ".join(f"{_spoken(name)} {value:.4f}" for name, value in lowest(last).items())
    return Claim(
        f"The front of {_spoken(better)} is better than that of {_spoken(worse)}",
        PAPER_FRONTS,
        _differ(fronts, better, worse, differences),
        agreed(map(decided, differences)),
        f"lowest cosine of each sweep: {ends}; at the cosines that both reach: {fronts.listed(both)}",
    )


def _alike(fronts: Fronts) -> Claim:
    differences = fronts.apart(fronts.area, "D5P4+", "D5P4×")
    margins = [ALIKE * float(fronts.area(m, "D5P4+")[0]) for m in fronts.means.values()]
    border = ", ".join(f"{margin:.4f}" for margin in margins)
    return Claim(
        f"The fronts of D5P4+ and D5P4× are alike (within {ALIKE:.0%} of the area)",
        PAPER_FRONTS,
        f"{_differ(fronts, 'D5P4+', 'D5P4×', differences)}; "
        f"{ALIKE:.0%} of the area of D5P4+ is {border} under these judges",
        agreed(map(within, differences, margins)),
    )


def _ours(fronts: Fronts) -> list[Claim]:
    names = {"D5P4+": "D5P4+ (at temperature 1)", TREE_AT_1: _spoken(TREE_AT_1)}
    for group in (TREE, WARM):
        values = [1.0 if case.value is None else case.value for case in fronts.cases(group)]
        names[group] = f"{_spoken(group)} at temperatures {min(values):g} to {max(values):g}"
    pairs = [(TREE, "D5P4+"), (WARM, "D5P4+"), (TREE, WARM)]
    pairs += [(TREE_AT_1, "D5P4+")] if fronts.cases(TREE_AT_1) else []
    claims = []
    for better, worse in pairs:
        differences = fronts.apart(fronts.area, better, worse)
        claim = f"Ours: {names[better]} has a better front than {names[worse]}"
        order = "" if better == WARM else "the tree reveals the surest position first, the other methods random ones"
        text = _differ(fronts, better, worse, differences)
        claims.append(Claim(claim, "–", text, agreed(map(decided, differences)), order))
    return claims


def _breaks_first(fronts: Fronts, first: Sequence[str], later: Sequence[str]) -> Claim:
    parts, texts = [], []
    for a, b in product(first, later):
        gaps = fronts.apart(lambda m, name: _at_breakdown(m, fronts.lines[name]), a, b)
        parts.append(agreed(map(decided, gaps)))
        texts.append(f"{_spoken(a)} minus {_spoken(b)}: {fronts.listed(gaps)}")
    earlier, others = (" and ".join(map(_spoken, names)) for names in (first, later))
    return Claim(
        f"The perplexity of {earlier} breaks down at less diversity than that of {others}",
        "Fig. pareto: CAT breaks down first, then DivBS, then D5P4",
        f"difference of the cosines at which perplexity is {BREAKDOWN:.0%} above that of greedy beam search: "
        + "; ".join(texts),
        every(parts),
        "the cosine is interpolated along the sweep; a method that never breaks down counts with its last cosine",
    )


def _at_breakdown(m: Means, line: Sequence[Case]) -> np.ndarray:
    """The cosine [1 + R] at which the nats of a sweep, which begins at greedy beam search, first exceed a bound."""
    sweep = np.stack([m[GREEDY], *(m[case.name] for case in line)], 1)  # [1 + R, points, 2]
    bound = sweep[:, 0, 0] + np.log1p(BREAKDOWN)
    cosine = sweep[:, -1, 1].copy()
    for a, b in pairwise(np.moveaxis(sweep, 1, 0)[::-1]):  # from the last segment of the sweep to the first
        rise = a[:, 0] - b[:, 0]
        crossing = (b[:, 0] <= bound) & (a[:, 0] > bound)
        share = np.divide(bound - b[:, 0], rise, out=np.zeros_like(rise), where=crossing)
        cosine = np.where(crossing, b[:, 1] + share * (a[:, 1] - b[:, 1]), cosine)
    return cosine


def _judged(fronts: Fronts, rule: Callable[[Means, Case], Evidence], line: Sequence[Case]) -> tuple[str, Evidence]:
    """The values of the parameter at which a rule holds under all judges, and the evidence that there is one."""
    by_case = [agreed(rule(m, case) for m in fronts.means.values()) for case in line]
    passed = [case for case, evidence in zip(line, by_case, strict=True) if evidence.verdict() == "holds"]
    return ", ".join(case.name.split(", ")[-1] for case in passed) or "none", some(by_case)


def _beats_independent(fronts: Fronts, name: str) -> Claim:
    def rule(m: Means, case: Case) -> Evidence:
        return all_decided(from_resamples(column, case.units) for column in (m[INDEPENDENT] - m[case.name]).T)

    passed, evidence = _judged(fronts, rule, fronts.lines[name])
    method = _spoken(name)
    return Claim(
        f"{method[0].upper()}{method[1:]} beats independent sampling in perplexity and in cosine at once",
        "Fig. pareto: all search methods beat it",
        f"parameter values whose intervals are better in both, under all judges: {passed}",
        evidence,
        "every value has an interval that is worse, in perplexity or in cosine"
        * (evidence.verdict() == "does not hold"),
    )


def _stable_first(fronts: Fronts) -> Claim:
    def rule(m: Means, case: Case) -> Evidence:
        nats, cosine = (from_resamples(column, case.units) for column in (m[GREEDY] - m[case.name]).T)
        return every([decided(nats, -STABLE), decided(cosine)])

    passed, evidence = _judged(fronts, rule, fronts.lines["D5P4+"])
    return Claim(
        "A first regime: larger β makes texts more different while perplexity stays the same",
        "Fig. pareto and dynamics: cosine falls while perplexity stays the same",
        "values of β with a cosine below that of greedy beam search (β = 0) and a perplexity less than 5 % above it, "
        f"by their whole intervals: {passed}",
        evidence,
    )


def _rises_later(fronts: Fronts, name: str) -> Claim:
    line = fronts.lines[name]
    low, middle, high = line[0], line[(len(line) - 1) // 2], line[-1]

    def slope(m: Means, a: Case, b: Case) -> np.ndarray:
        """The rise of log perplexity from case `a` to case `b`, divided by log10 of (b's value / a's value)."""
        decades = np.log10((b.value or 0) / (a.value or 1))
        return (m[b.name] - m[a.name])[:, 0] / decades if decades else np.full(len(m[a.name]), np.nan)

    differences = fronts.by_judge(lambda m: slope(m, middle, high) - slope(m, low, middle), name)
    return Claim(
        f"A second regime of {_spoken(name)}: perplexity rises faster in the upper part of the sweep",
        "Fig. pareto: beyond a threshold perplexity rises sharply, for all methods",
        "rise of log perplexity when the parameter grows tenfold, above minus below the parameter value "
        f"{middle.value:g}: " + fronts.listed(differences, 3),
        agreed(map(decided, differences)),
        "the sweep is split at its middle value; another split could change the verdict",
    )


def _figure(setup: Setup, lines: dict[str, list[Case]]) -> object:
    plt = pyplot()
    judge = setup["judges"][-1]
    picture, axes = plt.subplot_mosaic([["plane", "ppl"], ["plane", "cos"]], figsize=(10.5, 4.8), width_ratios=(1.5, 1))
    named = ("D5P4+", "D5P4×", "diverse beam", "CAT, scores")
    open_ended.draw_plane(axes["plane"], setup, setup.cases, judge, name_ends_of=named)
    axes["plane"].legend(fontsize=8)
    axes["plane"].set_title("Fronts")
    by_case = open_ended.points(setup, setup.cases, judge)
    for name in named:
        values = [case.value or 0 for case in lines[name]]
        nats, cosines = zip(*(by_case[case.name].mean(0) for case in lines[name]), strict=True)
        for panel, heights in (("ppl", np.exp(nats)), ("cos", cosines)):
            axes[panel].plot(values, heights, **STYLES[name], linewidth=1.2)
            axes[panel].set_xscale("log")
    axes["ppl"].set_title("Effect of the parameter")
    axes["ppl"].set_ylabel("perplexity")
    axes["cos"].set_ylabel("S-COS")
    axes["cos"].set_xlabel("value of β, α or T")
    return picture


EXPERIMENT = Experiment(
    name="pareto",
    title="Quality against diversity, writing without a prompt",
    paper="Figures pareto and dynamics",
    settings={"box": BOX, "paper": PAPER, **REAL},
    draw=draw,
    cases=sweeps,
    digest=PLANE,
    scorers=("ppl", "cos"),
)
