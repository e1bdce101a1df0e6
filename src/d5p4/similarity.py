"""The similarity S between candidates. The features of a candidate's window positions are pooled into one vector:

    flatten      the features of all positions, one after the other (as in the paper)
    mean         the mean of the features over all positions
    masked       the mean of the features over masked positions
    non-masked   the mean of the features over revealed positions

These vectors are scaled to unit vectors e_i. The cosine similarity of two candidates is e_i · e_j. Their rbf similarity
is exp(-γ |e_i - e_j|²) = exp(-2γ (1 - cos)).
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
    """Compute S [P, N, N] from features [U, B, D], masked [U, B] and slot [P, N]. The features of row i in the pool of
    prompt p are features[slot[p, i]].

    `gram(features, slot)` returns the cosines. With several ranks, these include the cosines of other ranks' rows.
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
    # gamma is at most 1e30: a gamma too large for float32 is infinite, and infinity times the distance 0 is NaN.
    return torch.exp(-2 * min(gamma, 1e30) * apart).to(cosine.dtype)
