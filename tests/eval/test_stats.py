"""Intervals against their range and their coverage, closed forms against all subsets."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats as reference

from d5p4.eval.stats import FEWEST, average_cosine, best_of, majority, mean_figure, pass_at
from tests.refusals import refusal

# ---- coverage: how often the interval of a simulated file of groups holds the truth


def shares(random, files, groups, a, b):
    """The chance of a right answer to each prompt: Beta(a, b), which is U-shaped for small a and b."""
    return random.beta(a, b, size=(files, groups))


def graded(random, files, groups, a, b, m, k):
    """100 · pass@k of m answers per group."""
    wrong = m - random.binomial(m, shares(random, files, groups, a, b))
    return 100 * (1 - np.prod([(wrong - i).clip(0) / (m - i) for i in range(k)], axis=0))


def true_pass(a, b, k):
    """E[1 - (1 - p)^k] for p from Beta(a, b)."""
    return 100 * (1 - np.prod([(b + i) / (a + b + i) for i in range(k)]))


PERCENT = (0, 100)
SETTINGS = {  # name: (draw(random, files, groups), truth, range)
    "pass@1, one answer, easy or hard": (lambda r, f, g: graded(r, f, g, 0.4, 0.6, 1, 1), 40, PERCENT),
    "pass@1 of 4": (lambda r, f, g: graded(r, f, g, 0.5, 1.5, 4, 1), true_pass(0.5, 1.5, 1), PERCENT),
    "pass@4 of 8": (lambda r, f, g: graded(r, f, g, 0.5, 1.5, 8, 4), true_pass(0.5, 1.5, 4), PERCENT),
    "pass@1 of 4, hard": (lambda r, f, g: graded(r, f, g, 0.3, 1.7, 4, 1), 15, PERCENT),
    "pass@2 of 4, easy": (lambda r, f, g: graded(r, f, g, 1.5, 0.5, 4, 2), true_pass(1.5, 0.5, 2), PERCENT),
    "F1, many zeros": (lambda r, f, g: (r.random((f, g)) < 0.6) * 100 * shares(r, f, g, 2, 3), 24, PERCENT),
    "distinct-1": (lambda r, f, g: 100 * shares(r, f, g, 8, 2), 80, PERCENT),
    "S-COS": (lambda r, f, g: 200 * shares(r, f, g, 12, 4) - 100, 50, (-100, 100)),
    "different texts of 4": (lambda r, f, g: 1.0 + r.binomial(3, shares(r, f, g, 2, 1)), 3, (0, 4)),
    "entropy": (lambda r, f, g: r.gamma(20, 0.15, size=(f, g)), 3, (0, math.inf)),
}


def coverage(name, groups, files):
    draw, truth, (least, most) = SETTINGS[name]
    covered = 0
    for values in draw(np.random.default_rng(groups), files, groups):
        low, high = mean_figure(values, least, most)[2:4]
        assert least <= low <= values.mean() <= high <= most
        covered += low <= truth <= high
    return 100 * covered / files


@pytest.mark.parametrize("groups", [FEWEST, 30, 200])
def test_intervals_cover_the_truth_in_95_percent_of_cases(groups):
    """500 files per setting: the mean over settings is sharp, a single setting has a standard error of 1 percent."""
    covered = {name: coverage(name, groups, 500) for name in SETTINGS}
    assert 93 < np.mean(list(covered.values())) < 97, covered
    assert all(90 < share <= 99.5 for share in covered.values()), covered


# ---- the interval by hand


def wilson(right, n):
    low, high = reference.binomtest(right, n).proportion_ci(method="wilson")
    return 100 * low, 100 * high


def test_yes_or_no_values_have_wilsons_interval():
    for right, n in ((0, 10), (3, 10), (10, 10), (1, 40), (77, 300)):
        figure = mean_figure([100.0] * right + [0.0] * (n - right), *PERCENT)
        assert figure[2:4] == pytest.approx(wilson(right, n), abs=1e-6), (right, n)
        assert figure.value == pytest.approx(100 * right / n) and figure.n == n


def test_values_far_from_both_ends_have_students_interval():
    values = np.random.default_rng(0).normal(50, 2, size=40)
    figure = mean_figure(values, *PERCENT)
    low, high = reference.t.interval(0.95, 39, values.mean(), values.std(ddof=1) / 40**0.5)
    assert figure[2:4] == pytest.approx((low, high), abs=0.02)
    assert figure.se == pytest.approx(values.std(ddof=1) / 40**0.5)
    assert mean_figure(values)[2:4] == pytest.approx((low, high), abs=0.02)  # on a logarithmic scale


NAN = math.nan
SPECIAL = [  # values, their range, and (value, low, high, n)
    ([0.0] * 12, (), (0, 0, 0, 12)),
    ([2.5] * 12, (), (2.5, 2.5, 2.5, 12)),
    ([50.0] * 12, PERCENT, (50, 50, 50, 12)),
    (range(FEWEST - 1), (), (4, NAN, NAN, FEWEST - 1)),  # too few for an interval
    ([2.5], (), (2.5, NAN, NAN, 1)),
    ([NAN], (), (NAN, NAN, NAN, 0)),
]


def test_few_equal_and_infinite_values():
    for values, ends, expected in SPECIAL:
        figure = mean_figure(values, *ends)
        assert (figure.value, figure.low, figure.high, figure.n) == pytest.approx(expected, nan_ok=True), values
    assert mean_figure([4.0] * 12, 0, 4).high == 4 and mean_figure([4.0] * 12, 0, 4).low < 3.2
    assert mean_figure([*range(1, 12), NAN, math.inf, -math.inf]) == mean_figure(range(1, 12))
    assert "one number per unit, got shape (2, 2)" in refusal(mean_figure, np.zeros((2, 2)))


# ---- closed forms


def test_pass_at_n_is_the_mean_over_all_subsets():
    for answers in (1, 4, 6):
        right = np.array(list(itertools.product([False, True], repeat=answers)))
        for n in range(1, answers + 1):
            subsets = list(itertools.combinations(range(answers), n))
            brute = np.mean([right[:, s].any(axis=1) for s in subsets], axis=0)
            assert pass_at(right, n) == pytest.approx(brute, abs=1e-12), (answers, n)


def test_many_answers_and_bad_shapes():
    right = np.zeros((2, 4000), dtype=bool)
    right[1, 0] = True
    assert pass_at(right, 1000) == pytest.approx([0, 0.25]) == best_of(right, 1000)
    assert math.isnan(best_of([[1, math.nan, 0]], 2)[0])
    assert "got shape (1, 3) and number 4" in refusal(best_of, np.zeros((1, 3)), 4)
    for shape, n, named in (((3, 4), 5, "5"), ((3, 4), 0, "0"), ((4,), 1, "(4,)")):
        assert named in refusal(pass_at, np.zeros(shape, dtype=bool), n)


def test_best_of_is_the_mean_of_the_maxima_of_all_subsets():
    for m in (1, 3, 6):
        values = np.random.default_rng(m).normal(size=(20, m)).round(1)  # with equal values
        for k in range(1, m + 1):
            brute = np.mean([values[:, s].max(axis=1) for s in itertools.combinations(range(m), k)], axis=0)
            assert best_of(values, k) == pytest.approx(brute, abs=1e-12), (m, k)


def test_the_majority():
    assert majority(["9", "18", "18", "9", "18"]) == "18"
    assert majority(["b", "a", "a", "b"]) == "b"  # of equals the first
    assert majority([None, None, "x"]) == "x"
    assert majority([None]) is None and majority([]) is None


def test_average_cosine_is_the_mean_over_pairs():
    rows = np.random.default_rng(0).normal(size=(7, 5)) + 0.5
    pairs = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in itertools.permutations(rows, 2)]
    assert average_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert average_cosine([[2.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-1)
    assert average_cosine([[1.0, 0.0], [0.0, 0.0]]) == 0  # nothing has no direction
    assert average_cosine([[1.0, 2.0]]) == average_cosine(np.zeros((0, 4))) == 0
    for vectors in ([[1.0, np.inf]], [1.0, 2.0]):
        assert "finite numbers of shape" in refusal(average_cosine, vectors)
