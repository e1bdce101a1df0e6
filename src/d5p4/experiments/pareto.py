"""Quality against diversity in open-ended generation: fronts of every method, and how their knobs move along them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..eval.stats import figure, from_resamples
from .drawing import STYLES, Claim, Drawing, Verdict, agreed, decided, every, pyplot, shown
from .open_ended import BOX, GREEDY, INDEPENDENT, PAPER, sweeps
from .plane import Means, area, by_judges, curves, draw_plane, means, perplexity, plane_table, points
from .setup import Case, Experiment, Setup

SEARCH = ("D5P4+", "D5P4×", "diverse beam", "CAT, scores", "CAT, tokens")
STABLE = np.log(1.05)  # perplexity within 5 %
ALIKE = 0.25


def draw(setup: Setup) -> Drawing:
    found = {judge: means(setup, setup.cases, judge) for judge in setup["judges"]}
    lines = curves(setup.cases)
    areas = {judge: _areas(m, lines) for judge, m in found.items()}
    claims = [
        _beats_independent(setup, found, lines),
        *(_order(setup, areas, "D5P4+", other) for other in SEARCH[1:]),
        _order(setup, areas, "diverse beam", "CAT, scores"),
        _stable_first(setup, found, lines),
        _rises_later(setup, found, lines),
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
    return {name: area([m[GREEDY], *(m[case.name] for case in lines[name])], _corner(m)) for name in SEARCH}


def _order(setup: Setup, areas: dict[str, dict[str, np.ndarray]], better: str, worse: str) -> Claim:
    differences = [from_resamples(each[better] - each[worse]) for each in areas.values()]
    told, verdict = by_judges(setup, differences, [decided(d) for d in differences])
    paper = "Fig. pareto: fronts of D5P4+ and D5P4× lowest, then DivBS, then CAT"
    if {better, worse} == {"D5P4+", "D5P4×"}:
        margins = [ALIKE * each[better][0] for each in areas.values()]
        close: list[Verdict] = [
            "holds" if -m < d.low and d.high < m else "does not hold" if d.low > 0 or d.high < 0 else "not clear"
            for d, m in zip(differences, margins, strict=True)
        ]
        claim = f"D5P4+ and D5P4× reach fronts alike (within {ALIKE:.0%} of the area)"
        return Claim(claim, paper, f"area of D5P4+ minus that of D5P4×: {told}", agreed(close))
    return Claim(f"The front of {better} is better than that of {worse}", paper, f"area more: {told}", verdict)


def _beats_independent(setup: Setup, found: Mapping[str, Means], lines: dict[str, list[Case]]) -> Claim:
    told: list[str] = []
    verdicts: list[Verdict] = []
    for name in SEARCH:
        each = []
        for m in found.values():
            apart = [m[case.name] - m[INDEPENDENT] for case in lines[name]]
            sure = [
                case.name.split(", ")[-1]
                for case, d in zip(lines[name], apart, strict=True)
                if from_resamples(d[:, 0]).high < 0 and from_resamples(d[:, 1]).high < 0
            ]
            each.append(sure)
        both = [value for value in each[0] if all(value in sure for sure in each)]
        told.append(f"{name}: {', '.join(both) or 'no value'}")
        verdicts.append("holds" if both else "not clear")
    return Claim(
        "Every search method beats independent sampling in perplexity and in cosine at once",
        "Fig. pareto, in words",
        "values with both intervals below those of independent sampling, under both judges: " + "; ".join(told),
        every(verdicts),
    )


def _stable_first(setup: Setup, found: Mapping[str, Means], lines: dict[str, list[Case]]) -> Claim:
    told: list[str] = []
    verdicts: list[Verdict] = []
    for judge, m in found.items():
        first = m[lines["D5P4+"][0].name]
        free = []
        for case in lines["D5P4+"][1:]:
            change = m[case.name] - first
            if from_resamples(change[:, 0]).high < STABLE and from_resamples(change[:, 1]).high < 0:
                free.append(case.name.split(", ")[-1])
        told.append(f"{judge}: {', '.join(free) or 'no value'}")
        verdicts.append("holds" if free else "not clear")
    return Claim(
        "A first regime: larger β makes texts more different while perplexity stays",
        "Fig. pareto and dynamics: cosine falls while perplexity stays",
        "values of β with a cosine surely lower and a perplexity surely less than 5 % higher than at the smallest: "
        + "; ".join(told),
        agreed(verdicts),
    )


def _rises_later(setup: Setup, found: Mapping[str, Means], lines: dict[str, list[Case]]) -> Claim:
    line = lines["D5P4+"]
    low, middle, high = line[0], line[(len(line) - 1) // 2], line[-1]

    def slope(m: Means, a: Case, b: Case) -> np.ndarray:
        """Rise of log perplexity a decade of β: the two parts of the sweep need not be equally wide."""
        decades = np.log10((b.value or 0) / (a.value or 1))
        return (m[b.name] - m[a.name])[:, 0] / decades if decades else np.full(len(m[a.name]), np.nan)

    differences = [from_resamples(slope(m, middle, high) - slope(m, low, middle)) for m in found.values()]
    told, verdict = by_judges(setup, differences, [decided(d) for d in differences], 3)
    return Claim(
        "A second regime: beyond a threshold perplexity rises faster",
        "Fig. pareto: perplexity rises sharply beyond a threshold",
        f"rise of log perplexity a decade of β above {middle.value:g} minus that below: {told}",
        verdict,
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
    {"box": BOX, "paper": PAPER}, draw, sweeps, scorers=("ppl", "cos"),
)  # fmt: skip
