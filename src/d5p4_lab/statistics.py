"""Computes the figures of the lab's tables: means, ratios and correlations, each with a standard error and an interval.

A *unit* is one independent draw: a problem, a prompt with its group of answers, or a run. Answers of the same group
share their prompt, so they are not units. The 95 % intervals are percentile bootstraps over units. Values that are not
finite are left out. A resample is stored as *counts*: how often the resample contains
each unit. Correlations have other intervals, because resamples lower a correlation that is near ±1: see `pearson` and
`stratified_correlation`. Letters in shapes: P problems, S seeds, n units, R resamples.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.stats import Figure as Figure

Floats = NDArray[np.float64]

DRAWS = 2000  # the number of resamples of a bootstrap
# The 97.5 % quantiles of Student's t distribution with 1..29 degrees of freedom.
_STUDENT_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
NORMAL_95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_CELLS = 1 << 22  # at most this many counts (resamples times units, 32 MB) are in memory at once


def _unknown(value: float, n: int) -> Figure:
    """Return a figure without standard error and interval."""
    return Figure(value, np.nan, np.nan, np.nan, n)


def shifted(figure: Figure, amount: float) -> Figure:
    """Return a figure plus an exact number."""
    return figure._replace(value=figure.value + amount, low=figure.low + amount, high=figure.high + amount)


def figure(values: ArrayLike, seed: int = 0, draws: int = DRAWS) -> Figure:
    """Return the mean of values [n], one per unit. The standard error is std(ddof=1) / sqrt(n).

    With up to 30 units, the interval is widened as Student's t widens the normal interval.
    """
    [kept] = _finite(values)
    n = len(kept)
    if n < 2:
        return _unknown(float(kept[0]) if n else np.nan, n)
    mean = float(kept.mean())
    samples = mean + widening(n) * (_bootstrap(lambda counts: counts @ kept / n, n, seed, draws) - mean)
    return Figure(mean, float(kept.std(ddof=1)) / n**0.5, *_middle(samples), n)


def paired_difference(a: ArrayLike, b: ArrayLike) -> Figure:
    """Return the mean of a - b [n]. Entry i of a and of b is the same unit, so the unit's own difficulty cancels."""
    left, right = _same_length(a, b)
    with np.errstate(invalid="ignore"):  # inf - inf gives NaN with a warning; `figure` leaves NaN out
        return figure(left - right)


def pooled_figure(parts: ArrayLike, statistic: Callable[[Floats], Floats]) -> Figure:
    """Return a statistic of sums over units, such as a corpus BLEU. `parts` [n, d] are the summands of each unit.

    `statistic` maps sums [R, d] to values [R]. The standard error is a jackknife: sqrt((n - 1) / n Σ (θ_i - m)²), where
    θ_i is the statistic without unit i and m is the mean of all θ_i. For a mean this equals std(ddof=1) / sqrt(n).
    """
    kept = np.stack(_finite(*np.asarray(parts).T), axis=1)
    if not len(kept):
        return _unknown(np.nan, 0)
    n, total = len(kept), kept.sum(axis=0, keepdims=True)
    with np.errstate(all="ignore"):
        value = float(statistic(total)[0])
        if n < 2 or not np.isfinite(value):
            return _unknown(value, n)
        se = float(((n - 1) * statistic(total - kept).var()) ** 0.5)
        samples = value + widening(n) * (_bootstrap(lambda counts: statistic(counts @ kept), n) - value)
    return Figure(value, se, *_middle(samples), n)


def ratio_figure(
    above: ArrayLike, below: ArrayLike, transform: Callable[[Floats], Floats] = lambda ratio: ratio
) -> Figure:
    """Return transform(sum(above) / sum(below)). For example, np.exp of nats over tokens is a perplexity.

    `above` and `below` are [n]. `transform` must be increasing, because the ends of the interval are transformed too.
    """
    parts = np.stack(_same_length(above, below), axis=1)
    plain = pooled_figure(parts, lambda sums: sums[:, 0] / sums[:, 1])
    shaped = pooled_figure(parts, lambda sums: transform(sums[:, 0] / sums[:, 1]))
    low, high = transform(np.array([plain.low, plain.high])).tolist()
    return shaped._replace(low=low, high=high)


def front(x: Floats, y: Floats, at: Floats) -> Floats:
    """Return the least mean y [R] that a mixture of n settings has if its mean x is at least `at` [R], or NaN.

    x and y are [R, n]: every resample has a front of its own. A mixture answers a share of the questions by one setting
    and the rest by another. More than two are not needed: the front is the lower convex hull, flat on the left.
    """
    best = np.where(x >= at[:, None], y, np.inf).min(1)
    for i, j in itertools.permutations(range(x.shape[1]), 2):
        below = (x[:, i] < at) & (at <= x[:, j])
        share = (at - x[:, i]) / np.where(below, x[:, j] - x[:, i], 1.0)
        best = np.where(below, np.minimum(best, y[:, i] + share * (y[:, j] - y[:, i])), best)
    return np.where(np.isfinite(best), best, np.nan)


def resampled_means(values: ArrayLike, seed: int = 0, draws: int = DRAWS) -> Floats:
    """Return [1 + draws, d]: the mean of values [n, d] over all units, followed by the mean over each resample.

    For a statistic of several means, compute it for each row, and pass the 1 + draws results to `from_resamples`.
    """
    given = np.asarray(values, dtype=np.float64)
    n, mean = len(given), given.mean(axis=0, keepdims=True)
    rows = [mean, *(mean + widening(n) * (counts @ given / n - mean) for counts in _resample(n, seed, draws))]
    return np.concatenate(rows)


def widening(n: int) -> float:
    """Return the factor by which the bootstrap interval of a mean of n units is widened; 1 for more than 30 units.

    The factor is that of Student's t distribution with n - 1 degrees of freedom. Without it, the interval of 8 normal
    values would cover the true mean in 89 % of cases instead of 95 %.
    """
    return _STUDENT_95[n - 2] / NORMAL_95 * (n / (n - 1)) ** 0.5 if 2 <= n <= 30 else 1.0


def tail(factor: float, n: int) -> float:
    """Return the p-value of a mean of n units whose 95 % interval could be `factor` times as wide before it reaches 0.

    This is twice the tail of Student's t distribution with n - 1 degrees of freedom beyond `factor` times its 97.5 %
    quantile; for more than 30 units, or if n is unknown (below 2), the tail of the normal distribution.
    """
    if not 2 <= n <= 30 or math.isinf(factor):
        return math.erfc(NORMAL_95 * factor / 2**0.5)
    if factor <= 0:
        return 1.0
    from scipy.stats import t

    return min(1.0, 2 * float(t.sf(factor * _STUDENT_95[n - 2], n - 1)))


def from_resamples(samples: ArrayLike, n: int = 0) -> Figure:
    """Return the figure of a statistic, given samples [1 + draws]: its value, then its value in each resample."""
    given = np.asarray(samples, dtype=np.float64)
    finite = given[1:][np.isfinite(given[1:])]
    return Figure(float(given[0]), float(finite.std(ddof=1)) if len(finite) > 1 else np.nan, *_middle(finite), n)


def pearson(a: ArrayLike, b: ArrayLike, draws: int = DRAWS) -> Figure:
    """Return the linear correlation of a [n] and b [n], or NaN if a or b is constant.

    The standard error is a bootstrap. The interval is tanh(z ± 1.96 s), where z = artanh of the correlation (Fisher's
    transform, whose distribution is nearly normal even near ±1) and s is the spread of z over resamples.
    """
    left, right = _finite(*_same_length(a, b))
    return _correlation(lambda counts: _weighted_pearson(left, right, counts), len(left), draws)


def spearman(a: ArrayLike, b: ArrayLike, draws: int = DRAWS) -> Figure:
    """Return the correlation of the ranks of a [n] and b [n]. Equal values share a rank. Resamples get new ranks.

    Standard error and interval are made as for `pearson`.
    """
    left, right = _finite(*_same_length(a, b))
    ranks = _ranker(left), _ranker(right)
    return _correlation(lambda counts: _weighted_pearson(ranks[0](counts), ranks[1](counts), counts), len(left), draws)


class Correlation(NamedTuple):
    """The correlation of a curve, its value in each resample [R], and the middle of its interval.

    If the true correlation were `middle`, half of the correlations with noise would be below the observed one.
    """

    figure: Figure
    resampled: Floats
    middle: float


def stratified_correlation(parameter: ArrayLike, means: ArrayLike, units: Sequence[int], bins: int = 10) -> Correlation:
    """Return how well a parameter steers a metric: Pearson's correlation between the centre and the mean of each bin.

    parameter  [m] the values of the parameter, which are positive
    means      [1 + R, m] the metric's mean at each value of the parameter, over all units and over each resample, as
               `resampled_means` gives them
    units      [m] the number of units at each value; the figure's n is their median

    The range of the logarithm of the parameter is divided into bins of equal width, and the metric is
    averaged over the units of each bin that is not empty. The paper does not say how many bins it uses.

    Noise in the means lowers a correlation that is near ±1, and resamples lower it once more, so an interval of
    resamples would miss the truth. The interval is therefore made by inverting a test. The means of the bins are a line
    plus a rest: b = |b| (r a + √(1 - r²) u), with unit vectors a (the centres) and u (the rest). A correlation ρ
    belongs to the interval if the observed r is not among the smallest or largest 2.5 % of the correlations
    of s (ρ a + √(1 - ρ²) u) + noise, where the noise of a resample is its means minus the means of all units, and s² is
    |b|² minus the mean of |noise|², because noise is part of b, too. Without this, the interval of a metric that does
    not depend on the parameter would exclude 0 in 16 % of cases instead of 7 %.
    """
    scale, heights = np.log(parameter), np.asarray(means, dtype=np.float64)
    edges = np.linspace(scale.min(), scale.max(), bins + 1)
    inside = np.clip(np.searchsorted(edges, scale, side="right") - 1, 0, bins - 1)[:, None] == np.arange(bins)
    weights = inside * np.array(units, dtype=np.float64)[:, None]
    used = inside.any(axis=0)
    centres = ((edges[1:] + edges[:-1]) / 2)[used]
    return _curve_correlation(
        centres, heights @ (weights / weights.sum(axis=0).clip(1))[:, used], int(np.median(units))
    )


def correlation_difference(a: Correlation, b: Correlation) -> Figure:
    """Return the correlation a minus the correlation b, with the interval of Zou (2007).

    The interval lies around the difference of the two `middle` values. The distances of its ends are
    √(x² + y² - 2 c x y), where x and y are the distances of the ends of a and of b from their middles, and c is the
    correlation of a and b over common resamples. So the ends keep the skewness of both intervals. A c above 0 counts
    as 0: near ±1, resamples overrate what two correlations have in common, and the interval would be too narrow.
    """
    first, second = a.figure, b.figure
    both = np.isfinite(a.resampled) & np.isfinite(b.resampled)
    common = float(_weighted_pearson(a.resampled[both], b.resampled[both], np.ones((1, int(both.sum()))))[0])
    common = 0.0 if np.isnan(common) else min(0.0, common)

    def distance(x: float, y: float) -> float:
        return float(np.sqrt(max(0.0, x * x + y * y - 2 * common * x * y)))

    value, middle = first.value - second.value, a.middle - b.middle
    low = middle - distance(a.middle - first.low, second.high - b.middle)
    high = middle + distance(first.high - a.middle, b.middle - second.low)
    return Figure(value, distance(first.se, second.se), min(low, value), max(high, value), min(first.n, second.n))


def _curve_correlation(centres: Floats, heights: Floats, n: int) -> Correlation:
    """Return the correlation of centres [m] with heights [1 + R, m]; see `stratified_correlation`."""
    with np.errstate(all="ignore"):
        values = _weighted_pearson(centres, heights, np.ones_like(heights))
    r, resampled = float(values[0]), values[1:]
    if not np.isfinite(r):
        return Correlation(_unknown(np.nan, n), resampled, np.nan)
    finite = resampled[np.isfinite(resampled)]
    se = float(finite.std(ddof=1)) if len(finite) > 1 else np.nan
    if n < 2 or len(centres) < 3 or not len(finite):  # no noise is known, or every curve is a straight line
        return Correlation(Figure(r, se, np.nan, np.nan, n), resampled, r)
    line = centres - centres.mean()
    line /= np.linalg.norm(line)
    height = heights[0] - heights[0].mean()
    rest = height - (height @ line) * line
    rest /= np.linalg.norm(rest) or 1.0
    noise = heights[1:] - heights[0]
    noise = noise - noise.mean(axis=1, keepdims=True)
    size = np.sqrt(max(0.0, height @ height - (noise**2).sum(axis=1).mean()))

    def below(angle: float) -> float:
        """The share of correlations below r if the true correlation is cos(angle). It grows with the angle."""
        seen = size * (np.cos(angle) * line + np.sin(angle) * rest) + noise
        return float((seen @ line < r * np.linalg.norm(seen, axis=1)).mean())

    def crossing(share: float) -> float:
        start, stop = 0.0, np.pi
        for _ in range(30):
            angle = (start + stop) / 2
            start, stop = (angle, stop) if below(angle) < share else (start, angle)
        return float(np.cos((start + stop) / 2))

    low, middle, high = crossing(0.975), crossing(0.5), crossing(0.025)
    return Correlation(Figure(r, se, min(low, r), max(high, r), n), resampled, middle)


def interval(values: ArrayLike) -> tuple[float, float, float]:
    """Return the mean of values [P] or [S, P] and the ends of its normal 95 % interval over problems.

    Seeds are averaged first.
    """
    figures = np.asarray(values, dtype=np.float64)
    if figures.ndim not in (1, 2) or figures.shape[-1] < 2:
        raise D5P4Error(f"the shape must be [problems] or [seeds, problems], at least 2 problems, not {figures.shape}")
    per_problem = figures.reshape(-1, figures.shape[-1]).mean(axis=0)
    mean = float(per_problem.mean())
    half = NORMAL_95 * float(per_problem.std(ddof=1)) / len(per_problem) ** 0.5
    return mean, mean - half, mean + half


def _resample(n: int, seed: int, draws: int) -> Iterator[Floats]:
    """Yield the counts of all resamples in blocks [R, n]. The same n, seed and draws give the same counts."""
    source = np.random.default_rng(seed)
    most = max(1, _CELLS // n)
    for start in range(0, draws, most):
        rows = min(most, draws - start)
        drawn = source.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


def _bootstrap(statistic: Callable[[Floats], Floats], n: int, seed: int = 0, draws: int = DRAWS) -> Floats:
    """Return [draws]: the statistic of each resample. `statistic` maps counts [R, n] to values [R]."""
    return np.concatenate([statistic(counts) for counts in _resample(n, seed, draws)])


def _middle(samples: Floats) -> tuple[float, float]:
    """Return the two ends of the middle 95 % of the finite samples."""
    finite = samples[np.isfinite(samples)]
    return (float(np.quantile(finite, 0.025)), float(np.quantile(finite, 0.975))) if len(finite) else (np.nan, np.nan)


def _correlation(statistic: Callable[[Floats], Floats], n: int, draws: int) -> Figure:
    """Return the figure of a correlation that maps counts [R, n] to [R]; see `pearson`."""
    if not n:
        return _unknown(np.nan, 0)
    with np.errstate(all="ignore"):
        value = float(statistic(np.ones((1, n)))[0])
        samples = _bootstrap(statistic, n, 0, draws) if np.isfinite(value) else np.array([])
        samples = samples[np.isfinite(samples)]
        if len(samples) < 2:
            return _unknown(value, n)
        # Half of the middle 95 % is 1.96 spreads. Unlike a standard deviation it is finite if a few resamples are ±1.
        low, high = np.quantile(np.arctanh(samples), [0.025, 0.975])
        half = widening(n) * (high - low) / 2
        ends = np.tanh(np.arctanh(value) + np.array([-half, half]))
    low, high = np.where(np.isnan(ends), [-1.0, 1.0] if np.isnan(half) else value, ends).tolist()
    return Figure(value, float(samples.std(ddof=1)), low, high, n)


def _weighted_pearson(left: Floats, right: Floats, counts: Floats) -> Floats:
    """Return the correlations [R] of left and right (both [n] or [R, n]), weighted by counts [R, n].

    A correlation is NaN if one of the two sides is constant.
    """
    total = counts.sum(axis=1, keepdims=True)
    a = left - (counts * left).sum(axis=1, keepdims=True) / total
    b = right - (counts * right).sum(axis=1, keepdims=True) / total
    spread = np.sqrt((counts * a * a).sum(axis=1) * (counts * b * b).sum(axis=1))
    # Rounding may give constant values a tiny spread, so values count as constant if their relative spread is tiny.
    size = np.sqrt((counts * left**2).sum(axis=1) * (counts * right**2).sum(axis=1))
    return np.where(spread > 1e-14 * size, (counts * a * b).sum(axis=1) / spread, np.nan).clip(-1, 1)


def _ranker(values: Floats) -> Callable[[Floats], Floats]:
    """Return a function that maps counts [R, n] to ranks [R, n]: the mean rank of each value in each resample."""
    levels, level = np.unique(values, return_inverse=True)
    order = np.argsort(level, kind="stable")
    first = np.searchsorted(level[order], np.arange(len(levels)))

    def ranks(counts: Floats) -> Floats:
        size = np.add.reduceat(counts[:, order], first, axis=1)  # [R, levels]
        return (np.cumsum(size, axis=1) - (size - 1) / 2)[:, level]

    return ranks


def _finite(*columns: ArrayLike) -> list[Floats]:
    """Return the columns without the units that have a value that is not finite."""
    given = [np.asarray(column, dtype=np.float64) for column in columns]
    if any(column.ndim != 1 for column in given):
        raise D5P4Error(f"a figure needs one number per unit, got shape {given[0].shape}")
    good = np.logical_and.reduce([np.isfinite(column) for column in given])
    return [column[good] for column in given]


def _same_length(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.ndim != 1 or left.shape != right.shape:
        raise D5P4Error(f"two numbers per unit are needed, got shapes {left.shape} and {right.shape}")
    return left, right
