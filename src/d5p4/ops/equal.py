"""Which rows of a pool are equal."""

from __future__ import annotations

import torch
from torch import Tensor


def first_equal(names: Tensor) -> Tensor:
    """[P, N] index of the first row with the same name (a hash, a slot) as each row of names [P, N]."""
    return (names[:, :, None] == names[:, None, :]).to(torch.uint8).argmax(-1)


def occurrence(row_hash: Tensor, tie: Tensor) -> Tensor:
    """[P, N] the number of each row among those with its hash, counted in the order of their ties."""
    equal = row_hash[:, :, None] == row_hash[:, None, :]
    earlier = (tie[:, None, :] < tie[:, :, None]) | (tie[:, None, :] == tie[:, :, None]).tril(-1)
    return (equal & earlier).sum(-1)
