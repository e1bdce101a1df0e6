"""The gate of a SwiGLU layer: silu(a) * b, silu computed in max(float32, dtype) and rounded before the product."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .kernels import usable


def silu_gate(a: Tensor, b: Tensor) -> Tensor:
    """a and b [..., I] to silu(a) * b [..., I]."""
    if usable(a) and usable(b):
        from .kernels import gate

        return gate.silu_gate(a, b)
    return F.silu(a) * b
