"""Random pools of any size, by two laws: that of the authors (`authors_rows`), and ours, which imitates real pools.

Ours (`synthetic_rows`) has similar qualities and cosines between and within groups as real pools. A row is
e = (√a, √(1-a) z/|z|) with z = √(1-f) x_group + √f x_own, where every x is a Gaussian vector.

a    the mean cosine between groups. The mean cosine within a group is about a + (1-a)(1-f)
x    has variances λ with sum 1 that fall by a power law. x·x' has variance Σ λ², so 1 / Σ λ² is the number of
     dimensions with equal variances that would give cosines between groups the same spread. The exponent of the power
     law is chosen to match the spread of the real pool. All variances are positive, so no set of rows is singular.
f    the share of a row's own vector. f differs from row to row, because some children differ more from their parent
     than others. f is log-normal, with a mean and a spread that match the real cosines within groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from d5p4 import PoolView
from d5p4.errors import D5P4Error

WIDTH = 1024  # the number of dimensions of the random vectors x
_LEAST = 1e-4  # 1 - a and the mean of f (see above) are at least this large
_STEEPEST = 8.0  # the exponent of the power law is at most this large


@dataclass(frozen=True)
class PoolStatistics:
    """The statistics of the pool at one step of real decoding."""

    step: int
    between: float  # the mean cosine of two rows of different groups
    between_spread: float  # the standard deviation of these cosines
    within: float  # the mean cosine of two rows of the same group
    within_spread: float
    quality: Sequence[float]  # the qualities of all rows, sorted, and scaled so that they range from 0 to 1
    quality_shared: float  # the share of the variance of quality that is common to the rows of a group

    @property
    def dimensions(self) -> float:
        """The number of dimensions with equal variances that would give cosines between groups the same spread."""
        return ((1 - self.between) / max(self.between_spread, 1e-9)) ** 2


def read_statistics(step: int, view: PoolView) -> PoolStatistics | None:
    """Return the statistics of the first prompt's pool, or None if its rows are all equal."""
    similarity, quality, group = view.similarity[0].double().cpu(), view.quality[0].double().cpu(), view.group[0].cpu()
    same = group[:, None] == group
    apart = similarity[~same]
    siblings = similarity[same & ~torch.eye(len(group), dtype=torch.bool)]
    k = int(group.max()) + 1
    if k < 2 or len(siblings) == 0 or float(1 - apart.mean()) < _LEAST or float(quality.std()) == 0:
        return None
    stretched = (quality - quality.min()) / (quality.max() - quality.min())
    return PoolStatistics(
        step=step,
        between=float(apart.mean()),
        between_spread=float(apart.std()),
        within=float(siblings.mean()),
        within_spread=float(siblings.std()),
        quality=tuple(round(float(q), 5) for q in stretched.sort().values),
        quality_shared=shared_variance(quality.view(k, -1)),
    )


def shared_variance(values: Tensor) -> float:
    """The intraclass correlation of values [k, w], between 0 and 1 (Fisher, 1925): (A - B) / (A + (w - 1) B). A is the
    mean square between groups, and B is the mean square within groups."""
    k, w = values.shape
    between = w * float(values.mean(1).var())
    within = float(values.var(1).mean())
    return min(max((between - within) / max(between + (w - 1) * within, 1e-12), 0.0), 1.0)


def cosines(rows: Tensor) -> Tensor:
    """Return the similarity [N, N] of normalised rows [N, D]. Its diagonal is exactly 1."""
    return (rows @ rows.T).fill_diagonal_(1.0)


def synthetic_rows(statistics: PoolStatistics, k: int, w: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a random pool of k contiguous groups of w rows: quality [kw] and rows e [kw, 1 + WIDTH], float64."""
    shared = min(max(statistics.between, 0.0), 1 - _LEAST)
    scale = variances(round(statistics.dimensions, 1)).sqrt()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    stray = min(max((1 - statistics.within) / (1 - shared), _LEAST), 1.0)
    # A cosine depends on the mean of two values of f. The spread of f is √2 times the spread of such a mean.
    unlike = 2**0.5 * statistics.within_spread / (1 - shared) / stray
    sigma = math.log1p(unlike**2) ** 0.5
    own = (stray * torch.exp(sigma * normal(k, w, 1) - sigma**2 / 2)).clamp_max(1.0)
    z = (1 - own).sqrt() * normal(k, 1, WIDTH) + own.sqrt() * normal(k, w, WIDTH)
    z = torch.nn.functional.normalize((z * scale).flatten(0, 1), dim=-1)
    rows = torch.cat([torch.full((k * w, 1), shared**0.5, dtype=z.dtype), (1 - shared) ** 0.5 * z], 1)
    return _quality(statistics, normal(k, 1), normal(k, w)), rows


def authors_rows(k: int, w: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a pool by the law of the authors' benchmark: quality [kw] and normalised rows [kw, 6144], float64.

    The rows of a group are no more alike than others. With s = 0.58 p + 0.42 z, where p (one per pool) and z are
    Gaussian vectors, a row is s |s| per number, scaled to mean -0.8 and standard deviation 41. The quality is minus the
    mean entropy of 8 positions with the logits N(0, 1) - 2.5 r for r = 0..49, scaled to range from 0 to 1.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    mixed = 0.58 * normal(1, 8 * 768) + 0.42 * normal(k * w, 8 * 768)
    rows = mixed * mixed.abs()
    rows = 41.0 * (rows - rows.mean()) / rows.std() - 0.8
    log_p = (normal(k * w, 8, 50) - 2.5 * torch.arange(50)).log_softmax(-1)
    quality = (log_p.exp() * log_p).sum(-1).mean(-1)
    quality = (quality - quality.min()) / (quality.max() - quality.min())
    return quality, torch.nn.functional.normalize(rows, dim=-1)


def _quality(statistics: PoolStatistics, family: Tensor, own: Tensor) -> Tensor:
    """Turn normal numbers of groups [k, 1] and rows [k, w] into qualities [kw] that are distributed like real ones."""
    shared = statistics.quality_shared
    share = torch.special.ndtr((shared**0.5 * family + (1 - shared) ** 0.5 * own).flatten())
    levels = torch.tensor(statistics.quality, dtype=torch.float64)
    place = share * (len(levels) - 1)
    low = place.floor().long().clamp_max(len(levels) - 2)
    quality = levels[low] + (place - low) * (levels[low + 1] - levels[low])
    spread = quality.max() - quality.min()
    return (quality - quality.min()) / spread if spread > 0 else torch.zeros_like(quality)


@lru_cache(maxsize=512)
def variances(dimensions: float) -> Tensor:
    """The variances λ_j ∝ j^-γ [WIDTH] with sum 1. γ makes 1 / Σ λ² as near to `dimensions` as possible."""
    place = torch.arange(1, WIDTH + 1, dtype=torch.float64)

    def law(exponent: float) -> Tensor:
        weight = place**-exponent
        return weight / weight.sum()

    low, high = 0.0, _STEEPEST
    for _ in range(60):
        middle = (low + high) / 2
        if 1 / float((law(middle) ** 2).sum()) > dimensions:
            low = middle
        else:
            high = middle
    return law(low)


def parse_size(size: str) -> tuple[int, int]:
    try:
        k, w = (int(part) for part in size.split("x"))
    except ValueError:
        raise D5P4Error(f"size {size!r} must have the form GROUPSxCHILDREN, such as 8x4") from None
    if k < 2 or w < 2:
        raise D5P4Error(f"size {size!r} must have at least two groups of at least two children")
    return k, w
