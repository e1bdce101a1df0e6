"""Compares D5P3 (D5P4 without the partition) with D5P4 and with E-SMC, to measure what the partition contributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..statistics import from_resamples
from . import open_ended
from .answers import numbers_of
from .drawing import Claim, Drawing, Table, all_decided, decided, listed, pyplot, shown
from .open_ended import base
from .plane import PLANE, area, by_judges, curves, draw_plane, means, plane_table, unbiased
from .setup import SOLVER, Case, Experiment, Setup

BOX: Mapping[str, Any] = {
    **{name: open_ended.BOX[name] for name in ("model", "judges", "encoder", "gen_length", "steps")},
    "k": 2,
    "w": 2,
    "units": 64,
    "units_large": 24,
    "lam": 5.0,
    "interval": (4, 8, 16, 32, 64, 128),  # the numbers of steps between two resamplings of E-SMC
    "lam_textbook": (5, 20, 50, 100, 200),  # values of λ for E-SMC with textbook weights
    "interval_textbook": 16,
    "solver": SOLVER,
    "beta": (1, 2, 4, 6, 8, 10, 12, 30, 100),
    "beta_large": (30, 100),
    "large": (8, 4),  # k and w of the larger pools
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    **{name: open_ended.PAPER[name] for name in ("model", "judges", "encoder", "gen_length", "remote_code")},
    **{name: open_ended.PAPER[name] for name in ("solver", "judge_dtype")},
    "steps": 256,
    "units": 8,
    "units_large": 8,
}
TEXTBOOK = "E-SMC, textbook"
COLLAPSED = 0.99  # a method's lineages have collapsed if the mean cosine of two texts of a set is above this


def cases(setup: Setup) -> list[Case]:
    small = base(setup) | {"w": setup["w"]}
    particles = base(setup) | {"method": "e-smc", "k": setup["k"] * setup["w"], "w": 1, "lam": setup["lam"]}
    units, (k, w) = setup["units"], setup["large"]
    planned = [
        Case(f"E-SMC, every {i}", particles | {"interval": i}, units, group="E-SMC", value=float(i))
        for i in setup["interval"]
    ]
    textbook = particles | {"weights": "textbook", "interval": setup["interval_textbook"]}
    planned += [
        Case(f"{TEXTBOOK}, λ {lam:g}", textbook | {"lam": float(lam)}, units, group=TEXTBOOK, value=float(lam))
        for lam in setup["lam_textbook"]
    ]
    for name, method in (("D5P3", "d5p3"), ("D5P4+", "d5p4")):
        for beta in setup["beta"]:
            options = small | {"method": method, "beta": float(beta)}
            planned.append(Case(f"{name}, β {beta:g}", options, units, group=name, value=float(beta)))
        for beta in setup["beta_large"]:
            options = base(setup) | {"k": k, "w": w, "method": method, "beta": float(beta)}
            large = f"{name} {k}×{w}"
            few = min(units, setup["units_large"])
            planned.append(Case(f"{large}, β {beta:g}", options, few, group=large, value=float(beta)))
    return planned


def draw(setup: Setup) -> Drawing:
    by_judge = {judge: means(setup, setup.cases, judge) for judge in setup["judges"]}
    lines = curves(setup.cases)
    areas = {}
    for judge, m in by_judge.items():
        corner = np.array([max(m[case.name][0, 0] for case in lines["E-SMC"]), 1.0])
        areas[judge] = {
            name: unbiased(area([m[case.name] for case in lines[name]], corner)) for name in ("E-SMC", "D5P3", "D5P4+")
        }
    better = [from_resamples(by_method["D5P3"] - by_method["E-SMC"]) for by_method in areas.values()]
    text, verdict = by_judges(setup, better, [decided(f) for f in better])
    first = by_judge[setup["judges"][0]]
    low = lines["D5P3"][0]
    collapse = from_resamples(first[low.name][:, 1] - COLLAPSED)
    spared = [
        from_resamples(first[a.name][:, 1] - first[b.name][:, 1])
        for a, b in zip(lines["D5P3"], lines["D5P4+"], strict=True)
    ]
    betas = [case.value or 0 for case in lines["D5P3"]]
    low_cosine = shown(from_resamples(first[low.name][:, 1]), 4)
    low_distinct = np.mean([row["distinct"] for row in numbers_of(setup, low)])
    claims = [
        Claim(
            "D5P3 (D5P4 without the partition) has a better front than E-SMC at equal rows",
            "Fig. esmc: D5P3 dominates",
            f"area of D5P3 minus that of E-SMC, up to E-SMC's worst perplexity and cosine 1: {text}",
            verdict,
        ),
        Claim(
            "Without the partition, lineages collapse at small β",
            "the authors' runs: cosine 1.0 at β 1 and 2",
            f"at β {low.value:g}: cosine {low_cosine}, {low_distinct:.2f} different texts among {setup['k']}",
            decided(collapse),
        ),
        Claim(
            "The partition prevents the collapse: at every β below 12, D5P4's texts differ more than D5P3's",
            "App. E",
            f"cosine of D5P3 minus that of D5P4: {listed((f'β {beta:g}:' for beta in betas), spared, 3)}",
            all_decided(f for beta, f in zip(betas, spared, strict=True) if beta < 12),
        ),
    ]
    large = f"D5P3 {setup['large'][0]}×{setup['large'][1]}"
    for case in lines[large][:1]:
        cosine = from_resamples(first[case.name][:, 1])
        rival = from_resamples(first[case.name][:, 1] - first[case.name.replace("D5P3", "D5P4+")][:, 1])
        claim = f"{large} at β {case.value:g} collapses towards one text (cosine above .78)"
        values = f"cosine {shown(cosine, 3)}, {shown(rival, 3)} above D5P4's"
        claims.append(Claim(claim, "PPL 22.24, cosine .7835", values, decided(cosine.plus(-0.78))))
    rows = []
    for case in setup.cases:
        decoded = numbers_of(setup, case)
        distinct, run, nominal = (np.mean([row[name] for row in decoded]) for name in ("distinct", "rows", "nominal"))
        rows.append([case.name, f"{distinct:.2f}", str(decoded[0]["texts"]), f"{run:.0f}", f"{nominal:.0f}"])
    tables = [
        plane_table(
            setup, "Perplexity and cosine", setup.cases, "E-SMC keeps all its particles; the other methods keep k rows."
        ),
        Table("Different texts, and rows", ["case", "different texts", "all texts", "rows run", "nominal"], rows),
    ]
    numbers = {judge: {name: from_resamples(x) for name, x in by_method.items()} for judge, by_method in areas.items()}
    return Drawing(tables, _figure(setup), {"area": numbers}, claims)


def _figure(setup: Setup) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(figsize=(7, 4.2))
    small = [case for case in setup.cases if "×" not in case.group]
    draw_plane(axes, setup, small, setup["judges"][-1])
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.legend(fontsize=8)
    axes.set_title(f"{setup['k'] * setup['w']} rows per step")
    return picture


EXPERIMENT = Experiment(
    name="partition",
    title="D5P4 with and without its partition, and E-SMC",
    paper="Figure esmc",
    settings={"box": BOX, "paper": PAPER},
    draw=draw,
    cases=cases,
    digest=PLANE,
    scorers=("ppl", "cos"),
)
