"""Keyed draws in an order that the pool's arrangement does not change."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_index(weights: Tensor, u: Tensor) -> Tensor:
    """Indices [P, m] drawn with chance proportional to weights [P, N] >= 0, one for each uniform in u [P, m].

    An index of weight zero is never drawn while another has weight.
    """
    heap = weights.cumsum(-1)
    return torch.searchsorted(heap, u * heap[:, -1:]).clamp_max(weights.shape[-1] - 1)
