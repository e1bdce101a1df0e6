"""What guidance does to diversity and accuracy, for independent sampling, best-of-n, greedy beam search and D5P4."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..statistics import Figure, figure, paired_difference
from .answers import numbers_of
from .continuation import BOX, PAPER, POOL, best_perplexity, by_chance, columns, measures, pool, search
from .drawing import STYLES, Claim, Drawing, Table, bars, decided, every, pyplot, shown
from .plane import perplexity
from .qa import REPEATED
from .rows import Row
from .setup import Case, Digest, Experiment, Setup

STRENGTHS = {"guidances": (1, 1.5, 2, 2.5, 3)}
EQUAL = 1.0  # points of F1
METHODS = ("independent", "best of n", "greedy beam", "D5P4+")
PAPERS = "−.0031, −.0121, −.0078, −.0055, −.0067 at g = 1, 1.5, 2, 2.5, 3"
Found = dict[str, dict[float, dict[str, np.ndarray]]]


def cases(setup: Setup) -> list[Case]:
    found = []
    for guidance in setup["guidances"]:
        found += [
            pool(setup, guidance),
            search(setup, "greedy beam", {"method": "greedy-beam"}, guidance),
            search(setup, "D5P4+", {"method": "d5p4", "beta": setup["beta"]}, guidance),
        ]
    return found


def _reduce(setup: Setup, case: Case, unit: int, row: Row, said: Mapping[str, Row]) -> Row:
    ways = {case.group: list(range(len(row["texts"])))}
    if case.group == POOL:
        ways = {"independent": by_chance(setup, unit, row), "best of n": best_perplexity(setup, said)}
    return {"ways": {name: measures(setup, row, said, places) for name, places in ways.items()}}


def draw(setup: Setup) -> Drawing:
    found: Found = {name: {} for name in METHODS}
    for case in setup.cases:
        rows = numbers_of(setup, case)
        for name in rows[0]["ways"]:
            found[name][case.value or 1.0] = columns([row["ways"][name] for row in rows])
    strengths = [float(g) for g in setup["guidances"]]
    table_rows = []
    for name in METHODS:
        for g in strengths:
            m = found[name][g]
            cells = [shown(perplexity(m[f"nats {judge}"]), 1) for judge in setup["judges"]]
            cells += [shown(figure(m[metric]), 2, 100) for metric in ("F1", "F1@k", "S-COS", "repeated")]
            table_rows.append([name, f"{g:g}", *cells, shown(figure(m["S-BLEU"]))])
    judged = (f"PPL, {judge}" for judge in setup["judges"])
    heads = ["method", "g", *judged, "F1", "F1@k", "S-COS", "repeated", "S-BLEU"]
    note = f"{setup['units']} prompts, k = {setup['k']}, w = {setup['w']}; all but perplexity in %. {REPEATED}"
    numbers = {
        name: {f"{g:g}": {metric: figure(m[metric]) for metric in ("F1", "F1@k", "S-COS", "S-BLEU")}
               for g, m in each.items()} for name, each in found.items()
    }  # fmt: skip
    table = Table("Metrics by strength of guidance", heads, table_rows, note)
    return Drawing([table], _figure(setup, found, strengths), numbers, _claims(found, strengths))


def _claims(found: Found, strengths: list[float]) -> list[Claim]:
    def gap(metric: str, a: str, b: str, g: float) -> Figure:
        return paired_difference(found[a][g][metric], found[b][g][metric])

    low, high = strengths[0], strengths[-1]
    rise = paired_difference(found["independent"][high]["S-COS"], found["independent"][low]["S-COS"])
    below = [paired_difference(found["independent"][g]["S-COS"], found["D5P4+"][g]["S-COS"]) for g in strengths]
    greedy = [gap("S-COS", "greedy beam", "independent", g) for g in strengths]
    gain = [gap("F1@k", "D5P4+", "independent", g) for g in strengths]
    spread = [gap("S-COS", "greedy beam", "D5P4+", g) for g in strengths]
    accuracy = [gap("F1", "D5P4+", "greedy beam", g) for g in strengths]
    worse = [gap("F1", "independent", "best of n", g) for g in strengths]
    alike = [gap("S-COS", "best of n", "independent", g) for g in strengths]

    def told(figures: list[Figure]) -> str:
        return "; ".join(f"g {g:g}: {shown(f, 2, 100)}" for g, f in zip(strengths, figures, strict=True))

    return [
        Claim(f"Guidance makes independent answers more alike (g {high:g} against {low:g})",
              "Fig. cfg: cosine rises with g", f"S-COS higher by {shown(rise, 2, 100)} points", decided(rise)),
        Claim("D5P4 makes them more different again at every strength", f"cosine against independent: {PAPERS}",
              f"S-COS lower than independent by {told(below)} points", every([decided(f) for f in below])),
        Claim("Greedy beam search makes them more alike still", "+.033 at g = 1, +.001 to +.003 above",
              f"S-COS higher than independent by {told(greedy)} points", every([decided(f) for f in greedy])),
        Claim("D5P4's answers differ more than greedy beam search's", "Fig. cfg: at every g",
              f"S-COS lower by {told(spread)} points", every([decided(f) for f in spread])),
        Claim(f"at equal accuracy (F1 at most {EQUAL:g} points lower)", "Fig. cfg: at every g",
              f"F1 higher by {told(accuracy)} points", every([decided(f.plus(EQUAL / 100)) for f in accuracy])),
        Claim("Best-of-n by perplexity is less accurate than independent sampling", "Fig. cfg, appendix",
              f"F1 lower by {told(worse)} points", every([decided(f) for f in worse])),
        Claim("and its answers are more alike", "+.0023 to +.0150", f"S-COS higher by {told(alike)} points",
              every([decided(f) for f in alike])),
        Claim("Ours: D5P4's best answer is better than that of independent sampling at every strength (F1@k)", "–",
              f"higher by {told(gain)} points", every([decided(f) for f in gain])),
    ]  # fmt: skip


def _figure(setup: Setup, found: Found, strengths: list[float]) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    titles = {"S-COS": "S-COS, % (lower: more different)", "F1@k": "F1 of the best answer, %", "nats": "perplexity"}
    judge = setup["judges"][-1]
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for name in METHODS:
            column = f"nats {judge}" if metric == "nats" else metric
            each = [found[name][g][column] for g in strengths]
            figures = [perplexity(x) if metric == "nats" else figure(100 * x) for x in each]
            axis.errorbar(strengths, [f.value for f in figures], yerr=bars(figures), **STYLES[name], label=name,
                          capsize=2, linewidth=1.2, elinewidth=0.6)  # fmt: skip
        axis.set_xlabel("guidance g (1: none)")
        axis.set_title(title + (f" under {judge}" if metric == "nats" else ""), fontsize=10)
        axis.set_xticks(strengths)
    axes[0].legend(fontsize=8)
    return picture


EXPERIMENT = Experiment(
    "guidance", "Diversity and accuracy under guidance", "Figure cfg and its appendix",
    {"box": dict(BOX) | STRENGTHS, "paper": dict(PAPER) | STRENGTHS}, draw, cases,
    Digest("guidance", _reduce, ("k",)), scorers=("ppl", "cos"),
    needs_text=("box",),
)  # fmt: skip
