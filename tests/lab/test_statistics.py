"""Bootstraps against all resamples, intervals against their coverage, correlations against scipy."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats as reference

from d5p4_lab import statistics as stats
from d5p4_lab.statistics import (
    correlation_difference,
    figure,
    from_resamples,
    interval,
    paired_difference,
    pearson,
    ratio_figure,
    resampled_means,
    shifted,
    spearman,
    stratified_correlation,
)
from tests.refusals import refusal


def test_a_figure_by_hand():
    estimate = figure([1, 2, 3, 6])
    assert (estimate.value, estimate.n) == (3, 4)
    assert estimate.se == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3) / 2)
    wider = stats.widening(4)
    assert 3 + wider * (1 - 3) <= estimate.low < 3 < estimate.high <= 3 + wider * (6 - 3)
    assert shifted(-estimate, 3)[:4] == (0, estimate.se, 3 - estimate.high, 3 - estimate.low)
    values = np.random.default_rng(0).random(9)
    assert figure(values) == figure(values) != figure(values, seed=1)


def test_few_units_widen_the_interval_as_students_t_does():
    """Eight normal values: the interval covers the mean in about 95 % of cases, where the plain one has 89 %."""
    assert [stats.widening(n) for n in (2, 8, 30, 31)] == pytest.approx(
        [reference.t.ppf(0.975, n - 1) / 1.959964 * math.sqrt(n / (n - 1)) for n in (2, 8, 30)] + [1], rel=1e-3
    )
    rng = np.random.default_rng(1)
    estimate = [figure(rng.normal(size=8), seed=i, draws=400) for i in range(500)]
    assert np.mean([f.low < 0 < f.high for f in estimate]) == pytest.approx(0.95, abs=0.04)


def test_what_is_not_known_is_nan_and_what_is_no_number_is_left_out():
    assert figure([1, math.nan, 3, math.inf, -math.inf, 5]) == figure([1, 3, 5])
    one, none = figure([2.5]), figure([math.nan])
    assert one.value == 2.5 and one.n == 1 and all(map(math.isnan, one[1:4]))
    assert none.n == 0 and all(map(math.isnan, none[:4]))
    assert ratio_figure([1, 1], [0, 2]).value == 1 and math.isnan(ratio_figure([0, 0], [0, 0]).value)
    for ours in (pearson, spearman):
        assert math.isnan(ours([1, 2, 3], [0.1, 0.1, 0.1]).value) and math.isnan(ours([], []).value)
    assert math.isnan(stratified_correlation([2, 2, 2], [[1, 2, 3]], [9, 9, 9]).figure.value)
    estimate = from_resamples([1.0, math.nan, 1.0, 3.0, math.inf])
    assert (estimate.value, estimate.se) == (1, pytest.approx(math.sqrt(2))) and 1 <= estimate.low <= estimate.high <= 3
    assert np.array_equal(resampled_means([[2.0, 3.0]], draws=5), np.tile([2.0, 3.0], (6, 1)))


def test_values_of_another_shape_are_refused():
    assert "one number per unit" in refusal(figure, np.zeros((2, 2)))
    assert "at least 2 problems" in refusal(interval, [0.5])
    assert r"shapes (2,) and (3,)" in refusal(paired_difference, [1, 2], [1, 2, 3])


def test_a_ratio_of_sums_is_not_a_mean_of_ratios():
    estimate = ratio_figure([2, 9], [1, 3])
    assert estimate.value == 11 / 4
    # Without a unit: 9 / 3 and 2 / 1. Resamples: 4 / 2, 11 / 4, 18 / 6.
    assert estimate.se == pytest.approx(math.sqrt((1 / 2) * 2 * 0.5**2))
    wider = stats.widening(2)
    assert (estimate.low, estimate.high) == pytest.approx((2.75 - 0.75 * wider, 2.75 + 0.25 * wider))
    values = np.random.default_rng(2).random(30)
    assert ratio_figure(values, np.ones(30)) == pytest.approx(figure(values))
    assert paired_difference(values + 1, values)[:4] == pytest.approx((1, 0, 1, 1), abs=1e-12)
    assert paired_difference([1, math.inf, 2], [0, math.inf, math.nan]).n == 1


def test_resampled_means_are_those_of_all_resamples():
    """Three units have 27 resamples; the columns of one are of the same units."""
    values = np.array([[0.0, 10.0], [1.0, 11.0], [5.0, 15.0]])
    estimate = resampled_means(values, draws=20_000)
    assert estimate.shape == (20_001, 2) and estimate[0] == pytest.approx(values.mean(axis=0))
    mean = from_resamples(estimate[:, 0], n=3)
    assert mean[2:4] == pytest.approx(figure(values[:, 0], draws=20_000)[2:4])
    estimate[1:] = estimate[0] + (estimate[1:] - estimate[0]) / stats.widening(3)
    every = [np.mean(drawn) for drawn in itertools.product(values[:, 0], repeat=3)]
    for mean in set(every):
        share = np.mean(np.isclose(every, mean))
        assert np.isclose(estimate[1:, 0], mean).mean() == pytest.approx(share, abs=5 * math.sqrt(share / 20_000))
    assert estimate[:, 1] - estimate[:, 0] == pytest.approx(np.full(20_001, 10))
    assert np.array_equal(resampled_means(values), resampled_means(values))
    assert not np.array_equal(estimate, resampled_means(values, seed=1, draws=20_000))


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_scipys(ties):
    rng = np.random.default_rng(3)
    a = rng.normal(size=40)
    b = a + rng.normal(size=40)
    if ties:
        a, b = a.round(), b.round()
    assert pearson(a, b).value == pytest.approx(reference.pearsonr(a, b).statistic)
    assert spearman(a, b).value == pytest.approx(reference.spearmanr(a, b).statistic)
    # Each resample of its own: ranks are taken anew.
    index = [np.flatnonzero(row).repeat(row[row > 0].astype(int)) for row in next(stats._resample(40, 0, 200))]
    for ours, theirs in ((pearson, reference.pearsonr), (spearman, reference.spearmanr)):
        brute = [theirs(a[i], b[i]).statistic for i in index]
        estimate = ours(a, b, draws=200)
        low, high = np.quantile(np.arctanh(brute), [0.025, 0.975])
        ends = np.tanh(np.arctanh(estimate.value) + np.array([-1, 1]) * (high - low) / 2)
        assert (estimate.low, estimate.high) == pytest.approx(ends)
        assert estimate.se == pytest.approx(np.std(brute, ddof=1))


def test_the_stratified_correlation_by_hand():
    """Bins of equal width of the logarithm; a bin with two values averages them by their numbers of units."""
    parameter, heights = [1, 2, 2.2, 8, 16], np.array([[5.0, 4, 2, 2.5, 1]])
    centres, means = [0.125, 0.375, 0.875], [5.0, (4 * 30 + 2 * 10) / 40, (2.5 + 1) / 2]  # bins of a quarter of log 16
    estimate = stratified_correlation(parameter, heights, [20, 30, 10, 7, 7], bins=4)
    assert estimate.figure.value == pytest.approx(reference.pearsonr(centres, means).statistic)
    assert estimate.figure.n == 10 and math.isnan(estimate.figure.low)  # without resamples there is no interval


def curve(correlation: float, centres: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """A random curve of length 1 over the centres that has exactly this correlation."""
    line = centres - centres.mean()
    line /= np.linalg.norm(line)
    rest = source.normal(size=len(line))
    rest -= rest.mean() + (rest @ line) * line
    return correlation * line + math.sqrt(1 - correlation**2) * rest / np.linalg.norm(rest)


def coverage(correlation: float, units: int, noise: float, repeats: int) -> tuple[float, float]:
    """How often the interval contains the true correlation, and how often the middle 95 % of the resamples would.

    There are 8 values of a parameter with `units` units each. `noise` is the standard deviation of a unit, if the
    curve has length 1. Committed curves of `control` have noise of 0.4 (perplexity) to 1 (cosine).
    """
    source = np.random.default_rng([int(1000 * correlation), units])
    parameter = np.array([0.3, 1, 3, 10, 30, 100, 300, 1000])
    edges = np.linspace(np.log(0.3), np.log(1000), 11)
    centres = (edges[1:] + edges[:-1])[np.clip(np.searchsorted(edges, np.log(parameter), "right") - 1, 0, 9)] / 2
    hits, plain = 0, 0
    for repeat in range(repeats):
        values = curve(correlation, centres, source) + noise * source.normal(size=(units, 8))
        estimate = stratified_correlation(parameter, resampled_means(values, repeat, 400), [units] * 8)
        low, high = np.quantile(estimate.resampled, [0.025, 0.975])
        hits += estimate.figure.low <= correlation <= estimate.figure.high
        plain += bool(low <= correlation <= high)
    return hits / repeats, plain / repeats


def test_intervals_of_correlations_near_one_cover():
    good, plain = coverage(0.97, 24, 0.7, 300)
    assert 0.92 <= good <= 0.98 and plain < 0.5


def test_a_parameter_without_effect_is_rarely_said_to_have_one():
    source, parameter = np.random.default_rng(1), np.geomspace(1, 1000, 7)
    decided = 0
    for repeat in range(300):
        means = resampled_means(source.normal(size=(24, 7)), repeat, 400)
        figure_ = stratified_correlation(parameter, means, [24] * 7).figure
        decided += not figure_.low <= 0 <= figure_.high
    assert decided < 0.12 * 300  # 0.16 * 300 if the curve counted as free of noise


@pytest.mark.full
@pytest.mark.parametrize("units", [24, 240])
@pytest.mark.parametrize("correlation", [0.5, 0.9, 0.97, 0.99])
def test_intervals_of_correlations_cover(correlation, units):
    """The table of docs/decisions.md; `pytest -s` prints it."""
    cells = []
    for noise in (0.4, 1.0):
        good, plain = coverage(correlation, units, noise, 1000)
        cells += [f"{good:.1%} ({plain:.1%})"]
        assert 0.92 <= good <= 0.99
    print(f"| {correlation} | {units} | {' | '.join(cells)} |")


def difference_coverage(first: float, second: float, shared: float, repeats: int) -> float:
    """How often the interval of the difference of two correlations contains the truth; 24 units, noise 0.7.

    `shared` is the correlation between the noise of a unit on both curves.
    """
    source = np.random.default_rng(0)
    parameter = np.geomspace(1, 1000, 8)
    hits = 0
    for repeat in range(repeats):
        common, one, other = source.normal(size=(3, 24, 8))
        estimates = []
        for truth, own in ((first, one), (second, other)):
            values = curve(truth, np.arange(8.0), source) + 0.7 * (shared**0.5 * common + (1 - shared) ** 0.5 * own)
            estimates.append(stratified_correlation(parameter, resampled_means(values, repeat, 400), [24] * 8, bins=8))
        difference = correlation_difference(*estimates)
        hits += difference.low <= first - second <= difference.high
        assert difference.low <= difference.value == estimates[0].figure.value - estimates[1].figure.value
    return hits / repeats


def test_intervals_of_differences_of_correlations_cover():
    assert 0.92 <= difference_coverage(-0.95, -0.8, 0.0, 250) <= 0.98


@pytest.mark.full
@pytest.mark.parametrize("truth", [(-0.95, -0.8), (-0.97, -0.97), (-0.9, 0.5), (0.5, 0.4)])
@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_intervals_of_many_differences_of_correlations_cover(truth, shared):
    """With noise in common, which the interval ignores where this makes it wider, more than 95 % are covered."""
    assert 0.93 <= (share := difference_coverage(*truth, shared, 1000)) <= (1.0 if shared else 0.99)
    print(f"| {truth[0]} and {truth[1]} | {shared} | {share:.1%} |")


def test_interval_is_normal_over_problems():
    values = np.random.default_rng(0).random(50)
    low, high = reference.norm.interval(0.95, values.mean(), values.std(ddof=1) / 50**0.5)
    assert interval(values) == pytest.approx((values.mean(), low, high))
    assert interval(np.stack([values, values, values])) == pytest.approx(interval(values))  # seeds are no problems
    assert interval(np.stack([values, 1 - values])) == pytest.approx((0.5, 0.5, 0.5))
