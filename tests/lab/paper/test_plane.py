"""The areas that fronts dominate, and the claims of pareto on numbers written by hand."""

import itertools
import math

import numpy as np
import pytest

from d5p4_lab.paper import pareto
from d5p4_lab.paper.open_ended import area
from d5p4_lab.paper.setup import Case


def boxes(points: np.ndarray, corner: np.ndarray) -> float:
    """The area of the union of the rectangles from each point [2] up to the corner, cell by cell."""
    inside = [p for p in points if (p < corner).all()]
    xs = sorted({float(p[0]) for p in inside} | {float(corner[0])})
    ys = sorted({float(p[1]) for p in inside} | {float(corner[1])})
    total = 0.0
    for (a, b), (c, d) in itertools.product(itertools.pairwise(xs), itertools.pairwise(ys)):
        if any(p[0] <= a and p[1] <= c for p in inside):
            total += (b - a) * (d - c)
    return total


def test_the_area_is_that_of_the_union_of_boxes():
    """Random points, some beyond the corner, some equal, some dominated."""
    corner = np.array([0.5, 1.0])
    for count in (1, 2, 3, 8):
        random = np.random.default_rng(count)
        front = random.normal(size=(60, count, 2))
        front[::3] = front[::3].round()  # equal ones, and ones on the corner's lines
        areas = area([front[:, i] for i in range(count)], corner)
        assert areas == pytest.approx([boxes(points_of, corner) for points_of in front], abs=1e-12)


def line_of(group: str, values: range) -> list[Case]:
    return [Case(f"{group} {value}", {"method": group}, 3, group=group, value=float(value)) for value in values]


def test_the_breakdown_is_where_perplexity_first_exceeds_that_of_greedy_search():
    """Points [nats, cosine] of a sweep; the first row of a case is its mean, the second a resample."""
    bound = math.log1p(pareto.BREAKDOWN)
    for points_of, cosine in (
        ([(bound / 2, 0.8), (bound * 1.5, 0.6), (bound * 3, 0.1)], 0.7),  # halfway between the first two points
        ([(bound * 2, 0.5)], 0.7),  # the sweep begins at greedy beam search, with cosine 0.9
        ([(0.0, 0.8), (bound / 2, 0.4)], 0.4),  # never
        ([(bound * 2, 0.7), (0.0, 0.5), (bound * 2, 0.3)], 0.8),  # the first time
    ):
        line = line_of("a", range(1, 1 + len(points_of)))
        m = {case.name: np.array([p, p]) for case, p in zip(line, points_of, strict=True)}
        reached = pareto._at_breakdown({pareto.GREEDY: np.array([[0.0, 0.9]] * 2), **m}, line)
        assert reached == pytest.approx([cosine] * 2), points_of
