"""Cosine similarity of pooled features: S_ij = <h_i, h_j> / sqrt(<h_i, h_i> <h_j, h_j>).

Normalising by the Gram matrix's own diagonal (rather than normalising rows first) keeps S_ii exactly 1 and
near-identical rows from crossing 1. O(P U^2 F) time.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
