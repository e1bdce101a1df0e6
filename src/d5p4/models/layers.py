"""Pieces the three architectures share: norms, rotary positions, attention over left-padded rows.

Norms and rotations run in max(float32, the rows' dtype): a float64 model is float64 all the way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import D5P4Error
from ..ops.body import add_rms_norm, rotate
from ..ops.precision import working_dtype


class RMSNorm(nn.Module):
    """x + delta and, times a weight [D], x + delta over its root mean square: see `ops.body`.

    The norm adds the residual, because both together are one pass over the rows.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, delta [..., D] to the sum and its norm, both [..., D]."""
        return add_rms_norm(x, delta, self.weight, self.eps)


class Padding(NamedTuple):
    """What left padding means for one batch."""

    positions: Tensor  # [R or 1, T] counted from the first real token
    keys: Tensor | None  # [R, 1, 1, T] bool, True where attention may look; None: everywhere
    first: Tensor | None  # [R, T] bool, the first real token of each row; None: column 0


def read_padding(tokens: Tensor, attention_mask: Tensor | None) -> Padding:
    """The padding of tokens [R, T] under attention_mask [R, T]."""
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape:
            shapes = f"{tuple(attention_mask.shape)}, but tokens have {tuple(tokens.shape)}"
            raise D5P4Error(f"attention_mask has shape {shapes}: give one entry per token")
        real = attention_mask.to(device=tokens.device, dtype=torch.bool)
        # Only on the CPU: reading the mask on a GPU would wait for the device.
        if real.device.type != "cpu" or not bool(real.all()):
            count = real.long().cumsum(-1)
            # A row that is all padding looks everywhere, because softmax over nothing would be NaN.
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


def attend(query: Tensor, key: Tensor, value: Tensor, angles: Rotary, keys: Tensor | None) -> Tensor:
    """Bidirectional attention of query [R, T, H * d] over key and value [R, T, K * d] to [R, T, H * d]. K divides H.

    Heads stay side by side in memory from the projections to the result, so nothing is copied.
    """
    query, key = (rotate(x, *angles).transpose(1, 2) for x in (query, key))
    value = value.unflatten(-1, (-1, angles.cos.shape[-1])).transpose(1, 2)
    copies = query.shape[1] // key.shape[1]
    shared = copies > 1 and keys is None and _flash_shares_heads(query, key, value)
    if copies > 1 and not shared:
        # enable_gqa needs flash attention; without it, torch would choose the kernel that stores all T x T weights.
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keys, enable_gqa=shared)
    return mixed.transpose(1, 2).flatten(2)


def any_shape() -> AbstractContextManager[None]:
    """Attention without cuDNN, which plans every new shape for longer than a forward of a few rows takes; the number
    of rows changes at every step. torch switches it for the whole process: two threads may leave cuDNN turned off."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _flash_shares_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention takes query [R, H, T, d] over fewer heads of key and value [R, K, T, d]."""
    if not query.is_cuda or torch.compiler.is_compiling():
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(params)
