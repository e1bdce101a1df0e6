"""Measures how strongly the logarithm of each method's parameter correlates with perplexity and with cosine."""

from collections.abc import Mapping

import numpy as np

from ..statistics import Correlation, correlation_difference, stratified_correlation
from ..tables import Table, listed, shown
from .drawing import Claim, Drawing, agreed, all_decided, decided, every
from .open_ended import BOX, PAPER, PLANE, REAL, curves, means, sweeps
from .setup import Case, Experiment, Setup

METHODS = ("CAT, scores", "CAT, tokens", "diverse beam", "D5P4+", "D5P4×")
PAPERS = {  # the paper's correlations of each method's parameter with perplexity and with cosine
    "CAT, tokens": (0.974, -0.795),
    "diverse beam": (0.944, -0.570),
    "D5P4+": (0.970, -0.925),
    "D5P4×": (0.976, -0.866),
}
BINS = 10


def cases(setup: Setup) -> list[Case]:
    return [case for case in sweeps(setup) if case.group in METHODS]


def draw(setup: Setup) -> Drawing:
    judges, lines = setup["judges"], curves(setup.cases)

    def correlations(judge: str, column: int) -> dict[str, Correlation]:
        """For each method, the correlation of its parameter with log perplexity (column 0) or cosine (column 1)."""
        m = means(setup, setup.cases, judge)
        correlated = {}
        for name in METHODS:
            heights = np.stack([m[case.name][:, column] for case in lines[name]], 1)  # [1 + R, points]
            values, units = [case.value or 0.0 for case in lines[name]], [case.units for case in lines[name]]
            correlated[name] = stratified_correlation(values, heights, units, BINS)
        return correlated

    ppl, cos = {judge: correlations(judge, 0) for judge in judges}, correlations(judges[0], 1)
    columns = ["method", *(f"with perplexity, {judge}" for judge in judges), "with cosine", "the paper's two"]
    rows = []
    for name in METHODS:
        cells = [shown(one.figure, 3) for one in (*(ppl[judge][name] for judge in judges), cos[name])]
        rows.append([name, *cells, "{:+.3f}, {:+.3f}".format(*PAPERS[name]) if name in PAPERS else "–"])
    note = (
        f"The logarithm of the parameter is divided into {BINS} bins of equal width. Each figure is the Pearson "
        "correlation of the bins with the mean outcome in each bin; empty bins are left out. An interval contains the "
        "true correlations under which the observed one is not among the lowest or highest 2.5 %, given the noise of "
        "resampled sets. The authors' D5P4× uses 1/β, so the signs of their figures for it are reversed here. The "
        "authors' CAT sweeps the token temperature."
    )
    table = Table("Correlation of each method's parameter", columns, rows, note)
    figures = {judge: {name: [ppl[judge][name].figure, cos[name].figure] for name in METHODS} for judge in judges}
    return Drawing([table], None, figures, _claims(ppl, cos))


def _claims(ppl: Mapping[str, Mapping[str, Correlation]], cos: Mapping[str, Correlation]) -> list[Claim]:
    ours, tokens, judges = cos["D5P4+"].figure, cos["CAT, tokens"].figure, list(ppl)
    others = {"diverse beam": "α", "D5P4×": "D5P4×'s β", "CAT, tokens": "CAT's token temperature"}

    def steeper(paper: str, text: str, *rivals: str) -> Claim:
        gaps = [correlation_difference(cos[name], cos["D5P4+"]) for name in rivals]
        values = listed(("D5P4+", *rivals), (cos[name].figure for name in ("D5P4+", *rivals)), 3)
        return Claim(
            f"The correlation of cosine with the parameter is more negative for D5P4+ than for {text}",
            f"Table corr: {paper}",
            f"correlations: {values}; minus that of D5P4+: {listed(rivals, gaps, 3)}",
            all_decided(gaps),
        )

    def rises(name: str, parameter: str) -> Claim:
        figures = [ppl[judge][name].figure for judge in judges]
        paper = f"Table corr: {PAPERS[name][0]:.3f}"
        claim = f"Perplexity rises with the logarithm of {parameter}"
        return Claim(claim, paper, listed(judges, figures, 3), agreed(map(decided, figures)))

    def falls(name: str, parameter: str) -> Claim:
        own, paper = cos[name].figure, f"Table corr: {PAPERS[name][1]:.3f}"
        return Claim(f"Cosine falls with the logarithm of {parameter}", paper, shown(own, 3), decided(-own))

    rivals = ("CAT, tokens", "diverse beam")
    gaps = {n: [correlation_difference(m["D5P4+"], m[n]) for m in ppl.values()] for n in rivals}
    closer = [correlation_difference(cos[name], cos["D5P4+"]) for name in rivals]
    strongest = "; ".join(f"{name} {listed(judges, own, 3)}" for name, own in gaps.items())
    heat = "A higher token temperature lowers the cosine (CAT)"
    return [
        rises("D5P4+", "β"),
        Claim("Cosine falls with the logarithm of β", "Table corr: −.925", shown(ours, 3), decided(-ours)),
        *(rises(name, parameter) for name, parameter in others.items()),
        *(falls(name, others[name]) for name in ("diverse beam", "D5P4×")),
        Claim(
            "D5P4+ has the strongest coupling between its parameter and both metrics, of the paper's three methods",
            "text; but its table has .974 for CAT and .970 for D5P4+ in perplexity",
            f"with perplexity, D5P4+ minus {strongest}; with cosine, minus D5P4+: {listed(rivals, closer, 3)}",
            every([*(agreed(map(decided, own)) for own in gaps.values()), *map(decided, closer)]),
        ),
        steeper(
            "−.925 against −.795 and −.570", "CAT and diverse beam search", "CAT, tokens", "CAT, scores", "diverse beam"
        ),
        steeper("−.925 against −.866", "D5P4×", "D5P4×"),
        Claim(heat, "Table corr: −.795", shown(tokens, 3), decided(-tokens)),
    ]


EXPERIMENT = Experiment(
    name="control",
    title="What the parameters control",
    paper="Table corr",
    settings={"box": BOX, "paper": PAPER, **REAL},
    draw=draw,
    cases=cases,
    digest=PLANE,
    scorers=("ppl", "cos"),
)
