"""Helpers that several methods share: groups of a pool and weighted draws."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import D5P4Error


def by_group(values: Tensor, k: int) -> Tensor:
    """Reshape values [P, N] to [P, k, w]. A group is the w = N / k adjacent children of one parent."""
    prompts, size = values.shape
    if k < 1 or size % k:
        raise D5P4Error(f"a pool of {size} rows does not split into k = {k} groups of equal size; k must divide {size}")
    return values.reshape(prompts, k, size // k)


def to_parents(places: Tensor, width: int) -> Tensor:
    """Turn indices [P, k], each counted inside its group of `width` rows, into indices [P, k] into the pool."""
    return places + torch.arange(places.shape[-1], device=places.device) * width


def draw_index(weights: Tensor, u: Tensor) -> Tensor:
    """Draw indices [P, m] with chances proportional to weights [P, N] >= 0. Uniform numbers u [P, m] decide the draws.

    An index of weight zero is never drawn if another index has a positive weight.
    """
    heap = weights.cumsum(-1)
    return torch.searchsorted(heap, u * heap[:, -1:]).clamp_max(weights.shape[-1] - 1)
