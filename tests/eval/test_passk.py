"""pass@n against all subsets; intervals against their coverage."""

import itertools

import numpy as np
import pytest
from scipy.stats import norm

from d5p4.errors import D5P4Error
from d5p4.eval.passk import interval, pass_at, relative_cut


@pytest.mark.parametrize("answers", [1, 4, 7])
def test_pass_at_n_is_the_mean_over_all_subsets(answers):
    right = np.array(list(itertools.product([False, True], repeat=answers)))
    for n in range(1, answers + 1):
        subsets = list(itertools.combinations(range(answers), n))
        brute = np.mean([right[:, s].any(axis=1) for s in subsets], axis=0)
        assert pass_at(right, n) == pytest.approx(brute, abs=1e-12)


def test_pass_at_stays_exact_for_many_answers():
    right = np.zeros((2, 4000), dtype=bool)
    right[1, 0] = True
    assert pass_at(right, 1000) == pytest.approx([0, 0.25])


@pytest.mark.parametrize(("shape", "n", "named"), [((3, 4), 5, "5"), ((3, 4), 0, "0"), ((4,), 1, r"\(4,\)")])
def test_pass_at_refuses_by_name(shape, n, named):
    with pytest.raises(D5P4Error, match=named):
        pass_at(np.zeros(shape, dtype=bool), n)


def test_interval_is_normal_over_problems():
    values = np.random.default_rng(0).random(50)
    low, high = norm.interval(0.95, values.mean(), values.std(ddof=1) / 50**0.5)
    assert interval(values) == pytest.approx((values.mean(), low, high))


def test_seeds_are_averaged_first_and_are_not_more_problems():
    values = np.random.default_rng(0).random(50)
    assert interval(np.stack([values, values, values])) == pytest.approx(interval(values))
    assert interval(np.stack([values, 1 - values])) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize("values", [[0.5], np.zeros((3, 1)), np.zeros((2, 2, 2)), 1.0])
def test_interval_needs_two_problems(values):
    with pytest.raises(D5P4Error, match="two problems"):
        interval(values)


def test_relative_cut_by_hand():
    cut = relative_cut([1, 0, 0, 0.5], [1, 1, 0, 0.5])
    assert cut.mean == pytest.approx(1 - 1.5 / 2.5)
    assert cut.low <= cut.mean <= cut.high
    assert cut == relative_cut([1, 0, 0, 0.5], [1, 1, 0, 0.5])
    assert cut.mean == relative_cut([1, 0, 0, 0.5], [1, 1, 0, 0.5], seed=1).mean


def test_relative_cut_is_paired():
    """Against itself nothing is cut, and there is no doubt about it."""
    solved = np.random.default_rng(0).random(40)
    assert relative_cut(solved, solved, draws=50) == pytest.approx((0, 0, 0))


def test_relative_cut_interval_covers_the_truth():
    """Of what the base leaves unsolved (half), the other solves 40 %, and loses 10 % of what the base solves."""
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(100):
        base = rng.random(300) < 0.5
        other = np.where(base, rng.random(300) < 0.9, rng.random(300) < 0.4)
        cut = relative_cut(base, other, seed=trial, draws=200)
        covered += cut.low <= 1 - (0.5 * 0.1 + 0.5 * 0.6) / 0.5 <= cut.high
    assert 88 <= covered <= 99


def test_relative_cut_refuses_by_name():
    with pytest.raises(D5P4Error, match="solves every problem"):
        relative_cut([1, 1], [0, 1])
    with pytest.raises(D5P4Error, match=r"\(1,\)"):
        relative_cut([0], [1])
    with pytest.raises(D5P4Error, match=r"\(3,\)"):
        relative_cut([0, 1], [1, 0, 1])
