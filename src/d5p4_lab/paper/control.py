"""Measures how strongly the logarithm of each method's parameter correlates with perplexity and with cosine."""

from __future__ import annotations

import numpy as np

from ..statistics import Correlation, correlation_difference, stratified_correlation
from ..tables import Table, listed, shown
from .drawing import Claim, Drawing, agreed, all_decided, decided
from .open_ended import BOX, PAPER, sweeps
from .plane import PLANE, Means, curves, means
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


Pair = tuple[Correlation, Correlation]
"""The correlations of a method's parameter with perplexity and with cosine."""


def draw(setup: Setup) -> Drawing:
    lines = curves(setup.cases)
    correlations: dict[str, dict[str, Pair]] = {}
    for judge in setup["judges"]:
        m = means(setup, setup.cases, judge)
        correlations[judge] = {name: _correlations(lines[name], m) for name in METHODS}
    columns = ["method", *(f"with perplexity, {judge}" for judge in setup["judges"]), "with cosine", "the paper's two"]
    rows = []
    for name in METHODS:
        cells = [shown(correlations[judge][name][0].figure, 3) for judge in setup["judges"]]
        paper = "{:+.3f}, {:+.3f}".format(*PAPERS[name]) if name in PAPERS else "–"
        rows.append([name, *cells, shown(correlations[setup["judges"][0]][name][1].figure, 3), paper])
    note = (
        f"The logarithm of the parameter is divided into {BINS} bins of equal width. Each figure is the Pearson "
        "correlation of the bins with the mean outcome in each bin; empty bins are left out. An interval contains the "
        "true correlations under which the observed one is not among the lowest or highest 2.5 %, given the noise of "
        "resampled sets. The authors' D5P4× uses 1/β, so the signs of their figures for it are reversed here. The "
        "authors' CAT sweeps the token temperature."
    )
    table = Table("Correlation of each method's parameter", columns, rows, note)
    numbers = {
        judge: {name: [one.figure for one in pair] for name, pair in by_method.items()}
        for judge, by_method in correlations.items()
    }
    return Drawing([table], None, numbers, _claims(setup, correlations))


def _correlations(line: list[Case], m: Means) -> Pair:
    parameter, units = [case.value or 0.0 for case in line], [case.units for case in line]
    both = np.stack([m[case.name] for case in line])  # [m, 1 + R, 2]
    ppl, cos = (stratified_correlation(parameter, both[..., i].T, units, BINS) for i in (0, 1))
    return ppl, cos


def _claims(setup: Setup, correlations: dict[str, dict[str, Pair]]) -> list[Claim]:
    judges = setup["judges"]
    ppl = [correlations[judge]["D5P4+"][0].figure for judge in judges]
    cos = {name: correlations[judges[0]][name][1] for name in METHODS}
    ours, tokens = cos["D5P4+"].figure, cos["CAT, tokens"].figure

    def steeper(paper: str, text: str, *rivals: str) -> Claim:
        gaps = [correlation_difference(cos[name], cos["D5P4+"]) for name in rivals]
        values = listed(("D5P4+", *rivals), (cos[name].figure for name in ("D5P4+", *rivals)), 3)
        return Claim(
            f"The correlation of cosine with the parameter is more negative for D5P4+ than for {text}",
            f"Table corr: {paper}",
            f"correlations: {values}; minus that of D5P4+: {listed(rivals, gaps, 3)}",
            all_decided(gaps),
        )

    rises = agreed(map(decided, ppl))
    heat = "A higher token temperature lowers the cosine (CAT)"
    return [
        Claim("Perplexity rises with the logarithm of β", "Table corr: .970", listed(judges, ppl, 3), rises),
        Claim("Cosine falls with the logarithm of β", "Table corr: −.925", shown(ours, 3), decided(-ours)),
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
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=PLANE,
    scorers=("ppl", "cos"),
)
