"""The areas that fronts dominate, and the claims of pareto on numbers written by hand."""

import itertools

import numpy as np
import pytest

from d5p4_lab.paper.open_ended import area


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
