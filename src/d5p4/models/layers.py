"""The parts that the architectures share: norms, padding, rotary positions, and attention.

Norms and rotations run in float32, or in the dtype of the rows if that is wider.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import D5P4Error
from ..ops.attention import attend_stored
from ..ops.body import add_rms_norm, norm_rotate
from ..ops.precision import working_dtype
from ..types import Context


class RMSNorm(nn.Module):
    """Adds a residual to x, divides the sum by its root mean square, and multiplies the result by a weight [D]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta and the normalised x + delta, both [..., D]."""
        return add_rms_norm(x, delta, self.weight, self.eps)


# What a layer returns: x and delta [R, T, D], where the next norm adds delta to x, and its keys and values.
Output = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]


class Padding(NamedTuple):
    """The positions and attention masks of a batch of rows."""

    positions: Tensor  # [R or 1, T], counted from the first token that is not padding
    keys: Tensor | None  # [R or 1, 1, T or 1, T] bool, True at keys that a query may read; None means all keys
    first: Tensor | None  # [R, T] bool, True at each row's first token that is not padding; None means column 0
    real: Tensor | None  # [R, T] bool, the attention mask as given
    causal: Tensor | None = None  # [R] bool, True for parts of rows whose tokens read no later token of the part


def read_padding(
    tokens: Tensor,
    attention_mask: Tensor | None,
    block: int | None = None,
    start: Tensor | None = None,
    masked: Tensor | None = None,
) -> Padding:
    """Return the `Padding` of a batch of tokens [R, T], read from attention_mask [R, T].

    Rows are padded on the left. With `start` [R], they are parts of longer rows that start there, padded on the right.
    With `block`, a query of a whole row reads only its own block of `block` positions and earlier blocks. With `masked`
    [R, T], True at masks, a query in a block (or part) without masks reads no later token of it.
    """
    real = None
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape:
            shapes = f"{tuple(attention_mask.shape)}, but tokens have {tuple(tokens.shape)}"
            raise D5P4Error(f"attention_mask has shape {shapes}: give one entry per token")
        real = attention_mask.to(device=tokens.device, dtype=torch.bool)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    # On a GPU we assume that there is padding: to read the mask, the CPU would have to wait for the GPU.
    padded = real is not None and (start is not None or real.device.type != "cpu" or not bool(real.all()))
    # A row that is all padding attends to all its positions, because a softmax over no position would be NaN.
    keys = (real | ~real.any(-1, keepdim=True))[:, None, None, :] if real is not None and padded else None
    if masked is not None and real is not None:
        masked = masked & real
    if start is not None:
        causal = None if masked is None else ~masked.any(-1)
        if causal is not None:
            earlier = (~causal[:, None, None] | (columns <= columns[:, None]))[:, None]
            keys = earlier if keys is None else earlier & keys
        return Padding(start[:, None] + columns, keys, None, real, causal)
    positions, first = columns[None], None
    if real is not None and padded:
        count = real.long().cumsum(-1)
        positions, first = (count - 1).clamp_min(0), real & (count == 1)
    if block is not None and (block < tokens.shape[1] or masked is not None):
        number = positions // block
        earlier = number[:, None, :] <= number[:, :, None]
        if masked is not None:
            inside = number[:, None, :] == number[:, :, None]
            draft = (inside & masked[:, None]).any(-1, keepdim=True)  # [R, T, 1] whether the query's block has a mask
            earlier = earlier & (~inside | draft | (columns <= columns[:, None]))
        keys = earlier[:, None] if keys is None else earlier[:, None] & keys
    return Padding(positions, keys, first, real)


def rotary(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [R or 1, 1, T, d], in float32 or wider, of positions [R or 1, T] for heads of width
    d. They rotate each pair of elements i and i + d/2."""
    dtype = working_dtype(dtype)
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    angles = positions[:, None, :, None].to(dtype) * (1.0 / base**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None) -> Tensor:
    """Return [R, T, H * d], the attention of query [R, T, H, d] over key and value [R, T, K, d].

    K (key heads) divides H (query heads). A tensor's heads lie side by side in memory, so transposing copies nothing.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    copies = query.shape[1] // key.shape[1]
    shared = copies > 1 and keys is None and _flash_shares_heads(query, key, value)
    if copies > 1 and not shared:
        # Without flash attention, enable_gqa would make torch choose the kernel that stores all T x T weights.
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=keys, enable_gqa=shared)
    return mixed.transpose(1, 2).flatten(2)


def _flash_shares_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether flash attention can run when key and value [R, K, T, d] have fewer heads than query [R, H, T, d]."""
    if not query.is_cuda or torch.compiler.is_compiling():
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(params)


class Reading(NamedTuple):
    """What the tokens of a forward may read, in all layers."""

    padding: Padding
    angles: tuple[Tensor, Tensor] | None  # see `rotary`; None: positions are part of the embedding
    context: Context
    head_width: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, norms: Sequence[RMSNorm | None] = (None, None)
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Normalise the heads of query [R, T, H * d] and key [R, T, K * d] if there are norms, and rotate them if there
        are angles. Return the attention [R, T, H * d], and key and value [R, T, K, d]."""
        if self.angles is None:
            query, key = (x.unflatten(-1, (-1, self.head_width)) for x in (query, key))
        else:
            weights = [(None, 0.0) if norm is None else (norm.weight, norm.eps) for norm in norms]
            query, key = (
                norm_rotate(x, weight, eps, *self.angles, self.head_width)
                for x, (weight, eps) in zip((query, key), weights, strict=True)
            )
        value = value.unflatten(-1, (-1, self.head_width))
        if self.context.stores:
            padding = self.padding
            mixed = attend_stored(query, key, value, padding.real, self.context.stores, layer, padding.causal)
        else:
            mixed = attend(query, key, value, self.padding.keys)
        return mixed, (key, value)


def shift_right(x: Tensor, padding: Padding, context: Context) -> Tensor:
    """Move the states x [R, T, D] right by one position. The first state after the padding also stays in its place,
    unless the context has the state before it."""
    front = x[:, :1]
    if context.first is not None and context.edge is not None:
        front = torch.where((context.first == 0)[:, None, None], front, context.edge[:, None])
    shifted = torch.cat((front, x[:, :-1]), dim=1)
    return shifted if padding.first is None else torch.where(padding.first[..., None], x, shifted)


def last_state(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the state [R, D] of the last token of each row that is not padding."""
    if real is None:
        return x[:, -1]
    column = torch.arange(x.shape[1], device=x.device).where(real, 0).amax(-1)
    return x[torch.arange(len(x), device=x.device), column]
