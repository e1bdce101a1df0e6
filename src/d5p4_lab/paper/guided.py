"""Measures how guidance changes the diversity and the accuracy of independent sampling, best-of-n and search."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..statistics import Figure, figure, paired_difference
from .answers import numbers_of
from .continuation import BOX, PAPER, POOL, best_perplexity, by_chance, columns, measures, pool, search, trees
from .drawing import STYLES, Claim, Drawing, Table, all_decided, bars, decided, listed, pyplot, shown
from .plane import perplexity
from .qa import REPEATED
from .rows import Row
from .setup import Case, Digest, Experiment, Setup

STRENGTHS = {"guidances": (1, 1.5, 2, 2.5, 3)}
EQUAL = 1.0  # a method counts as equally accurate if its F1 is lower by at most this many percentage points
METHODS = ("independent", "best of n", "greedy beam", "D5P4+")
PAPERS = "−.0031, −.0121, −.0078, −.0055, −.0067 at g = 1, 1.5, 2, 2.5, 3"
ByMethod = dict[str, dict[float, dict[str, np.ndarray]]]
"""By method, strength of guidance and name of a measure: an array with one value per prompt."""


def cases(setup: Setup) -> list[Case]:
    planned = []
    for guidance in setup["guidances"]:
        planned += [
            pool(setup, guidance),
            search(setup, "greedy beam", {"method": "greedy-beam"}, guidance),
            search(setup, "D5P4+", {"method": "d5p4", "beta": setup["beta"]}, guidance),
            *trees(setup, guidance),
        ]
    return planned


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    ways = {case.group: list(range(len(row["texts"])))}
    if case.group == POOL:
        ways = {"independent": by_chance(setup, unit, row), "best of n": best_perplexity(setup, scores)}
    return {"ways": {name: measures(setup, row, scores, places) for name, places in ways.items()}}


def draw(setup: Setup) -> Drawing:
    by_method: ByMethod = {name: {} for name in METHODS}
    for case in setup.cases:
        rows = numbers_of(setup, case)
        for name in rows[0]["ways"]:
            by_method[name][case.value or 1.0] = columns([row["ways"][name] for row in rows])
    strengths = [float(g) for g in setup["guidances"]]
    table_rows = []
    for name in METHODS:
        for g in strengths:
            m = by_method[name][g]
            cells = [shown(perplexity(m[f"nats {judge}"]), 1) for judge in setup["judges"]]
            cells += [shown(figure(m[metric]), 2, 100) for metric in ("F1", "F1@k", "S-COS", "repeated")]
            table_rows.append([name, f"{g:g}", *cells, shown(figure(m["S-BLEU"]))])
    judged = (f"PPL, {judge}" for judge in setup["judges"])
    heads = ["method", "g", *judged, "F1", "F1@k", "S-COS", "repeated", "S-BLEU"]
    note = (
        f"{setup['units']} prompts, k = {setup['k']}, w = {setup['w']}; all figures but perplexity are in %. {REPEATED}"
    )
    kept = ("F1", "F1@k", "S-COS", "S-BLEU")
    numbers = {
        name: {f"{g:g}": {metric: figure(m[metric]) for metric in kept} for g, m in by_strength.items()}
        for name, by_strength in by_method.items()
    }
    table = Table("Metrics by strength of guidance", heads, table_rows, note)
    return Drawing([table], _figure(setup, by_method, strengths), numbers, _claims(by_method, strengths))


def _claims(by_method: ByMethod, strengths: list[float]) -> list[Claim]:
    def gaps(metric: str, a: str, b: str) -> list[Figure]:
        """Return at each strength of guidance the metric of method `a` minus the metric of method `b`."""
        return [paired_difference(by_method[a][g][metric], by_method[b][g][metric]) for g in strengths]

    def points(what: str, figures: list[Figure]) -> str:
        return f"points of {what}: {listed((f'g {g:g}:' for g in strengths), figures, 2, 100)}"

    low, high = strengths[0], strengths[-1]
    rise = paired_difference(by_method["independent"][high]["S-COS"], by_method["independent"][low]["S-COS"])
    below = gaps("S-COS", "independent", "D5P4+")
    greedy = gaps("S-COS", "greedy beam", "independent")
    gain = gaps("F1@k", "D5P4+", "independent")
    spread = gaps("S-COS", "greedy beam", "D5P4+")
    accuracy = gaps("F1", "D5P4+", "greedy beam")
    worse = gaps("F1", "independent", "best of n")
    alike = gaps("S-COS", "best of n", "independent")
    return [
        Claim(
            f"Guidance makes independent answers more alike (g = {high:g} against g = {low:g})",
            "Fig. cfg: cosine rises with g",
            f"S-COS higher by {shown(rise, 2, 100)} points",
            decided(rise),
        ),
        Claim(
            "D5P4's answers differ more than independent answers at every strength of guidance",
            f"cosine against independent: {PAPERS}",
            points("S-COS below independent sampling", below),
            all_decided(below),
        ),
        Claim(
            "The answers of greedy beam search are more alike than independent answers",
            "cosine +.033 at g = 1, +.001 to +.003 at larger g",
            points("S-COS above independent sampling", greedy),
            all_decided(greedy),
        ),
        Claim(
            "D5P4's answers differ more than those of greedy beam search",
            "Fig. cfg: at every g",
            points("S-COS below greedy beam search", spread),
            all_decided(spread),
        ),
        Claim(
            f"D5P4 is as accurate as greedy beam search (its F1 is lower by at most {EQUAL:g} point)",
            "Fig. cfg: at every g",
            points("F1 above greedy beam search", accuracy),
            all_decided(f.plus(EQUAL / 100) for f in accuracy),
        ),
        Claim(
            "Best-of-n by perplexity is less accurate than independent sampling",
            "Fig. cfg, appendix",
            points("F1 below independent sampling", worse),
            all_decided(worse),
        ),
        Claim(
            "The answers of best-of-n by perplexity are more alike than independent answers",
            "cosine +.0023 to +.0150",
            points("S-COS above independent sampling", alike),
            all_decided(alike),
        ),
        Claim(
            "Ours: D5P4's best answer is better than that of independent sampling at every strength (F1@k)",
            "–",
            points("F1@k above independent sampling", gain),
            all_decided(gain),
        ),
    ]


def _figure(setup: Setup, by_method: ByMethod, strengths: list[float]) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    titles = {"S-COS": "S-COS, % (lower: more different)", "F1@k": "F1 of the best answer, %", "nats": "perplexity"}
    judge = setup["judges"][-1]
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for name in METHODS:
            column = f"nats {judge}" if metric == "nats" else metric
            values = [by_method[name][g][column] for g in strengths]
            figures = [perplexity(x) if metric == "nats" else figure(100 * x) for x in values]
            look = STYLES[name] | {"capsize": 2, "linewidth": 1.2, "elinewidth": 0.6}
            axis.errorbar(strengths, [f.value for f in figures], yerr=bars(figures), label=name, **look)
        axis.set_xlabel("guidance g (1: none)")
        axis.set_title(title + (f" under {judge}" if metric == "nats" else ""), fontsize=10)
        axis.set_xticks(strengths)
    axes[0].legend(fontsize=8)
    return picture


EXPERIMENT = Experiment(
    name="guidance",
    title="Diversity and accuracy under guidance",
    paper="Figure cfg and its appendix",
    settings={"box": dict(BOX) | STRENGTHS, "paper": dict(PAPER) | STRENGTHS},
    draw=draw,
    cases=cases,
    digest=Digest("guidance", _reduce, ("k",)),
    scorers=("ppl", "cos"),
    needs_text=("box",),
)
