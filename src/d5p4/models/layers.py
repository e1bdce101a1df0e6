"""The parts that the three architectures share: norms, rotary positions, and attention over left-padded rows.

Norms and rotations run in float32, or in the dtype of the rows if that is wider.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import D5P4Error
from ..ops.body import add_rms_norm, norm_rotate
from ..ops.precision import working_dtype


class RMSNorm(nn.Module):
    """Adds a residual to x, divides the sum by its root mean square, and multiplies the result by a weight [D].

    The norm also adds the residual, because `ops.body` can do both in one pass over the rows.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta and the normalised x + delta, both [..., D]."""
        return add_rms_norm(x, delta, self.weight, self.eps)


class Padding(NamedTuple):
    """The positions and attention masks of a batch whose rows are padded on the left."""

    positions: Tensor  # [R or 1, T], counted from the first token that is not padding
    keys: Tensor | None  # [R, 1, 1, T] bool, True at positions that attention may read; None means all positions
    first: Tensor | None  # [R, T] bool, True at each row's first token that is not padding; None means column 0


def read_padding(tokens: Tensor, attention_mask: Tensor | None) -> Padding:
    """Return the `Padding` of a batch of tokens [R, T], read from attention_mask [R, T]."""
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape:
            shapes = f"{tuple(attention_mask.shape)}, but tokens have {tuple(tokens.shape)}"
            raise D5P4Error(f"attention_mask has shape {shapes}: give one entry per token")
        real = attention_mask.to(device=tokens.device, dtype=torch.bool)
        # On a GPU we assume that there is padding: to read the mask, the CPU would have to wait for the GPU.
        if real.device.type != "cpu" or not bool(real.all()):
            count = real.long().cumsum(-1)
            # A row that is all padding attends to all its positions, because a softmax over no position would be NaN.
            keys = real | ~real.any(-1, keepdim=True)
            return Padding((count - 1).clamp_min(0), keys[:, None, None, :], real & (count == 1))
    return Padding(torch.arange(tokens.shape[1], device=tokens.device)[None], None, None)


class Rotary(NamedTuple):
    """Cosines and sines [R or 1, 1, T, d] of rotary positions, which rotate each pair of elements i and i + d/2."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Rotary:
    """Return the cosines and sines of positions [R, T] for heads of this width, in float32 or wider."""
    dtype = working_dtype(dtype)
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    angles = positions[:, None, :, None].to(dtype) * (1.0 / base**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return Rotary(angles.cos(), angles.sin())


def attend(query: Tensor, key: Tensor, value: Tensor, angles: Rotary, keys: Tensor | None) -> Tensor:
    """Return [R, T, H * d], the bidirectional attention of query [R, T, H * d] over key and value [R, T, K * d].

    K (key heads) divides H (query heads). A tensor's heads lie side by side in memory, so transposing copies nothing.
    """
    query, key = (norm_rotate(x, None, 0.0, *angles).transpose(1, 2) for x in (query, key))
    value = value.unflatten(-1, (-1, angles.cos.shape[-1])).transpose(1, 2)
    copies = query.shape[1] // key.shape[1]
    shared = copies > 1 and keys is None and _flash_shares_heads(query, key, value)
    if copies > 1 and not shared:
        # Without flash attention, enable_gqa would make torch choose the kernel that stores all T x T weights.
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keys, enable_gqa=shared)
    return mixed.transpose(1, 2).flatten(2)


def any_shape() -> AbstractContextManager[None]:
    """Return a context in which torch does not use cuDNN for attention. cuDNN makes a plan for every new shape, which
    takes longer than a forward of a few rows, and the number of rows changes at every step. The switch is global:
    cuDNN may stay off if two threads use the switch at once."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _flash_shares_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether flash attention can run when key and value [R, K, T, d] have fewer heads than query [R, H, T, d]."""
    if not query.is_cuda or torch.compiler.is_compiling():
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(params)
