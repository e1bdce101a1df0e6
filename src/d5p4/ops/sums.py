"""Sums of rows whose bits do not depend on the other rows.

A library's reduction may cut a row in other places when there are more or fewer rows. Here every addition is between
two fixed places of the row, one elementwise operation a level: log2(n) launches, an error of log2(n) roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .width import wide


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
