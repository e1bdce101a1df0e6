import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5p4_lab.paper import pareto
from d5p4_lab.paper.plane import PLANE, area, curves, means
from d5p4_lab.paper.setup import Case, Experiment, Setup
from tests.lab.paper.smoke import write_numbers

SETTINGS = {"judges": ("one", "two"), "encoder": "coder", "model": "given"}


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
    """Random points, some beyond the corner, some equal, some dominated, and a few points by hand."""
    corner = np.array([0.5, 1.0])
    for count in (1, 2, 3, 8):
        random = np.random.default_rng(count)
        front = random.normal(size=(60, count, 2))
        front[::3] = front[::3].round()  # equal ones, and ones on the corner's lines
        areas = area([front[:, i] for i in range(count)], corner)
        assert areas == pytest.approx([boxes(points_of, corner) for points_of in front], abs=1e-12)
        shuffled = area([front[:, i] for i in random.permutation(count)], corner)
        assert shuffled == pytest.approx(areas, abs=1e-12)

    def of(*front: tuple[float, float]) -> float:
        return float(area([np.array([p], dtype=float) for p in front], np.array([4.0, 4.0]))[0])

    assert of((1, 2)) == 6 and of((1, 2), (2, 1)) == 8 and of((-1, 3)) == 5
    assert of((1, 2), (1, 2)) == of((1, 2), (3, 3)) == of((1, 2), (1, 3), (2, 2)) == 6  # equal and dominated ones
    assert of((5, 1)) == of((1, 5)) == of((5, 5)) == of((4, 0)) == 0 and of((1, 2), (5, 0), (0, 5)) == 6


def case(group: str, value: float | None) -> Case:
    return Case(f"{group}, T {value}", {"method": group}, 3, group=group, value=value)


# --- with numbers written by hand ---


def sweep_of(folder: Path, betas: Sequence[float], nats: Callable[[int], Any], cosine: Callable[[int], Any]) -> Setup:
    """D5P4+ at some values of β: nats [judges, units] and cosines [units] of each."""
    cases = [Case(f"D5P4+, β {b:g}", {"method": "d5p4", "beta": b}, 30, group="D5P4+", value=b) for b in betas]
    own = Experiment("own", "Title", "nowhere", {"box": SETTINGS}, lambda setup: None, lambda setup: cases, PLANE)
    setup = Setup(own, "box", folder)
    numbers = {}
    for place, case in enumerate(cases):
        pairs = zip(np.asarray(nats(place)).T.tolist(), cosine(place), strict=True)
        numbers[case.name] = [
            {"nats": dict(zip(SETTINGS["judges"], nats_of, strict=True)), "cosine": float(c)} for nats_of, c in pairs
        ]
    write_numbers(setup, numbers)
    return setup


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Five values of β with known cosines and log perplexities; the latter are a straight line in log β."""
    monkeypatch.setattr(Setup, "weights", "none")
    random = np.random.default_rng(0)

    def nats(place: int) -> np.ndarray:
        return 3 + 0.1 * place + 0.01 * random.normal(size=(2, 30)) + np.array([[0], [1]])

    def cosine(place: int) -> np.ndarray:
        return 0.9 - 0.1 * place + 0.01 * random.normal(size=30)

    return sweep_of(tmp_path, (1.0, 10.0, 100.0, 1000.0, 10_000.0), nats, cosine)


def test_a_second_regime_is_a_steeper_one(tmp_path, made):
    """The claim compares slopes, because the parts of the sweep below and above its middle differ in width."""
    for rises, verdict in (
        ((0, 1, 2, 3, 6), "not clear"),  # a straight line, up to noise
        ((0, 0, 0, 2, 4), "holds"),
        ((0, 2, 4, 4, 4), "does not hold"),
    ):
        random = np.random.default_rng(1)

        def nats(place: int, rises: tuple[int, ...] = rises, random: np.random.Generator = random) -> np.ndarray:
            return 3 + rises[place] + 0.05 * random.normal(size=(2, 30))

        betas = (1.0, 10.0, 100.0, 1000.0, 1_000_000.0)
        setup = sweep_of(tmp_path / str(rises), betas, nats, lambda place: np.full(30, 0.5))
        by_judge = {judge: means(setup, setup.cases, judge) for judge in setup["judges"]}
        claim = pareto._rises_later(pareto.Fronts(setup, curves(setup.cases), by_judge, {}), "D5P4+")
        assert claim.record()["verdict"] == verdict and "above minus below the parameter value 100" in claim.ours, rises
    by_judge = {judge: means(made, made.cases, judge) for judge in made["judges"]}
    claim = pareto._rises_later(pareto.Fronts(made, {"D5P4+": made.cases[:2]}, by_judge, {}), "D5P4+")
    assert claim.record()["verdict"] == "not clear"  # two values have no middle


def test_a_longer_sweep_is_not_called_better_where_both_have_points(made):
    """Two sweeps on one line, of which one ends earlier: the areas differ, but not at the cosines that both reach."""
    random = np.random.default_rng(0)
    lines = {"a": [case("a", value) for value in (1, 2, 3, 4)], "b": [case("b", value) for value in (1, 2, 3)]}

    def at(place: float) -> np.ndarray:
        return np.array([3 + place, 0.9 - 0.1 * place]) + 1e-4 * random.normal(size=(200, 2))

    m = {pareto.GREEDY: at(0), pareto.INDEPENDENT: at(0) + [9, 0]}
    m |= {one.name: at(one.value or 0) for line in lines.values() for one in line}
    areas = {name: area([m[point] for point in pareto._front(line)], pareto._corner(m)) for name, line in lines.items()}
    fronts = pareto.Fronts(made, lines, {"one": m, "two": m}, {"one": areas, "two": areas})
    claim = pareto._order(fronts, "a", "b")
    assert claim.record()["verdict"] == "holds"
    assert re.search(r"a 0\.(49|50)\d+, b 0\.(59|60)\d+;", claim.note)
    assert re.search(r"both reach: one -?0\.00\d\d \[-0\.\d+, 0\.\d+\]", claim.note)


def test_the_breakdown_is_where_perplexity_first_exceeds_that_of_greedy_search():
    """Points [nats, cosine] of a sweep; the first row of a case is its mean, the second a resample."""

    def sweep_from(*points_of: tuple[float, float]) -> tuple[dict[str, np.ndarray], list[Case]]:
        line = [case("a", value) for value in range(1, 1 + len(points_of))]
        return {one.name: np.array([p, p]) for one, p in zip(line, points_of, strict=True)}, line

    bound = math.log1p(pareto.BREAKDOWN)
    for points_of, cosine in (
        ([(bound / 2, 0.8), (bound * 1.5, 0.6), (bound * 3, 0.1)], 0.7),  # halfway between the first two points
        ([(bound * 2, 0.5)], 0.7),  # the sweep begins at greedy beam search, with cosine 0.9
        ([(0.0, 0.8), (bound / 2, 0.4)], 0.4),  # never
        ([(bound * 2, 0.7), (0.0, 0.5), (bound * 2, 0.3)], 0.8),  # the first time
    ):
        made_of, line = sweep_from(*points_of)
        reached = pareto._at_breakdown({pareto.GREEDY: np.array([[0.0, 0.9]] * 2), **made_of}, line)
        assert reached == pytest.approx([cosine] * 2), points_of
