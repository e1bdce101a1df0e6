"""Groups of a pool: k runs of w = N / k neighbours, the children of one parent each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import D5P4Error


def by_group(values: Tensor, k: int) -> Tensor:
    """values [P, N] as [P, k, w]."""
    prompts, size = values.shape
    if k < 1 or size % k:
        raise D5P4Error(f"a pool of {size} rows does not split into k = {k} groups of equal size; let k divide it")
    return values.reshape(prompts, k, size // k)


def to_parents(places: Tensor, width: int) -> Tensor:
    """Places [P, k] inside each group as indices [P, k] into the pool."""
    return places + torch.arange(places.shape[-1], device=places.device) * width
