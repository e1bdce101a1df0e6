"""Similarity S between candidates, from the features of their window positions.

    flatten      all positions and dimensions as one vector (the paper)
    mean         the mean over positions
    masked       the mean over masked positions
    non-masked   the mean over revealed positions

cosine is the Gram matrix of unit vectors e; rbf is exp(-γ |e_i - e_j|²) = exp(-2γ (1 - cos)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ops.gram import cosine_gram
from .ops.width import wide

FEATURES = ("flatten", "mean", "masked", "non-masked")
SIMILARITIES = ("cosine", "rbf")


def similarity(features: Tensor, masked: Tensor, pooling: str, kind: str, gamma: float) -> Tensor:
    """S [P, U, U] for features [P, U, B, D] and masked [P, U, B]."""
    if pooling == "flatten":
        pooled = features.flatten(2)
    else:
        weight = torch.ones_like(masked) if pooling == "mean" else masked if pooling == "masked" else ~masked
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        pooled = (features * weight[..., None]).sum(2) / weight.sum(-1, keepdim=True).clamp_min(1)
    cosine = cosine_gram(pooled)
    if kind == "cosine":
        return cosine
    apart = (1 - cosine).to(wide(cosine.device))
    return torch.exp(-2 * min(gamma, 1e30) * apart)  # a larger gamma says no more, and would make NaN of equal rows
