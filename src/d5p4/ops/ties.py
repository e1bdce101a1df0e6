"""Equal values, equal rows and equal texts: decided without looking at their order.

Floating sums differ in their last bits with the batch they were computed in. Values within TOLERANCE are therefore
equal, and the row's lineage hash decides; permuting a pool permutes what is chosen and changes nothing. Meant for
float64 (float32 values of size 1 are further apart than TOLERANCE: there only exact equals are equal).
"""

from __future__ import annotations

from collections.abc import Sequence

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


def canonical_order(tie: Tensor, groups: int = 1) -> Tensor:
    """order [P, N]: the item at each canonical place, for ties [P, N] in `groups` contiguous groups of equal size.

    Floating sums, eigenvectors and inverse-CDF draws see the order of their terms. In this order they are functions of
    the pool as a set of groups: groups come by their smallest tie, items inside a group by their tie.
    """
    prompts, size = tie.shape
    width = size // groups
    split = tie.view(prompts, groups, width)
    within = split.argsort(dim=-1, stable=True)
    between = split.amin(-1).argsort(dim=-1, stable=True)
    within = within.gather(1, between.unsqueeze(-1).expand_as(within))
    return (between.unsqueeze(-1) * width + within).view(prompts, size)


def first_equal(names: Tensor) -> Tensor:
    """[P, N] index of the first row with the same name (a hash, a slot) as each row of names [P, N]."""
    return (names[:, :, None] == names[:, None, :]).to(torch.uint8).argmax(-1)


def occurrence(row_hash: Tensor, tie: Tensor) -> Tensor:
    """[P, N] the number of each row among those with its hash, counted in the order of their ties."""
    equal = row_hash[:, :, None] == row_hash[:, None, :]
    earlier = (tie[:, None, :] < tie[:, :, None]) | (tie[:, None, :] == tie[:, :, None]).tril(-1)
    return (equal & earlier).sum(-1)


def first_of_each(order: Tensor, texts: Sequence[Sequence[str]]) -> Tensor:
    """order [P, N] of rows with repeated texts moved behind the others; texts [P][N] by row."""
    moved = []
    for rows, row_texts in zip(order.tolist(), texts, strict=True):
        ordered = [row_texts[row] for row in rows]
        repeats = [text in ordered[:i] for i, text in enumerate(ordered)]
        moved.append(sorted(range(len(rows)), key=repeats.__getitem__))
    return order.gather(1, torch.tensor(moved, device=order.device))
