"""The operations between the matrix products of a transformer. The Triton versions read and write each row once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import usable
from .precision import working_dtype


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x' = x + delta and h = weight * x' / sqrt(mean(x'^2) + eps), both [..., D]. Without delta, x' is x itself.

    x and delta are [..., D], weight is [D]. The sum, x' / rms, and the product of x' / rms with the weight are each
    rounded to the dtype of the rows.
    """
    # The weight is checked, too, because it may need a gradient even if the rows do not.
    if usable(x) and usable(weight) and (delta is None or usable(delta)):
        from .kernels import body

        return body.add_rms_norm(x, delta, weight, eps)
    x = x if delta is None else x + delta
    wide = x.to(working_dtype(x.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x, weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions: rotate the pairs (i, i + d/2) of every head by the angles of the token's position.

    x is [R, T, H * d]. cos and sin are [R or 1, 1, T, d], and the second half of the d numbers repeats the first. The
    result [R, T, H, d] is computed in the dtype of the angles and rounded once.
    """
    if usable(x):
        from .kernels import body

        return body.rotate(x, cos, sin)
    wide = x.unflatten(-1, (-1, cos.shape[-1])).to(cos.dtype)
    left, right = wide.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (wide * cos.transpose(1, 2) + turned * sin.transpose(1, 2)).to(x.dtype)


def silu_gate(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b [..., I], the gate of a SwiGLU layer, for a and b [..., I].

    silu is computed in max(float32, dtype) and rounded before the product.
    """
    if usable(a) and usable(b):
        from .kernels import body

        return body.silu_gate(a, b)
    return F.silu(a) * b
