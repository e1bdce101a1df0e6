"""Attention over a row's own tokens and over stored keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from ..types import Store


def attend_stored(
    query: Tensor, key: Tensor, value: Tensor, own: Tensor | None, stores: Sequence[Store], layer: int
) -> Tensor:
    """Return [R, S, H * d], the attention of query [R, S, H, d] over key and value [R, S, K, d] and over the stores.

    Every query of row r reads the row's own columns where own [R, S] is True (None: all columns) and the positions that
    the stores name for the row (see `d5p4.types.Store`). What it must not read may be NaN. A query that may read
    nothing gets zeros. K (key heads) divides H (query heads).
    """
    visible = [torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if own is None else own]
    keys, values = [key], [value]
    for store in stores:
        position = torch.arange(store.kv.shape[3], device=key.device)
        seen = position < store.length[:, None]
        if store.hole is not None:
            seen = seen & ((position < store.hole[:, :1]) | (position >= store.hole[:, 1:]))
        visible.append(seen)
        keys.append(store.kv[layer, 0, store.slot])
        values.append(store.kv[layer, 1, store.slot])
    seen = torch.cat(visible, dim=1)  # [R, S + C ...]
    hidden = ~seen[..., None, None]
    copies = query.shape[2] // key.shape[2]
    key, value = (
        torch.cat(parts, dim=1).masked_fill(hidden, 0).repeat_interleave(copies, dim=2).transpose(1, 2)
        for parts in (keys, values)
    )
    some = seen.any(-1, keepdim=True)
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=(seen | ~some)[:, None, None])
    return mixed.transpose(1, 2).flatten(2)
