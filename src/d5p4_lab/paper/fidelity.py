"""Compares MAUVE and MAUVE* of D5P4+, at several values of β, with MAUVE and MAUVE* of independent sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5p4.errors import D5P4Error

from ..statistics import NORMAL_95, Figure
from .answers import numbers_of
from .drawing import Claim, Drawing, Evidence, Table, bars, decided, every, listed, pyplot, shown
from .measures import MauveInterval, mauve_interval
from .open_ended import BOX, INDEPENDENT, PAPER, independent, sweep
from .rows import Row, Source, complete, missing_keys
from .scoring import feature_reader, judge_dtype, pack8, unpack, unpack8
from .setup import Case, Digest, Experiment, Setup
from .windows import real_windows

STAR = 0.5  # MAUVE* adds this number to the count of every bin
PAPERS = {1: 0.8669, 3: 0.8811, 10: 0.9195, 30: 0.9366, 100: 0.9515, 300: 0.9474, 1000: 0.8746}  # MAUVE by β


def cases(setup: Setup) -> list[Case]:
    if len(setup["beta_fidelity"]) < 3:
        raise D5P4Error(
            f"beta_fidelity={setup['beta_fidelity']!r}: give three values or more, "
            "so that at least one lies between the first and the last"
        )
    units = setup["units_fidelity"]
    return [independent(setup, units), *sweep(setup, "D5P4+", "d5p4", "beta", setup["beta_fidelity"], units)]


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    return pack8(unpack(scores[f"features:{setup['judges'][0]}"]))


def real_texts(setup: Setup) -> Source:
    """Return the `Source` of real texts: as many as a case has answers, and each as long as an answer, in tokens."""
    return real_windows(setup, setup["gen_length"], setup["units_fidelity"] * setup["k"])


def reference(setup: Setup) -> Source:
    """Return the `Source` of the features of the real texts, with one row per text."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        texts = [setup.rows(windows)[key] for key in keys]
        features = feature_reader(setup["judges"][0], setup.device, judge_dtype(setup))([row["text"] for row in texts])
        return {
            key: pack8(row[None]) | {"document": text["document"]}
            for key, row, text in zip(keys, features, texts, strict=True)
        }

    windows = real_texts(setup)
    made_with = {"judge": setup["judges"][0], "length": setup["gen_length"], "model": setup.weights}
    tokens = {setup["judges"][0]: setup["gen_length"]}
    return setup.source("real", windows.keys, make, together=len(windows.keys), tokens=tokens, **made_with)


def sources(setup: Setup) -> list[Source]:
    features = reference(setup)
    return [real_texts(setup), features] if missing_keys(setup, features) else [features]


def _real(setup: Setup) -> tuple[np.ndarray, list[Any]]:
    """Return the features [n, D] of the real texts, and the document that each text comes from."""
    rows = complete(setup, reference(setup))
    return np.concatenate([unpack8(row) for row in rows]), [row["document"] for row in rows]


def _over_seeds(interval: MauveInterval) -> MauveInterval:
    """Replace the MAUVE of the first k-means seed by the mean over all seeds. Shift the interval by the same amount."""
    first = interval.figure
    change = float(np.mean(interval.seeds)) - first.value
    value, low, high = (min(1.0, max(0.0, x + change)) for x in (first.value, first.low, first.high))
    return interval._replace(figure=first._replace(value=value, low=low, high=high))


def draw(setup: Setup) -> Drawing:
    real, documents = _real(setup)
    by_case: dict[str, list[MauveInterval]] = {}
    for case in setup.cases:
        packed = [unpack8(row) for row in numbers_of(setup, case)]
        features = np.concatenate(packed)
        sets = np.repeat(np.arange(len(packed)), [len(texts) for texts in packed])
        seeds = [25 + i for i in range(setup["mauve_seeds"])]
        groups = {"p_groups": documents, "q_groups": sets.tolist()}
        by_case[case.name] = [
            _over_seeds(mauve_interval(real, features, smoothing=smoothing, seeds=seeds, **groups))
            for smoothing in (0.0, STAR)
        ]
    rows = []
    for case in setup.cases:
        plain, star = by_case[case.name]
        paper = f"{PAPERS[int(case.value)]:.4f}" if case.value in PAPERS else ".8824" if case.value is None else "–"
        spread = f"{np.std(plain.seeds, ddof=1):.4f}" if len(plain.seeds) > 1 else "–"
        rows.append([case.name, shown(plain.figure, 4), shown(star.figure, 4), spread, paper])
    note = (
        f"{len(real)} generated texts are compared with {len(real)} real texts, which are cut to the same length. The "
        f"features are the states of {setup['judges'][0]} at the last token, stored in 8 bits. Values are means over "
        f"{setup['mauve_seeds']} seeds of k-means; the spread of seeds is their standard deviation. The intervals come "
        "from resampled sets and books in fixed clusters."
    )
    table = Table("MAUVE against β", ["case", "MAUVE", "MAUVE*", "spread of seeds", "the paper's MAUVE"], rows, note)
    numbers = {name: {"mauve": pair[0].figure, "star": pair[1].figure} for name, pair in by_case.items()}
    return Drawing([table], _figure(setup, by_case), numbers, _claims(setup, by_case))


def _claims(setup: Setup, by_case: dict[str, list[MauveInterval]]) -> list[Claim]:
    line = [case for case in setup.cases if case.value is not None]
    inner, ends = line[1:-1], (line[0], line[-1])
    papers = (
        ("MAUVE", ".9515 at β 100; .8669 at 1, .8746 at 1000", ".9515 against .8824"),
        ("MAUVE*", ".9615 at β 100; .9024 at 1, .9078 at 1000", ".9615 against .9134"),
    )
    claims = []
    for place, (kind, paper_middle, paper_independent) in enumerate(papers):
        figures = {name: intervals[place].figure for name, intervals in by_case.items()}
        best = max(inner, key=lambda case: figures[case.name].value)
        ours, alone = figures[best.name], figures[INDEPENDENT]
        edges = [figures[case.name] for case in ends]
        values = f"highest between the ends, at β {best.value:g}: {shown(ours, 4)}; at the ends, "
        values += listed((f"β {case.value:g}:" for case in ends), edges, 4)
        claims += [
            Claim(
                f"{kind} is highest at a β between the ends of the sweep",
                paper_middle,
                values,
                every([_apart(ours, edge) for edge in edges]),
                f"the value is the best of {len(inner)}, so its interval is slightly too optimistic",
            ),
            Claim(
                f"The best β has a higher {kind} than independent sampling",
                paper_independent,
                f"{shown(ours, 4)} against {shown(alone, 4)}",
                _apart(ours, alone),
            ),
        ]
    return claims


def _apart(a: Figure, b: Figure) -> Evidence:
    """The claim that a is larger than b."""
    gap, se = a.value - b.value, float(np.hypot(a.se, b.se))
    return decided(Figure(gap, se, gap - NORMAL_95 * se, gap + NORMAL_95 * se, a.n))


def _figure(setup: Setup, by_case: dict[str, list[MauveInterval]]) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(figsize=(6.2, 3.8))
    line = [case for case in setup.cases if case.value is not None]
    for place, name, colour, marker in ((0, "MAUVE", "#0072B2", "o"), (1, "MAUVE*", "#D55E00", "s")):
        figures = [by_case[case.name][place].figure for case in line]
        betas, values = [case.value for case in line], [f.value for f in figures]
        look = {"color": colour, "marker": marker, "capsize": 2}
        axes.errorbar(betas, values, yerr=bars(figures), label=f"D5P4+, {name}", **look)
        alone = by_case[INDEPENDENT][place].figure
        axes.axhline(alone.value, color=colour, linestyle=":", label=f"independent, {name}")
        axes.axhspan(alone.low, alone.high, color=colour, alpha=0.08)
    axes.set_xscale("log")
    axes.set_xlabel("β")
    axes.set_ylabel("MAUVE against held-out text")
    axes.legend(fontsize=8)
    return picture


EXPERIMENT = Experiment(
    name="fidelity",
    title="Fidelity to real text",
    paper="Figure mauve",
    settings={"box": dict(BOX) | {"mauve_seeds": 5}, "paper": dict(PAPER) | {"mauve_seeds": 5}},
    draw=draw,
    cases=cases,
    digest=Digest("fidelity", _reduce),
    sources=sources,
    scorers=("features",),
    measured_by=("features",),
    needs_text=("box", "paper"),
)
