"""Numbers whose last bits matter: how wide they are, and sums of rows whose bits do not depend on the other rows.

A library's reduction may split a row in other places when there are more or fewer rows. Here every addition is between
two fixed places of the row, one elementwise operation per level: log2(n) launches, an error of log2(n) roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(device: torch.device) -> torch.dtype:
    """The widest float the device has: float64, on MPS float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """max(float32, dtype): the least precision in which we compute statistics, norms and rotations."""
    return torch.promote_types(dtype, torch.float32)


def steady_sum(x: Tensor, dim: int = -1) -> Tensor:
    """The sum of x over one dimension, by halves."""
    size = x.shape[dim]
    if size == 0:
        return x.sum(dim)
    whole = 1 << (size - 1).bit_length()
    if whole > size:
        rest = list(x.shape)
        rest[dim] = whole - size
        x = torch.cat([x, x.new_zeros(rest)], dim)
    while whole > 1:
        whole //= 2
        x = x.narrow(dim, 0, whole) + x.narrow(dim, whole, whole)
    return x.squeeze(dim)


def steady_mean(x: Tensor) -> Tensor:
    """The mean of x [..., n] over its last dimension, in the widest float of the device."""
    return steady_sum(x.to(wide(x.device))) / x.shape[-1]
