"""The quality-diversity plane: perplexity against cosine, fronts, and what can be said of them.

Letters in shapes: n units, R resamples (row 0 is the plain value).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..statistics import Figure, figure, ratio_figure, resampled_means
from .answers import numbers_of
from .drawing import STYLES, Table, Verdict, agreed, bars, shown
from .rows import Row
from .scoring import self_cosine
from .setup import Case, Digest, Setup

Means = Mapping[str, np.ndarray]
"""By case: [1 + R, 2], mean nats a token and mean cosine."""


def _reduce(setup: Setup, case: Case, unit: int, row: Row, said: Mapping[str, Row]) -> Row:
    nats = {judge: round(float(np.mean(said[f"ppl:{judge}"]["nats"])), 7) for judge in setup["judges"]}
    cosine = round(self_cosine(said[f"cos:{setup['encoder']}"]["gram"]), 7)
    counts = {name: row[name] for name in ("distinct", "rows", "nominal")}
    return {"nats": nats, "cosine": cosine, "texts": len(row["texts"]), **counts}


PLANE = Digest("plane", _reduce)
"""Of a set: mean nats per token under each judge, mean cosine of two texts, and what it cost."""


def points(setup: Setup, cases: Sequence[Case], judge: str) -> dict[str, np.ndarray]:
    """[n, 2] of each case: mean nats a token of a set's texts under the judge, and their mean cosine."""
    return {
        case.name: np.array([[row["nats"][judge], row["cosine"]] for row in numbers_of(setup, case)]) for case in cases
    }


def means(setup: Setup, cases: Sequence[Case], judge: str) -> dict[str, np.ndarray]:
    """The means of each case and their resamples."""
    # Units of one number share their random streams in all cases, so they are resampled together.
    return {name: resampled_means(values, seed=len(values)) for name, values in points(setup, cases, judge).items()}


def perplexity(values: np.ndarray) -> Figure:
    """exp of the mean of [n] nats."""
    return ratio_figure(values, np.ones(len(values)), np.exp)


def area(front: Sequence[np.ndarray], corner: np.ndarray) -> np.ndarray:
    """[1 + R]: the area that points [1 + R, 2] dominate (lower is better in both) up to a corner [2]."""
    stacked = np.minimum(np.stack(front, 1), corner)  # [1 + R, points, 2]
    order = stacked[..., 0].argsort(1)
    x = np.take_along_axis(stacked[..., 0], order, 1)
    lowest = np.minimum.accumulate(np.take_along_axis(stacked[..., 1], order, 1), 1)
    widths = np.diff(np.concatenate([x, np.full((len(x), 1), corner[0])], 1), axis=1)
    return (widths * (corner[1] - lowest)).sum(1)


def unbiased(samples: np.ndarray) -> np.ndarray:
    """[1 + R] without the bias that resamples show: what they lie above the value, it may lie above the truth.

    A front is made of its luckiest points, so its area comes out too large, and more so the more points it has.
    """
    bias = samples[1:].mean() - samples[0]
    return np.concatenate([samples[:1] - bias, samples[1:] - 2 * bias])


def curves(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases by group, in order of the swept value."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return {name: sorted(group, key=lambda case: case.value or 0.0) for name, group in found.items()}


def plane_table(setup: Setup, title: str, cases: Sequence[Case], note: str = "") -> Table:
    """Every point with its intervals."""
    judges = setup["judges"]
    found = {judge: points(setup, cases, judge) for judge in judges}
    rows = []
    for case in cases:
        cells = [shown(perplexity(found[judge][case.name][:, 0]), 1) for judge in judges]
        cosine = shown(figure(found[judges[0]][case.name][:, 1]), 4)
        rows.append([case.name, str(case.units), *cells, cosine])
    return Table(title, ["case", "sets", *(f"perplexity, {judge}" for judge in judges), "S-COS"], rows, note)


def draw_plane(axes: Any, setup: Setup, cases: Sequence[Case], judge: str, name_ends_of: Sequence[str] = ()) -> None:
    """Points with their intervals, a line for each method; the last point of some lines named by its parameter."""
    found = points(setup, cases, judge)
    for name, group in curves(cases).items():
        style = STYLES[name]
        ppl = [perplexity(found[case.name][:, 0]) for case in group]
        cos = [figure(found[case.name][:, 1]) for case in group]
        x, y = [f.value for f in cos], [f.value for f in ppl]
        axes.errorbar(
            x, y, xerr=bars(cos), yerr=bars(ppl), color=style["color"], marker=style["marker"],
            linestyle=style["linestyle"] if len(group) > 1 else "none", linewidth=1.2, elinewidth=0.5, capsize=0,
            label=name, markeredgecolor="black", markeredgewidth=0.4, zorder=3,
        )  # fmt: skip
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


def by_judges(setup: Setup, differences: Sequence[Figure], verdicts: Sequence[Verdict], digits: int = 4) -> (
    tuple[str, Verdict]
):
    """What each judge says in words, and the verdict they share."""
    told = "; ".join(f"{judge} {shown(d, digits)}" for judge, d in zip(setup["judges"], differences, strict=True))
    return told, agreed(list(verdicts))
