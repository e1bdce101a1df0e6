"""The quality-diversity plane: perplexity against cosine, the fronts of methods, and the areas that fronts dominate.

In shapes, n is the number of units (a unit is one set of answers) and R the number of resamples of the units. Row 0 of
[1 + R] is the value without resampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..figures import EDGE, bars
from ..statistics import Figure, figure, ratio_figure, resampled_means
from ..tables import Table, shown
from .answers import numbers_of
from .drawing import STYLES
from .measures import repeated_triples
from .rows import Row
from .scoring import self_cosine
from .setup import Case, Digest, Setup

Means = Mapping[str, np.ndarray]
"""For each case, by name: the mean nats per token (column 0) and the mean cosine (column 1), [1 + R, 2]."""


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    nats = {judge: round(float(np.mean(scores[f"ppl:{judge}"]["nats"])), 5) for judge in setup["judges"]}
    cosine = round(self_cosine(scores[f"cos:{setup['encoder']}"]["gram"]), 5)
    counts = {name: row[name] for name in ("distinct", "rows", "nominal")}
    repeated = round(float(np.mean([repeated_triples(text) for text in row["texts"]])), 4)
    return {"nats": nats, "cosine": cosine, "repeated": repeated, "texts": len(row["texts"]), **counts}


PLANE = Digest("plane", _reduce)
"""Reduces a set to mean nats per token under each judge, the mean cosine of two texts, the mean share of repeated word
triples in a text, and counts of texts and rows. Rows of the first run have no share of repeated triples.
"""


def points(setup: Setup, cases: Sequence[Case], judge: str) -> dict[str, np.ndarray]:
    """For each case, [n, 2]: per set of answers, the mean nats per token under the judge and the texts' mean cosine."""
    return {
        case.name: np.array([[row["nats"][judge], row["cosine"]] for row in numbers_of(setup, case)]) for case in cases
    }


def means(setup: Setup, cases: Sequence[Case], judge: str) -> dict[str, np.ndarray]:
    """For each case, [1 + R, 2]: row 0 is the mean of `points` over all units, row r the mean over resample r."""
    # A unit has the same random stream in all cases, so its values in two cases are correlated. The seed is the
    # number of units, so that cases with equally many units are resampled alike: each resample draws the same units.
    return {name: resampled_means(values, seed=len(values)) for name, values in points(setup, cases, judge).items()}


def perplexity(values: np.ndarray) -> Figure:
    """The perplexity of n sets: exp of the mean of their nats per token [n]."""
    return ratio_figure(values, np.ones(len(values)), np.exp)


def area(front: Sequence[np.ndarray], corner: np.ndarray) -> np.ndarray:
    """The area [1 + R] that a front dominates, bounded by the point `corner` [2]. On both axes, lower is better."""
    stacked = np.minimum(np.stack(front, 1), corner)  # [1 + R, points, 2]
    order = stacked[..., 0].argsort(1)
    x = np.take_along_axis(stacked[..., 0], order, 1)
    lowest = np.minimum.accumulate(np.take_along_axis(stacked[..., 1], order, 1), 1)
    widths = np.diff(np.concatenate([x, np.full((len(x), 1), corner[0])], 1), axis=1)
    return (widths * (corner[1] - lowest)).sum(1)


def unbiased(samples: np.ndarray) -> np.ndarray:
    """Subtract the bias from areas [1 + R]. The bias is estimated as the mean of rows 1 to R minus row 0.

    A front consists of the best points, which are partly lucky, so its area is too large: more so with more points.
    """
    bias = samples[1:].mean() - samples[0]
    return np.concatenate([samples[:1] - bias, samples[1:] - 2 * bias])


def curves(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """For each group, its cases in the order of the values of the parameter that varies."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return {name: sorted(group, key=lambda case: case.value or 0.0) for name, group in groups.items()}


def plane_table(setup: Setup, title: str, cases: Sequence[Case], note: str = "") -> Table:
    judges = setup["judges"]
    by_judge = {judge: points(setup, cases, judge) for judge in judges}
    rows = []
    for case in cases:
        cells = [shown(perplexity(by_judge[judge][case.name][:, 0]), 1) for judge in judges]
        cosine = shown(figure(by_judge[judges[0]][case.name][:, 1]), 4)
        rows.append([case.name, str(case.units), *cells, cosine])
    return Table(title, ["case", "sets", *(f"perplexity, {judge}" for judge in judges), "S-COS"], rows, note)


def draw_plane(axes: Any, setup: Setup, cases: Sequence[Case], judge: str, name_ends_of: Sequence[str] = ()) -> None:
    by_case = points(setup, cases, judge)
    for name, group in curves(cases).items():
        style = STYLES[name]
        ppl = [perplexity(by_case[case.name][:, 0]) for case in group]
        cos = [figure(by_case[case.name][:, 1]) for case in group]
        x, y = [f.value for f in cos], [f.value for f in ppl]
        line = {"linestyle": style["linestyle"] if len(group) > 1 else "none", "linewidth": 1.2, "elinewidth": 0.5}
        look = style | line | EDGE | {"capsize": 0, "zorder": 3}
        axes.errorbar(x, y, xerr=bars(cos), yerr=bars(ppl), label=name, **look)
        if name in name_ends_of:
            end = group[-1].name.split(", ")[-1]
            axes.annotate(end, (x[-1], y[-1]), textcoords="offset points", xytext=(5, 5), fontsize=7)
    low, high = axes.get_ylim()
    if high > 2.5 * low:
        axes.set_yscale("log")
    axes.set_xlabel("S-COS: cosine between the texts of a set (lower: more different)")
    axes.set_ylabel(f"perplexity under {judge} (lower: better)")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.tick_params(axis="y", which="minor", labelsize=7)
