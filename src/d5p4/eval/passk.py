"""pass@n, its interval, and how much of the unsolved a method cuts. Problems are the unit of chance everywhere.

Letters in shapes: P problems, k answers to each, S seeds.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import D5P4Error

_NORMAL_95 = 1.959963984540054


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    mean: float
    low: float
    high: float


def pass_at(right: ArrayLike, n: int) -> NDArray[np.float64]:
    """[P]: the chance that n of the k answers, drawn without replacement, hold a right one; `right` is bool [P, k].

    1 - C(k - c, n) / C(k, n) for c right ones among k: without bias for the pass@n of independent answers.
    """
    judged = np.asarray(right, dtype=bool)
    if judged.ndim != 2:
        raise D5P4Error(f"pass@n needs judgements of shape [problems, answers], got shape {judged.shape}")
    answers = judged.shape[1]
    if not 1 <= n <= answers:
        raise D5P4Error(f"pass@n with {answers} answers needs n between 1 and {answers}, got {n}")
    wrong = answers - judged.sum(axis=1, keepdims=True)
    drawn = np.arange(n)
    return 1 - np.prod((wrong - drawn).clip(0) / (answers - drawn), axis=1)


def interval(values: ArrayLike) -> Interval:
    """Mean of [P] or [S, P] values with a normal 95 % interval over problems, each averaged over its seeds first."""
    figures = np.asarray(values, dtype=np.float64)
    if figures.ndim not in (1, 2) or figures.shape[-1] < 2:
        raise D5P4Error(f"an interval needs [problems] or [seeds, problems], two problems or more, got {figures.shape}")
    each = figures.mean(axis=0) if figures.ndim == 2 else figures
    mean = float(each.mean())
    half = _NORMAL_95 * float(each.std(ddof=1)) / len(each) ** 0.5
    return Interval(mean, mean - half, mean + half)


def relative_cut(base: ArrayLike, other: ArrayLike, seed: int = 0, draws: int = 2000) -> Interval:
    """The share of what `base` leaves unsolved that `other` solves: 1 - sum(1 - other) / sum(1 - base), both [P].

    The interval is a paired bootstrap over problems: the same problems are drawn for both, so what makes a problem hard
    cancels. Draws in which `base` solves everything say nothing and are left out.
    """
    before, after = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if before.ndim != 1 or before.shape != after.shape or len(before) < 2:
        raise D5P4Error(f"a relative cut compares the same two or more problems, got {before.shape} and {after.shape}")
    unsolved = 1 - np.stack([before, after])  # [2, P]
    if unsolved[0].sum() <= 0:
        raise D5P4Error("the base solves every problem, so there is nothing left to cut")
    source = np.random.default_rng(seed)
    count = unsolved.shape[1]
    sums = np.array([unsolved[:, source.integers(count, size=count)].sum(axis=1) for _ in range(draws)])  # [draws, 2]
    sums = sums[sums[:, 0] > 0]
    low, high = np.quantile(1 - sums[:, 1] / sums[:, 0], [0.025, 0.975])
    return Interval(float(1 - unsolved[1].sum() / unsolved[0].sum()), float(low), float(high))
