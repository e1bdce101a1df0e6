"""Similarity S between candidates, from the features of their window positions.

    flatten      all positions and dimensions as one vector (the paper)
    mean         the mean over positions
    masked       the mean over masked positions
    non-masked   the mean over revealed positions

cosine is the Gram matrix of unit vectors e; rbf is exp(-γ |e_i - e_j|²) = exp(-2γ (1 - cos)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .ops.gram import pool_gram
from .ops.precision import steady_sum, wide

FEATURES = ("flatten", "mean", "masked", "non-masked")
SIMILARITIES = ("cosine", "rbf")


def similarity(
    features: Tensor,
    masked: Tensor,
    slot: Tensor,
    pooling: str,
    kind: str,
    gamma: float,
    gram: Callable[[Tensor, Tensor], Tensor] = pool_gram,
) -> Tensor:
    """Return S [P, N, N]. Row i of pool p is features[slot[p, i]]; features [U, B, D], masked [U, B], slot [P, N].

    `gram(features, slot)` returns the cosines; with several ranks, they include rows of the other ranks.
    """
    if pooling != "flatten":
        weight = torch.ones_like(masked) if pooling == "mean" else masked if pooling == "masked" else ~masked
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        pooled = steady_sum(features * weight[..., None], 1) / weight.sum(-1, keepdim=True).clamp_min(1)
        features = pooled[:, None]
    cosine = gram(features, slot)
    if kind == "cosine":
        return cosine
    apart = (1 - cosine).to(wide(cosine.device))
    # A larger gamma would give the same similarities, but NaN for equal rows.
    return torch.exp(-2 * min(gamma, 1e30) * apart).to(cosine.dtype)
