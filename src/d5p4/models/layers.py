"""Pieces the three architectures share: norms, rotary positions, attention over left-padded rows.

Norms and rotations run in max(float32, the rows' dtype): a float64 model is float64 all the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import D5P4Error


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / rms(x), back in the dtype of x, times a weight [D]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(working_dtype(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Padding(NamedTuple):
    """What left padding means for one batch."""

    positions: Tensor  # [R or 1, T] counted from the first real token
    keys: Tensor | None  # [R, 1, 1, T] bool, True where attention may look; None: everywhere
    first: Tensor | None  # [R, T] bool, the first real token of each row; None: column 0


def read_padding(tokens: Tensor, attention_mask: Tensor | None) -> Padding:
    """The padding of tokens [R, T] under attention_mask [R, T]."""
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape:
            raise D5P4Error(
                f"attention_mask has shape {tuple(attention_mask.shape)} but tokens have {tuple(tokens.shape)}: "
                "give one entry for each token"
            )
        real = attention_mask.to(device=tokens.device, dtype=torch.bool)
        if not bool(real.all()):
            count = real.long().cumsum(-1)
            # A row of padding alone looks everywhere: softmax over nothing would be NaN.
            keys = real | ~real.any(-1, keepdim=True)
            return Padding((count - 1).clamp_min(0), keys[:, None, None, :], real & (count == 1))
    return Padding(torch.arange(tokens.shape[1], device=tokens.device)[None], None, None)


class Rotary(NamedTuple):
    """Cosines and sines [R or 1, 1, T, d] of half-split rotary positions."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Rotary:
    """Angles of positions [R, T] for heads of this width, in max(float32, dtype)."""
    dtype = working_dtype(dtype)
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    angles = positions[:, None, :, None].to(dtype) * (1.0 / base**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, angles: Rotary) -> Tensor:
    """Turn the pairs (i, i + d/2) of x [R, H, T, d]."""
    wide = x.to(angles.cos.dtype)
    left, right = wide.chunk(2, dim=-1)
    return (wide * angles.cos + torch.cat((-right, left), dim=-1) * angles.sin).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[R, T, H * d] to [R, H, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, angles: Rotary, keys: Tensor | None) -> Tensor:
    """Bidirectional attention of query [R, H, T, d] over key and value [R, K, T, d], K dividing H.

    Gives [R, T, H * d].
    """
    query, key = rotate(query, angles), rotate(key, angles)
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        # Not enable_gqa: with a mask it falls back to the kernel that stores all T x T weights.
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
    return mixed.transpose(1, 2).flatten(2)
