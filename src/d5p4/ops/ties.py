"""Deciding between equals without looking at their order.

Floating sums differ in their last bits with the batch they were computed in. Values within TOLERANCE are therefore
equal, and the row's lineage hash decides; permuting a pool permutes what is chosen and changes nothing. Meant for
float64 (float32 values of size 1 are further apart than TOLERANCE: there only exact equals are equal).
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-9
_LARGEST = torch.iinfo(torch.int64).max


def argbest(values: Tensor, tie: Tensor, dim: int = -1) -> Tensor:
    """Index of the largest value along `dim`; among those within TOLERANCE of it, the smallest tie hash.

    NaN counts as minus infinity; if every value is minus infinity the smallest tie hash wins.
    """
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = values.amax(dim, keepdim=True)
    close = (values >= best - TOLERANCE) | (values == best)
    tie = tie.expand_as(values)
    tie = torch.where(close, tie, _LARGEST)
    return (close & (tie == tie.amin(dim, keepdim=True))).to(torch.uint8).argmax(dim)


def ranked(values: Tensor, *ties: Tensor) -> Tensor:
    """Indices that sort values [..., N] from the largest down; equals by the first tie, then the next, upwards."""
    order = torch.arange(values.shape[-1], device=values.device).expand(values.shape)
    for tie in reversed(ties):
        order = order.gather(-1, tie.gather(-1, order).argsort(dim=-1, stable=True))
    keys = coarse(values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    return order.gather(-1, keys.gather(-1, order).argsort(dim=-1, descending=True, stable=True))


def coarse(values: Tensor) -> Tensor:
    """Values on a grid of TOLERANCE, so that a stable sort sees ties as ties (but for pairs astride a grid border)."""
    return (values / TOLERANCE).round() * TOLERANCE
