"""Attention of a part of a row over its own tokens and over the keys and values of earlier forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import usable

if TYPE_CHECKING:
    from ..types import Store


def attend_stored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Tensor | None,
    stores: Sequence[Store],
    layer: int,
    causal: Tensor | None = None,
) -> Tensor:
    """Return [R, S, H * d], the attention of query [R, S, H, d] over its own tokens and over the stores.

    key and value are [R, S, K, d], where K divides H. Every token of row r attends to all columns s of the row with
    own[r, s] (to all columns if own [R, S] is None) and, in each store, to the positions j < length[r] of the slot
    slot[r] outside the hole (see `types.Store`). With causal[r], a token reads no own token that follows it. If a token
    may read nothing, the result is 0. What a row may not read does not change the result, even if it is NaN.
    """
    if _kernel_accepts(query, key, value, stores):
        from .kernels import attention

        return attention.attend_stored(query, key, value, own, stores, layer, causal)
    if own is None:
        own = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    parts = [(*store.kv[layer][:, store.slot], _readable(store)) for store in stores]
    key, value, readable = (torch.cat(part, dim=1) for part in zip(*parts, (key, value, own), strict=True))
    copies = query.shape[2] // key.shape[2]
    unread = ~readable[:, :, None, None]
    key, value = (x.masked_fill(unread, 0).repeat_interleave(copies, 2).transpose(1, 2) for x in (key, value))
    mask = readable[:, None]
    if causal is not None:
        place = torch.arange(own.shape[1], device=own.device)
        visible = ~causal[:, None, None] | (place <= place[:, None])
        mask = mask & F.pad(visible, (readable.shape[1] - len(place), 0), value=True)
    # A token that may read nothing attends to everything, because a softmax over no position would be NaN.
    nothing = ~mask.any(-1, keepdim=True)
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=(mask | nothing)[:, None])
    return mixed.transpose(1, 2).flatten(2).masked_fill(nothing, 0)


def _readable(store: Store) -> Tensor:
    """Return the positions [R, C] of a store that each row reads."""
    place = torch.arange(store.kv.shape[3], device=store.kv.device)
    readable = place < store.length[:, None]
    if store.hole is not None:
        readable = readable & ((place < store.hole[:, :1]) | (place >= store.hole[:, 1:]))
    return readable


def _kernel_accepts(query: Tensor, key: Tensor, value: Tensor, stores: Sequence[Store]) -> bool:
    tensors = (query, key, value, *(store.kv for store in stores))  # any of them may need a gradient
    if not all(usable(x) and x.dtype == query.dtype for x in tensors):
        return False
    from .kernels.attention import MOST_STORES, WIDEST

    return query.shape[-1] <= WIDEST and len(stores) <= MOST_STORES
