"""Texts that came before give way to those that did not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def first_of_each(order: Tensor, texts: Sequence[Sequence[str]]) -> Tensor:
    """order [P, N] of rows, those whose text came before moved behind the others; texts [P][N] by row."""
    moved = []
    for rows, said in zip(order.tolist(), texts, strict=True):
        seen: set[str] = set()
        again = []
        for row in rows:
            again.append(said[row] in seen)
            seen.add(said[row])
        moved.append(sorted(range(len(rows)), key=again.__getitem__))
    return order.gather(1, torch.tensor(moved, device=order.device))

