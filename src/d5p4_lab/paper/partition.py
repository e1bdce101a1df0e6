"""Compares D5P3 (D5P4 without the partition) with D5P4 and with E-SMC, to measure what the partition contributes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..statistics import Figure, from_resamples
from ..tables import listed, shown
from . import open_ended
from .answers import numbers_of
from .drawing import Claim, Drawing, agreed, all_decided, decided
from .open_ended import PLANE, Means, area, base, curves, means, plane_table, sweep, unbiased
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
    **{name: open_ended.PAPER[name] for name in ("model", "judges", "encoder", "gen_length")},
    **{name: open_ended.PAPER[name] for name in ("solver", "judge_dtype")},
    "steps": 256,
    "units": 8,
    "units_large": 8,
}
TEXTBOOK = "E-SMC, textbook"
SMC = {  # for each group of E-SMC: its weights, and what the paper says about it
    "E-SMC": ("softmax(exp(λr)) as weights (the published code)", "Fig. esmc: D5P3 dominates"),
    TEXTBOOK: ("weights ∝ exp(λr) (textbook)", 'Fig. esmc: D5P3 dominates "standard E-SMC resampling"'),
}
COLLAPSED = 0.99  # a method's lineages have collapsed if the mean cosine of two texts of a set is above this


def cases(setup: Setup) -> list[Case]:
    particles = base(setup) | {"method": "e-smc", "k": setup["k"] * setup["w"], "w": 1, "lam": setup["lam"]}
    units, (k, w) = setup["units"], setup["large"]
    planned = [
        Case(f"E-SMC, every {i}", particles | {"interval": i}, units, group="E-SMC", value=float(i))
        for i in setup["interval"]
    ]
    textbook = particles | {"weights": "textbook", "interval": setup["interval_textbook"]}
    planned += sweep(setup, f"{TEXTBOOK}, λ", textbook, "lam", setup["lam_textbook"], units, TEXTBOOK)
    for name, method in (("D5P3", "d5p3"), ("D5P4+", "d5p4")):
        large = f"{name} {k}×{w}"
        options = base(setup) | {"method": method}
        planned += sweep(setup, f"{name}, β", options | {"w": setup["w"]}, "beta", setup["beta"], units, name)
        few = min(units, setup["units_large"])
        planned += sweep(setup, f"{large}, β", options | {"k": k, "w": w}, "beta", setup["beta_large"], few, large)
    return planned


def draw(setup: Setup) -> Drawing:
    judges, lines = setup["judges"], curves(setup.cases)
    by_judge = {judge: means(setup, setup.cases, judge) for judge in judges}
    first = by_judge[judges[0]]
    areas: dict[str, dict[str, dict[str, Figure]]] = {judge: {} for judge in judges}
    fronts, ends = [], []
    for rival, (weights, paper) in SMC.items():
        better = []
        for judge, m in by_judge.items():
            corner = np.array([max(m[case.name][0, 0] for case in lines[rival]), 1.0])
            names = (rival, "D5P3", "D5P4+")
            samples = {name: unbiased(area([m[case.name] for case in lines[name]], corner)) for name in names}
            areas[judge][f"up to the worst of {rival}"] = {
                name: from_resamples(x, setup["units"]) for name, x in samples.items()
            }
            better.append(from_resamples(samples["D5P3"] - samples[rival], setup["units"]))
        fronts.append(
            Claim(
                f"D5P3 (D5P4 without the partition) has a better front than E-SMC with {weights}, at equal rows",
                paper,
                "area of D5P3 minus that of E-SMC, up to E-SMC's worst perplexity and cosine 1: "
                + listed(judges, better, 4),
                agreed(map(decided, better)),
            )
        )
        end = max(lines[rival], key=lambda case: first[case.name][0, 1])
        cosine, where = _cosine(first, end), "λ {:g}" if rival == TEXTBOOK else "a resampling every {:g} steps"
        ends.append(
            Claim(
                f"The front of E-SMC with {weights} ends in one text (cosine above {COLLAPSED})",
                "cosine 1 at the end of E-SMC's front",
                f"at {where.format(end.value)}: cosine {shown(cosine, 4)}, {_different(setup, end)}",
                decided(cosine, COLLAPSED),
            )
        )
    claims = fronts + ends
    literal = [case for case in lines["E-SMC"] if case.value == setup["interval_textbook"]]
    textbook = [case for case in lines[TEXTBOOK] if case.value == setup["lam"]]
    for a, b in zip(literal, textbook, strict=False):  # both were decoded with the same λ and interval
        more = _cosine(first, a, b)
        claims.append(
            Claim(
                "Ours: with softmax(exp(λr)), E-SMC makes the texts of a set more alike than with weights ∝ exp(λr)",
                "not measured",
                f"λ = {setup['lam']:g}, every {setup['interval_textbook']} steps: cosine {shown(more, 3)} higher; "
                f"{_different(setup, a)}, against {_different(setup, b)}",
                decided(more),
                "softmax(exp(λr)) is sharper: a small difference of the rewards r decides which particle survives",
            )
        )
    low = lines["D5P3"][0]
    cosine = _cosine(first, low)
    spared = {f"β {a.value:g}:": _cosine(first, a, b) for a, b in zip(lines["D5P3"], lines["D5P4+"], strict=True)}
    claims += [
        Claim(
            "Without the partition (D5P3), lineages collapse at small β",
            "the authors' runs: cosine 1.0 at β 1 and 2",
            f"at β {low.value:g}: cosine {shown(cosine, 4)}, {_different(setup, low)}",
            decided(cosine, COLLAPSED),
        ),
        Claim(
            "The partition prevents the collapse: at every β below 12, D5P4's texts differ more than D5P3's",
            "App. E",
            f"cosine of D5P3 minus that of D5P4: {listed(spared, spared.values(), 3)}",
            all_decided(f for case, f in zip(lines["D5P3"], spared.values(), strict=True) if (case.value or 0) < 12),
            "larger values of β are shown, but do not count",
        ),
    ]
    size = "{}×{}".format(*setup["large"])
    if setup["beta_large"]:
        case, other = lines[f"D5P3 {size}"][0], lines[f"D5P4+ {size}"][0]
        above = _cosine(first, case, other)
        claim = f"At {size} and β {case.value:g}, too, D5P3's texts are more alike than D5P4's"
        values = f"cosine {shown(_cosine(first, case), 3)}, {shown(above, 3)} above D5P4's"
        note = "the paper's number is under Jina's encoder, and cosines of two encoders cannot be compared"
        claims.append(Claim(claim, "PPL 22.24, cosine .7835", values, decided(above), note))
    table = plane_table(
        setup,
        "Perplexity and cosine",
        setup.cases,
        f"E-SMC keeps all its particles; the other methods keep k rows. r is a particle's reward. {TEXTBOOK} draws "
        f"particles every {setup['interval_textbook']} steps with chances ∝ exp(λr). The other cases of E-SMC draw "
        f"particles with chances softmax(exp(λr)), λ = {setup['lam']:g}, as the published code does.",
    )
    return Drawing([table], None, {"area": areas}, claims)


def _cosine(first: Means, case: Case, other: Case | None = None) -> Figure:
    samples = first[case.name][:, 1] if other is None else first[case.name][:, 1] - first[other.name][:, 1]
    return from_resamples(samples, case.units)


def _different(setup: Setup, case: Case) -> str:
    decoded = numbers_of(setup, case)
    return f"{np.mean([row['distinct'] for row in decoded]):.2f} different texts among {decoded[0]['texts']}"


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
