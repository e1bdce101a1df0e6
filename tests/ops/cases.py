"""Inputs that the tests of the plain versions share with those of the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from d5p4.types import Store


def attention_inputs(
    rows: int,
    tokens: int,
    heads: int,
    key_heads: int,
    width: int,
    dtype: torch.dtype,
    device: str = "cpu",
    positions: tuple[int, int] = (75, 41),
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, list[Store]]:
    """Query, key and value; which columns may be read; a store that all rows share, and one with a slot per row.

    Row 0 reads all it can. Row 1 reads nothing, if there is one. What no row may read is NaN.
    """
    g = torch.Generator().manual_seed(1000 * tokens + width)
    common, apart = positions

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device, dtype)

    wide = normal(rows, tokens, (heads + 2 * key_heads) * width).unflatten(-1, (-1, width))
    query, key, value = wide.split([heads, key_heads, key_heads], dim=2)  # heads of one projection, side by side
    own = torch.rand(rows, tokens, generator=g) < 0.7
    shared = normal(2, 2, 3, common, key_heads, width)
    single = normal(2, 2, rows + 1, apart, key_heads, width)
    lengths = torch.stack([torch.randint(1, count + 1, (rows,), generator=g) for count in (common - 5, apart)])
    holes = torch.stack([lengths[1] // 3, lengths[1] // 2], -1)
    lengths[:, 0], holes[0] = torch.tensor([common - 5, apart]), torch.tensor([5, apart - 4])
    if rows > 1:
        own[1], lengths[:, 1] = False, 0
    shared[:, :, :, common - 5 :] = shared[:, :, 0] = math.nan
    single[:, :, rows - 1, 5 : apart - 4] = math.nan  # the hole of row 0
    for x in (key, value):
        x.masked_fill_(~own.to(device)[:, :, None, None], math.nan)
    slots = torch.full((rows,), 1), torch.arange(rows).flip(0)
    stores = [
        Store(shared, slots[0].to(device), lengths[0].to(device)),
        Store(single, slots[1].to(device), lengths[1].to(device), holes.to(device)),
    ]
    return (query, key, value), own.to(device), stores


def normals(count: int, *shape: int, dtype: torch.dtype, device: str = "cpu", scale: float = 1, seed: int = 0) -> list:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).mul(scale).to(device, dtype) for _ in range(count)]


def within(units: int, x: Tensor, y: Tensor) -> bool:
    """Whether x is within this many units in the last place of y."""
    bound = units * torch.finfo(x.dtype).eps * y.double().abs() + torch.finfo(x.dtype).tiny
    return bool(((x.double() - y.double()).abs() <= bound).all())
