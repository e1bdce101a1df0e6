import itertools
import math

import numpy as np
import pytest

from d5p4.eval.stats import Figure, figure, resampled_means
from d5p4_lab.paper import pareto
from d5p4_lab.paper.drawing import Table, pyplot
from d5p4_lab.paper.plane import area, by_judges, curves, draw_plane, means, perplexity, plane_table, points
from d5p4_lab.paper.setup import Case, Experiment, Setup

SETTINGS = {"judges": ("one", "two"), "encoder": "coder", "model": "given"}


def boxes(points: np.ndarray, corner: np.ndarray) -> float:
    """The area of the union of the rectangles from each point [2] up to the corner, cell by cell."""
    inside = [p for p in points if (p < corner).all()]
    xs = sorted({float(p[0]) for p in inside} | {float(corner[0])})
    ys = sorted({float(p[1]) for p in inside} | {float(corner[1])})
    found = 0.0
    for (a, b), (c, d) in itertools.product(itertools.pairwise(xs), itertools.pairwise(ys)):
        if any(p[0] <= a and p[1] <= c for p in inside):
            found += (b - a) * (d - c)
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_area_is_that_of_the_union_of_boxes(count):
    """Random points, some beyond the corner, some equal, some dominated."""
    random = np.random.default_rng(count)
    front = random.normal(size=(60, count, 2))
    front[::3] = front[::3].round()  # equal ones, and ones on the corner's lines
    corner = np.array([0.5, 1.0])
    found = area([front[:, i] for i in range(count)], corner)
    assert found.shape == (60,)
    assert found == pytest.approx([boxes(each, corner) for each in front], abs=1e-12)
    shuffled = area([front[:, i] for i in random.permutation(count)], corner)
    assert shuffled == pytest.approx(found, abs=1e-12)


def test_the_area_against_darts():
    random = np.random.default_rng(5)
    front, corner = random.random((6, 2)), np.array([1.2, 0.9])
    darts = random.random((200_000, 2)) * corner
    hit = (front[:, None] <= darts).all(-1).any(0).mean() * corner.prod()
    assert area([p[None] for p in front], corner) == pytest.approx(hit, abs=0.005)


def test_areas_by_hand():
    corner = np.array([4.0, 4.0])

    def of(*front: tuple[float, float]) -> float:
        return float(area([np.array([p], dtype=float) for p in front], corner)[0])

    assert of((1, 2)) == 6 and of((1, 2), (2, 1)) == 8
    assert of((1, 2), (1, 2)) == of((1, 2), (3, 3)) == of((1, 2), (1, 3), (2, 2)) == 6  # equal and dominated ones
    assert of((5, 1)) == of((1, 5)) == of((5, 5)) == of((4, 0)) == 0 and of((1, 2), (5, 0), (0, 5)) == 6
    assert of((-1, 3)) == 5


def test_perplexity_is_the_exponential_of_a_mean():
    values = np.random.default_rng(0).normal(3, 0.4, size=40)
    found, plain = perplexity(values), figure(values)
    assert found.value == pytest.approx(math.exp(values.mean())) and found.n == 40
    assert (found.low, found.high) == pytest.approx((math.exp(plain.low), math.exp(plain.high)))
    assert found.se == pytest.approx(found.value * plain.se, rel=0.01)  # the delta method, near the jackknife
    assert perplexity(np.array([1.0, np.nan, 3.0])).dropped == 1


def case(group: str, value: float | None) -> Case:
    return Case(f"{group}, T {value}", {"method": group}, 3, group=group, value=value)


def test_curves_are_in_the_order_of_their_values():
    given = [case("b", 30), case("a", None), case("b", 0.3), case("b", 4), case("c", 1)]
    found = curves(given)
    assert list(found) == ["b", "a", "c"]
    assert [each.value for each in found["b"]] == [0.3, 4, 30] and found["a"] == [given[1]]


# --- with rows written by hand ---


def write(setup: Setup, case: Case, nats: np.ndarray, cosines: np.ndarray) -> None:
    """Scores of a case: nats [judges, units, k], and the cosine of every pair [units]."""
    for judge, values in zip(setup["judges"], nats, strict=True):
        rows = {str(unit): {"nats": row.tolist()} for unit, row in enumerate(values)}
        setup.scores(case, f"ppl-{judge}").add_all(rows)
    k = nats.shape[2]
    grams = {str(u): {"gram": (np.full((k, k), c) + (1 - c) * np.eye(k)).tolist()} for u, c in enumerate(cosines)}
    setup.scores(case, "cos-coder").add_all(grams)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A setup with D5P4+ at five values of β, log perplexity and cosine known."""
    monkeypatch.setattr(Setup, "weights", "none")
    betas = (1.0, 10.0, 100.0, 1000.0, 10_000.0)
    cases = [Case(f"D5P4+, β {b:g}", {"method": "d5p4", "beta": b}, 30, group="D5P4+", value=b) for b in betas]
    own = Experiment("own", "Title", "nowhere", {"box": SETTINGS}, lambda setup: None, lambda setup: cases)
    setup = Setup(own, "box", tmp_path)
    random = np.random.default_rng(0)
    for place, each in enumerate(cases):
        nats = 3 + 0.1 * place + 0.01 * random.normal(size=(2, 30, 4))  # a straight line in log β
        nats[1] += 1
        write(setup, each, nats, 0.9 - 0.1 * place + 0.01 * random.normal(size=30))
    return setup


def test_points_and_their_resamples(made):
    found = points(made, made.cases, "one")
    first = made.cases[0].name
    assert found[first].shape == (30, 2) and found[first].mean(0) == pytest.approx([3, 0.9], abs=0.01)
    resampled = means(made, made.cases, "two")
    assert resampled[first].shape == (2001, 2) and resampled[first][0] == pytest.approx([4, 0.9], abs=0.01)
    assert resampled[first][0] == pytest.approx(points(made, made.cases, "two")[first].mean(0))
    # Units of one number share their random streams, so resamples of all cases are of the same units.
    again = resampled_means(points(made, made.cases, "two")[first], seed=30)
    assert np.array_equal(resampled[first], again)


def test_the_table_and_the_figure_of_the_plane(made):
    table = plane_table(made, "T", made.cases)
    assert isinstance(table, Table) and table.columns == [
        "case", "sets", "perplexity, one", "perplexity, two", "S-COS",
    ]  # fmt: skip
    assert len(table.rows) == 5 and table.rows[0][:2] == ["D5P4+, β 1", "30"]
    assert table.rows[0][2].startswith(f"{math.exp(3):.0f}.") and table.rows[0][4].startswith("0.9")
    picture, axes = pyplot().subplots()
    draw_plane(axes, made, made.cases, "one", name_ends_of=("D5P4+",))
    (line,) = [each for each in axes.lines if each.get_marker() == "*"]
    assert line.get_xdata() == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5], abs=0.01)
    assert line.get_ydata() == pytest.approx(np.exp([3, 3.1, 3.2, 3.3, 3.4]), rel=0.01)
    assert [text.get_text() for text in axes.texts] == ["β 10000"]
    pyplot().close(picture)


def test_judges_must_agree(made):
    up, down = Figure(1.0, 0.1, 0.5, 1.5, 9), Figure(-1.0, 0.1, -1.5, -0.5, 9)
    told, verdict = by_judges(made, [up, down], ["holds", "does not hold"], 1)
    assert told == "one 1.0 [0.5, 1.5]; two -1.0 [-1.5, -0.5]" and verdict == "not clear"
    assert by_judges(made, [up, up], ["holds", "holds"])[1] == "holds"


@pytest.mark.parametrize(
    "rises, verdict",
    [
        ((0, 1, 2, 3, 6), "not clear"),  # a straight line, up to noise
        ((0, 0, 0, 2, 4), "holds"),
        ((0, 2, 4, 4, 4), "does not hold"),
    ],
)
def test_a_second_regime_is_a_steeper_one(tmp_path, monkeypatch, rises, verdict):
    """Slopes are compared, not sums: the parts of the sweep below and above its middle are not equally wide."""
    monkeypatch.setattr(Setup, "weights", "none")
    betas = (1.0, 10.0, 100.0, 1000.0, 1_000_000.0)
    cases = [Case(f"β {b:g}", {"method": "d5p4", "beta": b}, 30, group="D5P4+", value=b) for b in betas]
    setup = Setup(Experiment("own", "T", "P", {"box": SETTINGS}, lambda s: None, lambda s: cases), "box", tmp_path)
    random = np.random.default_rng(1)
    for each, height in zip(cases, rises, strict=True):
        nats = np.repeat(3 + height + 0.05 * random.normal(size=(2, 30, 1)), 2, axis=2)
        write(setup, each, nats, np.full(30, 0.5))
    found = {judge: means(setup, cases, judge) for judge in setup["judges"]}
    claim = pareto._rises_later(setup, found, curves(cases)["D5P4+"])
    assert claim.verdict == verdict and "above 100 minus" in claim.ours


def test_a_sweep_of_two_values_has_no_second_regime(made):
    line = made.cases[:2]
    found = {judge: means(made, made.cases, judge) for judge in made["judges"]}
    assert pareto._rises_later(made, found, line).verdict == "not clear"
