"""Cosine similarity of pooled features: S_ij = <h_i, h_j> / sqrt(<h_i, h_i> <h_j, h_j>).

Dividing by the diagonal of the Gram matrix makes S_ii exactly 1 and S_ij of almost equal rows at most 1. The time is
O(P U^2 F) for P pools of U distinct rows with F features. On CUDA, except in float64, `kernels.gram` reads the rows in
place. Each rank may compute the products over one slice (`slice_borders`, `pool_products`, `to_cosine`).
"""

from __future__ import annotations

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
    if kernels.usable(features, slot.shape[1]):
        from .kernels.gram import pool_gram as launch

        return launch(features, slot, first)
    return to_cosine(_pool_products(features, slot, first), first).to(working_dtype(features.dtype))


def pool_products(features: Tensor, slot: Tensor, piece: int) -> Tensor:
    """Return the products <h_i, h_j> [P, N, N] in the widest float type, so that their sum does not depend on how the
    features are sliced. `piece` is returned by `slice_borders`."""
    if not kernels.usable(features, slot.shape[1]):
        return _pool_products(features, slot, first_equal(slot))
    from .kernels.gram import pool_pieces

    upper = pool_pieces(features, slot, piece).sum(1, dtype=torch.float64).triu()
    return upper + upper.triu(1).transpose(1, 2)


def to_cosine(products: Tensor, first: Tensor) -> Tensor:
    """Return S [P, N, N], given the products <h_i, h_j>. Rows with the same number in first [P, N] are equal rows."""
    norm = products.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    zero = norm == 0
    scale = norm[..., :, None] * norm[..., None, :]
    cosine = (products / scale.masked_fill(scale == 0, 1)).clamp(-1, 1)
    same = (zero[..., :, None] & zero[..., None, :]) | (first[..., :, None] == first[..., None, :])
    return cosine.masked_fill(same, 1.0)


def slice_borders(features: Tensor, size: int, parts: int) -> tuple[list[int], int]:
    """Split the B x D axis of features [U, B, D] into `parts` slices. Return their borders and the length of a piece.

    Slices consist of whole pieces, and the kernels add up products by piece, so the sums do not depend on `parts`.
    """
    length, grain = features.shape[1] * features.shape[2], features.shape[2]
    if kernels.usable(features, size):
        from .kernels.gram import piece_length

        grain = piece_length(length, size, features.dtype)
    pieces = -(-length // grain)
    return [min(length, pieces * part // parts * grain) for part in range(parts + 1)], grain


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
