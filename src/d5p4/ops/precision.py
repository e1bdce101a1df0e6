"""Float precision, and sums over rows. The bits of a row's sum do not depend on the other rows.

A library's sum function may split a row at places that depend on the number of rows. `steady_sum` always adds the
numbers of a row in the same binary tree, with one elementwise operation per level.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def wide(device: torch.device) -> torch.dtype:
    """Return the widest float type that the device has: float32 on MPS, float64 elsewhere."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return max(float32, dtype), the least precision in which we compute statistics, norms and rotations."""
    return torch.promote_types(dtype, torch.float32)


def steady_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Return the sum of x over one dimension: add the second half to the first half until one number is left."""
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
    """Return the mean of x [..., n] over its last dimension, in the widest float type of the device."""
    return steady_sum(x.to(wide(x.device))) / x.shape[-1]
