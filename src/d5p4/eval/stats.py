"""Computes pass@k, Metric@k, and figures with standard errors and 95 % intervals that stay in the range of the figure.

A *unit* is a group of answers to one prompt. Units are independent of each other; the answers of one unit are not,
since they share a prompt. The standard error se over n units is std / √n. The interval of a figure that has a largest
value (pass@k, F1, BLEU, distinct-n, cosines, counts) is Wilson's for n/d yes-or-no values at the quantile q; that of
the others (entropy) is value · exp(± t se / value).

The design effect d is the variance of the figure divided by the variance that yes-or-no values with the same mean would
have. We have d = 1 for pass@k of k answers, d < 1 for pass@1 of several answers, and d near 0 for values far from both
ends of the range. The quantile q, with q² = d z² + (1 - d) t², lies between the quantiles of the normal law (z) and of
Student's law (t). If e units lie at one end of the range and r units do not, the variance is unreliable, and we add
(1 - d) e / n / (r + 1)² to d. The tests show by simulation that these intervals cover the truth in about 95 % of cases
if there are at least `FEWEST` units; the worst case, a pass@k near 100 % with rare failures, has about 88 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import D5P4Error

Floats = NDArray[np.float64]
Answer = TypeVar("Answer", bound=Hashable)

FEWEST = 10  # a figure over fewer than 10 units has no interval
_Z = 1.959963984540054  # the 97.5 % quantile of the normal law


class Figure(NamedTuple):
    """A value, its standard error and 95 % interval, and the number of units. NaN means unknown."""

    value: float
    se: float
    low: float
    high: float
    n: int

    def __neg__(self) -> Figure:
        return self._replace(value=-self.value, low=-self.high, high=-self.low)


def mean_figure(values: ArrayLike, least: float = 0.0, most: float = math.inf) -> Figure:
    """Return the mean of values [n] (one per unit) with its standard error and interval.

    `least` and `most` are the smallest and largest values that are possible. NaN and infinities are left out.
    """
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1:
        raise D5P4Error(f"a figure needs one number per unit, got shape {given.shape}")
    kept = given[np.isfinite(given)]
    if (n := len(kept)) < 2:
        return Figure(float(kept[0]) if n else math.nan, math.nan, math.nan, math.nan, n)
    value, se = _clip(float(kept.mean()), least, most), float(kept.std(ddof=1)) / n**0.5
    at_end = int(max((kept <= least).sum(), (kept >= most).sum()))
    return Figure(value, se, *_interval(value, se, n, least, most, at_end), n)


def _interval(value: float, se: float, n: int, least: float, most: float, at_end: int) -> tuple[float, float]:
    """Return the 95 % interval of a figure. `at_end` is the number of units at one end of the figure's range."""
    if n < FEWEST or not math.isfinite(se):
        return math.nan, math.nan
    t = _student(n - 1)
    if math.isinf(most):
        if value <= least:
            return (value, value) if se == 0 else (math.nan, math.nan)
        factor = math.exp(t * se / (value - least))
        return least + (value - least) / factor, least + (value - least) * factor
    share = (value - least) / (most - least)
    variance = share * (1 - share) / (n - 1)  # the variance of the mean of yes-or-no values
    design = (se / (most - least)) ** 2 / variance if variance > 0 else 1.0
    design += max(0.0, 1 - design) * at_end / n / (n - at_end + 1) ** 2
    q2 = _Z**2 * min(design, 1.0) + t**2 * max(0.0, 1 - design)
    weight = q2 * design / n
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight**2 / 4) / (1 + weight)
    low, high = (_clip(least + (most - least) * x, least, most) for x in (centre - half, centre + half))
    return min(low, value), max(high, value)  # because of rounding, the value could lie just outside of [low, high]


def _clip(value: float, least: float, most: float) -> float:
    """Move a value that rounding has put outside its range back into the range. NaN stays NaN."""
    return value if math.isnan(value) else min(max(value, least), most)


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's law, by the Cornish-Fisher series: three exact digits if degrees >= 9."""
    z = _Z
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def pass_at(right: ArrayLike, n: int) -> Floats:
    """Return the chance that n of m answers, drawn without replacement, include a right answer: bool [P, m] to [P].

    The chance is 1 - C(m - c, n) / C(m, n) for c right answers. If answers are independent, this estimates pass@n
    without bias.
    """
    judged = np.asarray(right, dtype=bool)
    answers = _count_answers(judged, n, "pass@n")
    wrong = answers - judged.sum(axis=1, keepdims=True)
    drawn = np.arange(n)
    return 1 - np.prod((wrong - drawn).clip(0) / (answers - drawn), axis=1)


def best_of(values: ArrayLike, k: int) -> Floats:
    """Return Metric@k, the expected largest of k values drawn from m values without replacement: [P, m] to [P].

    Metric@k is Σ_i x_i C(i, k - 1) / C(m, k) for values x_0 ≤ … ≤ x_{m-1}, because x_i is the largest of the k values
    when the other k - 1 values come before x_i. A row with NaN gives NaN.
    """
    given = np.asarray(values, dtype=np.float64)
    m = _count_answers(given, k, "Metric@k")
    place = np.arange(m - 1, k - 1, -1)  # the index i, from the largest: the weight of x_i gives the weight of x_{i-1}
    shares = k / m * np.cumprod(np.concatenate([[1.0], (place - k + 1) / place]))
    return np.sort(given, axis=1)[:, k - 1 :] @ shares[::-1]


def majority(answers: Sequence[Answer | None]) -> Answer | None:
    """Return the most frequent answer. On a tie, return the answer that occurs first. None is not counted."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__, default=None)


def average_cosine(vectors: ArrayLike) -> float:
    """Return S-COS, the mean cosine over all pairs of rows of [n, D]: (ΣS - n) / (n (n - 1)) with the cosines S [n, n].

    S-COS is 0 for one row or none. A row of zeros has no direction, so we define its cosine with every row as 0.
    """
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise D5P4Error(f"vectors must be finite numbers of shape [texts, numbers], got shape {rows.shape}")
    n = len(rows)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    # ΣS is the squared length of the sum of the unit rows. The diagonal of S sums to n, or less if a row is zero.
    return float((np.square(unit.sum(0)).sum() - np.square(unit).sum()) / (n * (n - 1))) if n > 1 else 0.0


def _count_answers(values: NDArray[Any], k: int, what: str) -> int:
    """Check that k of m values can be drawn from values [P, m], and return m."""
    if values.ndim != 2 or not 1 <= k <= values.shape[1]:
        needed = "values of shape [problems, answers] and a number from 1 to answers"
        raise D5P4Error(f"{what} needs {needed}, got shape {values.shape} and number {k}")
    return values.shape[1]
