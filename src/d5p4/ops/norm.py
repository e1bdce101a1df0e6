"""A residual sum and the RMS norm of it: x' = x + delta, h = weight * x' / sqrt(mean(x'^2) + eps).

Two roundings to the rows' dtype besides that of the sum: of x' / rms, and of its product with the weight.
O(D) per row; the Triton version reads and writes each row once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import usable
from .width import working_dtype


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [..., D] and weight [D] to x + delta and its norm, both [..., D]. No delta: x itself and its norm."""
    # All three: rows without gradient may still meet a weight that wants one.
    if usable(x) and usable(weight) and (delta is None or usable(delta)):
        from .kernels import norm

        return norm.add_rms_norm(x, delta, weight, eps)
    x = x if delta is None else x + delta
    wide = x.to(working_dtype(x.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x, weight * wide.to(x.dtype)
