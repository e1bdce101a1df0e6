"""Pools for the selectors' tests: kernels with the structure of real ones, shuffles, and a chi-square test."""

from __future__ import annotations

import torch
from scipy.stats import chi2
from torch import Tensor

from d5p4.decode.view import PoolView
from d5p4.rng import mix


def inputs(
    prompts: int, k: int, w: int, seed: int, *, dim: int = 16, shared: float = 0.8, parent: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Quality [P, N] stretched to [0, 1], similarity [P, N, N], ties [P, N]: a component that all rows share and one
    that siblings share."""
    g = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, dim, generator=g, dtype=torch.float64), dim=-1)

    own = unit(prompts, k, w)
    family = unit(prompts, k, 1)
    z = parent**0.5 * family + (1 - parent) ** 0.5 * own
    e = (shared**0.5 * unit(prompts, 1, 1) + (1 - shared) ** 0.5 * z).flatten(1, 2)
    e = torch.nn.functional.normalize(e, dim=-1)
    similarity = e @ e.mT
    similarity.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    quality = torch.rand(prompts, k * w, generator=g, dtype=torch.float64)
    quality = (quality - quality.amin(-1, keepdim=True)) / (
        quality.amax(-1, keepdim=True) - quality.amin(-1, keepdim=True) + 1e-12
    )
    return quality, similarity, ties(prompts, k * w, seed)


def ties(prompts: int, size: int, seed: int = 0) -> Tensor:
    return mix(seed, torch.arange(prompts).unsqueeze(-1), torch.arange(size))


def keys(prompts: int, seed: int = 0) -> Tensor:
    return mix(seed, torch.arange(prompts))


def pool(quality: Tensor, similarity: Tensor, tie: Tensor, **more: object) -> PoolView:
    size = quality.shape[1]
    more.setdefault("width", 2)
    return PoolView(
        group=torch.arange(size).expand_as(tie),
        tie=tie,
        quality=quality,
        similarity=similarity,
        **more,  # type: ignore[arg-type]
    )


def repeat(values: Tensor, times: int) -> Tensor:
    """The first prompt, many times."""
    return values[:1].expand(times, *values.shape[1:]).contiguous()


def shuffle(prompts: int, k: int, w: int, seed: int) -> Tensor:
    """A permutation [P, N] of groups and of items inside groups: new place -> old index."""
    g = torch.Generator().manual_seed(seed)
    between = torch.rand(prompts, k, generator=g).argsort(-1)
    within = torch.rand(prompts, k, w, generator=g).argsort(-1)
    return (between.unsqueeze(-1) * w + within).view(prompts, k * w)


def permute(values: Tensor, order: Tensor) -> Tensor:
    """[P, N] or [P, N, N] by a permutation [P, N]."""
    if values.ndim == 2:
        return values.gather(1, order)
    p = torch.arange(len(order)).view(-1, 1, 1)
    return values[p, order.unsqueeze(-1), order.unsqueeze(1)]


def chi_square(counts: Tensor, chances: Tensor) -> float:
    """p-value of counts [M] against probabilities [M]; cells with fewer than 5 expected are pooled."""
    expected = chances / chances.sum() * counts.sum()
    assert (counts[chances == 0] == 0).all()
    small = expected < 5
    seen = torch.cat([counts[~small], counts[small].sum().view(1)]).double()
    hoped = torch.cat([expected[~small], expected[small].sum().view(1)])
    seen, hoped = seen[hoped > 0], hoped[hoped > 0]
    return float(chi2.sf(float(((seen - hoped) ** 2 / hoped).sum()), len(seen) - 1))


def is_transversal(parents: Tensor, k: int, w: int) -> bool:
    return bool((parents // w == torch.arange(k)).all())
