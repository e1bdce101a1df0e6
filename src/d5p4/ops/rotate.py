"""Rotary positions: the pairs (i, i + d/2) of every head, turned by the angles of the token's position.

Computed in the dtype of the angles, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import usable


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, T, H * d] with cos, sin [R or 1, 1, T, d], whose two halves are equal, to [R, T, H, d]."""
    if usable(x):
        from .kernels import rotate as triton

        return triton.rotate(x, cos, sin)
    wide = x.unflatten(-1, (-1, cos.shape[-1])).to(cos.dtype)
    left, right = wide.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (wide * cos.transpose(1, 2) + turned * sin.transpose(1, 2)).to(x.dtype)
