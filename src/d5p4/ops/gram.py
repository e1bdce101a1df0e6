"""Cosine similarity of pooled features: S_ij = <h_i, h_j> / sqrt(<h_i, h_i> <h_j, h_j>).

Normalising by the Gram matrix's own diagonal (rather than normalising rows first) keeps S_ii exactly 1 and
near-identical rows from crossing 1. O(P U^2 F) time. On CUDA, float64 apart, `kernels.gram` reads the rows in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import kernels
from .equal import first_equal


def cosine_gram(rows: Tensor) -> Tensor:
    """rows [P, U, F] -> S [P, U, U] in [-1, 1], in max(float32, dtype). Two zero rows count as equal."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    gram = rows @ rows.transpose(-1, -2)
    square = gram.diagonal(dim1=-2, dim2=-1)
    norm = square.clamp_min(0).sqrt()
    zero = norm == 0
    product = norm[..., :, None] * norm[..., None, :]
    cosine = (gram / product.masked_fill(product == 0, 1)).clamp(-1, 1)
    cosine = torch.where(zero[..., :, None] & zero[..., None, :], 1.0, cosine)
    same = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
    return cosine.masked_fill(same, 1.0)


def pool_gram(features: Tensor, slot: Tensor) -> Tensor:
    """S [P, N, N] of pools whose row i is features[slot[p, i]], for features [U, B, D] and slot [P, N].

    Rows with one slot get equal numbers by construction: they are computed once and spread.
    """
    first = first_equal(slot)
    if kernels.usable(features, slot.shape[1]):
        from .kernels.gram import pool_gram as launch

        return launch(features, slot, first)
    is_first = first == torch.arange(first.shape[1], device=first.device)
    rank = (is_first.cumsum(-1) - 1).gather(1, first)  # which distinct row of its pool a row is
    distinct = first.new_zeros(first.shape[0], int(rank.max()) + 1 if rank.numel() else 0).scatter(1, rank, first)
    small = cosine_gram(features[slot.gather(1, distinct)].flatten(2))
    pool = torch.arange(len(slot), device=slot.device).view(-1, 1, 1)
    return small[pool, rank[:, :, None], rank[:, None, :]]
