"""Cosine similarity of pooled features: S_ij = <h_i, h_j> / sqrt(<h_i, h_i> <h_j, h_j>).

Dividing by the diagonal of the Gram matrix makes S_ii exactly 1 and S_ij of almost equal rows at most 1. The time is
O(P U^2 F) for P pools of U distinct rows with F features. On CUDA, except in float64, `kernels.gram` reads the rows in
place.
"""

import torch
from torch import Tensor

from . import kernels
from .precision import wide, working_dtype
from .ties import first_equal


def pool_gram(features: Tensor, slot: Tensor) -> Tensor:
    """Return S [P, N, N] in max(float32, dtype). Row i of pool p is row slot[p, i] of features [U, B, D].

    Two rows of zeros count as equal. Rows with the same slot are computed once, so these rows have equal similarities.
    """
    first = first_equal(slot)
    if features.is_cuda and kernels.usable(features, slot.shape[1]):
        from .kernels.gram import pool_gram as launch

        return launch(features, slot, first)
    return _to_cosine(_pool_products(features, slot, first), first).to(working_dtype(features.dtype))


def _to_cosine(products: Tensor, first: Tensor) -> Tensor:
    """Return S [P, N, N], given the products <h_i, h_j>. Rows with the same number in first [P, N] are equal rows."""
    norm = products.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    zero = norm == 0
    scale = norm[..., :, None] * norm[..., None, :]
    cosine = (products / scale.masked_fill(scale == 0, 1)).clamp(-1, 1)
    same = (zero[..., :, None] & zero[..., None, :]) | (first[..., :, None] == first[..., None, :])
    return cosine.masked_fill(same, 1.0)


def _pool_products(features: Tensor, slot: Tensor, first: Tensor) -> Tensor:
    is_first = first == torch.arange(first.shape[1], device=first.device)
    rank = (is_first.cumsum(-1) - 1).gather(1, first)  # each row's index among the distinct rows of its pool
    distinct = first.new_zeros(first.shape[0], int(rank.max()) + 1 if rank.numel() else 0).scatter(1, rank, first)
    rows = features[slot.gather(1, distinct)].flatten(2).to(wide(features.device))
    small = rows @ rows.transpose(-1, -2)
    pool = torch.arange(len(slot), device=slot.device).view(-1, 1, 1)
    return small[pool, rank[:, :, None], rank[:, None, :]]


RHO = 0.8


def token_kernel(tokens: Tensor, mask_id: int, rho: float = RHO) -> Tensor:
    """Return S_ij = rho^(d_ij + h_ij / 2) [P, N, N] for rows of tokens [P, N, L].

    d_ij counts the positions with different revealed tokens, h_ij those that only one of the rows has revealed. Per
    position, this is a positive definite kernel over tokens and mask, so S is positive definite if all rows differ.
    """
    values = tokens.to(wide(tokens.device))  # ids are below 2^24, so float32 has them exactly, too
    differ = torch.cdist(values, values, p=0)  # d + h
    shown = (tokens != mask_id).to(values.dtype)
    count = shown.sum(-1)
    alone = count[:, :, None] + count[:, None, :] - 2 * shown @ shown.transpose(1, 2)
    return rho ** (differ - alone / 2)
