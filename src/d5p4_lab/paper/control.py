"""How well a method's knob controls the outcome: correlation of its logarithm with perplexity and cosine."""

from __future__ import annotations

import numpy as np

from ..statistics import Figure, stratified_correlation
from .drawing import STYLES, Claim, Drawing, Table, Verdict, agreed, bars, decided, pyplot, shown
from .open_ended import BOX, PAPER, sweeps
from .plane import PLANE, curves, points
from .setup import Case, Experiment, Setup

METHODS = ("CAT, scores", "CAT, tokens", "diverse beam", "D5P4+", "D5P4×")
PAPERS = {
    "CAT, tokens": (0.974, -0.795), "diverse beam": (0.944, -0.570), "D5P4+": (0.970, -0.925), "D5P4×": (0.976, -0.866),
}  # fmt: skip
BINS = 10


def cases(setup: Setup) -> list[Case]:
    return [case for case in sweeps(setup) if case.group in METHODS]


def draw(setup: Setup) -> Drawing:
    lines = curves(setup.cases)
    found: dict[str, dict[str, tuple[Figure, Figure]]] = {}
    for judge in setup["judges"]:
        values = points(setup, setup.cases, judge)
        found[judge] = {name: _correlations(lines[name], values) for name in METHODS}
    columns = ["method", *(f"with perplexity, {judge}" for judge in setup["judges"]), "with cosine", "the paper's"]
    rows = []
    for name in METHODS:
        cells = [shown(found[judge][name][0], 3) for judge in setup["judges"]]
        told = "{:+.3f}, {:+.3f}".format(*PAPERS[name]) if name in PAPERS else "–"
        rows.append([name, *cells, shown(found[setup["judges"][0]][name][1], 3), told])
    note = (
        f"Pearson correlation of the bins of the logarithm of the parameter with the mean of each bin; {BINS} bins of "
        "equal width, those that are empty left out; the interval resamples sets. The authors' D5P4× counts 1/β, so "
        "its signs are turned round here; their CAT sweeps the token temperature."
    )
    table = Table("Correlation of each method's parameter", columns, rows, note)
    numbers = {judge: {name: list(pair) for name, pair in each.items()} for judge, each in found.items()}
    return Drawing([table], _figure(setup, found), numbers, _claims(setup, found))


def _correlations(line: list[Case], values: dict[str, np.ndarray]) -> tuple[Figure, Figure]:
    parameter = np.concatenate([np.full(len(values[case.name]), case.value) for case in line])
    both = np.concatenate([values[case.name] for case in line])
    ppl, cos = (stratified_correlation(parameter, both[:, i], BINS) for i in (0, 1))
    return ppl, cos


def _claims(setup: Setup, found: dict[str, dict[str, tuple[Figure, Figure]]]) -> list[Claim]:
    judges = setup["judges"]
    ppl = [found[judge]["D5P4+"][0] for judge in judges]
    told = "; ".join(f"{judge} {shown(f, 3)}" for judge, f in zip(judges, ppl, strict=True))
    cos = {name: found[judges[0]][name][1] for name in METHODS}
    ours = cos["D5P4+"]
    rivals = ("CAT, tokens", "CAT, scores", "diverse beam")
    other = cos["D5P4×"]
    versus: Verdict = "holds" if other.low > ours.high else "does not hold" if other.high < ours.low else "not clear"
    apart = [cos[name].low > ours.high for name in rivals]  # more negative is stronger
    behind = [cos[name].high < ours.low for name in rivals]
    verdict = "holds" if all(apart) else "does not hold" if any(behind) else "not clear"
    return [
        Claim("Perplexity rises with the logarithm of β", "Table corr: .970", told, agreed([decided(f) for f in ppl])),
        Claim(
            "Cosine falls with the logarithm of β",
            "Table corr: −.925",
            shown(ours, 3),
            decided(-ours),
        ),
        Claim(
            "Cosine follows D5P4's parameter more closely than those of CAT and diverse beam search",
            "Table corr: −.925 against −.795 and −.570",
            "; ".join(f"{name} {shown(cos[name], 3)}" for name in ("D5P4+", *rivals)),
            verdict,  # type: ignore[arg-type]
            "verdict by whether the intervals are apart",
        ),
        Claim(
            "and more closely than that of D5P4×",
            "Table corr: −.925 against −.866",
            f"D5P4+ {shown(ours, 3)}; D5P4× {shown(other, 3)}",
            versus,
        ),
        Claim(
            "Token temperature lowers cosine (CAT)",
            "Table corr: −.795",
            shown(cos["CAT, tokens"], 3),
            decided(-cos["CAT, tokens"]),
        ),
    ]


def _figure(setup: Setup, found: dict[str, dict[str, tuple[Figure, Figure]]]) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, place, title in ((axes[0], 0, "perplexity"), (axes[1], 1, "cosine between texts")):
        for row, name in enumerate(METHODS):
            figure = found[setup["judges"][-1]][name][place]
            axis.errorbar(figure.value, row, xerr=bars([figure]), color=STYLES[name]["color"],
                          marker=STYLES[name]["marker"], markeredgecolor="black", markeredgewidth=0.4)  # fmt: skip
            if name in PAPERS:
                axis.plot(PAPERS[name][place], row, marker="|", color="black", markersize=14)
        axis.set_xlabel(f"correlation of log(parameter) with {title}")
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_xlim(-1.05, 1.05)
    axes[0].set_yticks(range(len(METHODS)), METHODS)
    axes[1].plot([], [], marker="|", color="black", linestyle="none", markersize=12, label="the paper's")
    axes[1].legend(fontsize=8)
    return picture


EXPERIMENT = Experiment(
    "control", "What the parameters control", "Table corr", {"box": BOX, "paper": PAPER}, draw, cases, PLANE,
    scorers=("ppl", "cos"),
)  # fmt: skip
