"""Decisions between equal values, rows or texts. A decision does not depend on the order of the input.

The last bits of a floating-point sum depend on the batch in which the sum was computed. Values within TOLERANCE of each
other therefore count as equal (in float32, only identical values of size 1 do), and the tie of a row, a hash of the
row's lineage, decides between equal values. So the same rows are chosen when the rows of a pool are reordered.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-9
_LARGEST = torch.iinfo(torch.int64).max


def argbest(values: Tensor, tie: Tensor, dim: int = -1) -> Tensor:
    """Return the index of the largest value along `dim`. NaN counts as minus infinity.

    Among values within TOLERANCE of the largest value, the smallest tie wins, also if every value is minus infinity.
    """
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = values.amax(dim, keepdim=True)
    close = (values >= best - TOLERANCE) | (values == best)
    tie = tie.expand_as(values)
    tie = torch.where(close, tie, _LARGEST)
    return (close & (tie == tie.amin(dim, keepdim=True))).to(torch.uint8).argmax(dim)


def ranked(values: Tensor, *ties: Tensor) -> Tensor:
    """Return the indices that sort values [..., N], largest first. Of equal values, the smallest tie comes first."""
    order = torch.arange(values.shape[-1], device=values.device).expand(values.shape)
    for tie in reversed(ties):
        order = order.gather(-1, tie.gather(-1, order).argsort(dim=-1, stable=True))
    keys = coarse(values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    return order.gather(-1, keys.gather(-1, order).argsort(dim=-1, descending=True, stable=True))


def coarse(values: Tensor) -> Tensor:
    """Return values rounded to multiples of TOLERANCE, so that a stable sort sees almost all close values as equal."""
    return (values / TOLERANCE).round() * TOLERANCE


def canonical_order(tie: Tensor, groups: int = 1) -> Tensor:
    """Return the item [P, N] at each place of the canonical order, for ties [P, N] in contiguous groups of equal size.

    Sums, eigenvectors and inverse-CDF draws depend on the order of their terms; in canonical order, they depend only on
    which items and groups are in the pool. Groups are sorted by their smallest tie, and items of a group by their ties.
    """
    prompts, size = tie.shape
    width = size // groups
    split = tie.view(prompts, groups, width)
    within = split.argsort(dim=-1, stable=True)
    between = split.amin(-1).argsort(dim=-1, stable=True)
    within = within.gather(1, between.unsqueeze(-1).expand_as(within))
    return (between.unsqueeze(-1) * width + within).view(prompts, size)


def first_equal(names: Tensor) -> Tensor:
    """Return, for each row, the index [P, N] of the first row with the same name. A name is a hash or a slot."""
    return (names[:, :, None] == names[:, None, :]).to(torch.uint8).argmax(-1)


def repeats(names: Tensor, order: Tensor) -> Tensor:
    """Return which rows [P, N] have the same name as a row that comes before them in order [P, N]."""
    ordered = names.gather(1, order)
    place = ordered.argsort(dim=-1, stable=True)
    alike = ordered.gather(1, place)
    repeat = torch.nn.functional.pad(alike[:, 1:] == alike[:, :-1], (1, 0))
    return torch.zeros_like(repeat).scatter(1, order.gather(1, place), repeat)


def occurrence(row_hash: Tensor, tie: Tensor) -> Tensor:
    """Number the rows that have the same hash 0, 1, ... in the order of their ties. Return the numbers [P, N]."""
    equal = row_hash[:, :, None] == row_hash[:, None, :]
    earlier = (tie[:, None, :] < tie[:, :, None]) | (tie[:, None, :] == tie[:, :, None]).tril(-1)
    return (equal & earlier).sum(-1)


def first_of_each(order: Tensor, texts: Sequence[Sequence[str]]) -> Tensor:
    """Return `order` [P, N] with rows that repeat an earlier text moved to the end. texts[p][n] is row n's text."""
    moved = []
    for rows, row_texts in zip(order.tolist(), texts, strict=True):
        ordered = [row_texts[row] for row in rows]
        repeats = [text in ordered[:i] for i, text in enumerate(ordered)]
        moved.append(sorted(range(len(rows)), key=repeats.__getitem__))
    return order.gather(1, torch.tensor(moved, device=order.device))
