"""The operations between the matrix products of a transformer. The Triton versions read and write each row once."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import usable


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x' = x + delta and h = weight * x' / sqrt(mean(x'^2) + eps), both [..., D]. Without delta, x' is x itself.

    x and delta are [..., D], weight is [D]. The sum, x' / rms, and the product of x' / rms with the weight are each
    rounded to the dtype of the rows.
    """
    if x.is_cuda and usable(x) and usable(weight) and (delta is None or usable(delta)):
        from .kernels import body

        return body.add_rms_norm(x, delta, weight, eps)
    x = x if delta is None else x + delta
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x, weight * wide.to(x.dtype)


def norm_rotate(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, width: int | None = None
) -> Tensor:
    """Normalise the heads of x [R, T, H * d], rotate them to their positions, and return them as [R, T, H, d].

    Given a weight [d], h = weight * x / sqrt(mean(x^2) + eps) per head, rounded as in `add_rms_norm`. cos and sin are
    [R or 1, 1, T, r], and the second half of the r numbers repeats the first. The pairs (i, i + r/2) of the first r
    numbers of every head are rotated by the angles of the token's position; the other d - r numbers stay. Rotations are
    computed in the dtype of the angles. The head width d is `width`, else the size of the weight, else r.
    """
    turned = cos.shape[-1]
    width = width or (turned if weight is None else len(weight))
    if x.is_cuda and usable(x) and (weight is None or usable(weight)):
        from .kernels import body

        return body.norm_rotate(x, weight, eps, cos, sin, width)
    heads = x.unflatten(-1, (-1, width))
    if weight is not None:
        _, heads = add_rms_norm(heads, None, weight, eps)
    rest = heads[..., turned:].to(x.dtype)
    wide = heads[..., :turned].to(cos.dtype)
    left, right = wide.chunk(2, dim=-1)
    swapped = torch.cat((-right, left), dim=-1)
    rotated = (wide * cos.transpose(1, 2) + swapped * sin.transpose(1, 2)).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if turned < width else rotated


def silu_gate(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b [..., I], the gate of a SwiGLU layer, for a and b [..., I].

    silu is computed in max(float32, dtype) and rounded before the product.
    """
    if a.is_cuda and usable(a) and usable(b):
        from .kernels import body

        return body.silu_gate(a, b)
    return F.silu(a) * b
