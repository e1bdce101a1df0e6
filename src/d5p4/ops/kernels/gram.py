"""Cosine similarity of pools, computed directly from the hidden rows: see `ops.gram`.

A program computes one tile of a pool's Gram matrix over one piece of the features (the positions x width axis), on the
GPU's matrix units, in float32. A second launch adds the pieces in float64 and divides by the norms of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512  # about this many programs work on one pool, if the pool is large enough
_PIECES = 128  # a pool has at most this many pieces, because the second launch adds them up


@triton.jit
def _products(features, slot, pieces, size, length, stride, steps, count, TILE: tl.constexpr, STEP: tl.constexpr):
    pool, tile, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(size, TILE)
    up, across = tile // tiles, tile % tiles
    if up <= across:
        left = up * TILE + tl.arange(0, TILE)
        right = across * TILE + tl.arange(0, TILE)
        left_in, right_in = left < size, right < size
        left_row = features + tl.load(slot + pool * size + left, mask=left_in, other=0)[:, None] * stride
        right_row = features + tl.load(slot + pool * size + right, mask=right_in, other=0)[:, None] * stride
        total = tl.zeros((TILE, TILE), tl.float32)
        start = piece * steps * STEP
        for step in range(steps):
            place = start + step * STEP + tl.arange(0, STEP)
            inside = place < length
            a = tl.load(left_row + place[None, :], mask=left_in[:, None] & inside[None, :], other=0.0)
            b = tl.load(right_row + place[None, :], mask=right_in[:, None] & inside[None, :], other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")  # "ieee": no rounding to TF32
        target = pieces + ((pool * count + piece) * size + left[:, None]) * size + right[None, :]
        tl.store(target, total, mask=left_in[:, None] & right_in[None, :])


@triton.jit
def _cosine(pieces, first, out, size, count, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    pool, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = j < size
    mine = tl.load(first + pool * size + i)
    theirs = tl.load(first + pool * size + j, mask=inside, other=0)
    low, high = tl.minimum(mine, theirs), tl.maximum(mine, theirs)
    base = pieces + pool * count * size * size
    dot, square = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    own = tl.zeros((DEEP,), tl.float64)
    for start in range(0, count, DEEP):
        piece = start + tl.arange(0, DEEP)
        real = piece < count
        part = base + piece.to(tl.int64)[:, None] * size * size
        where = real[:, None] & inside[None, :]
        dot += tl.sum(tl.load(part + (low * size + high)[None, :], mask=where, other=0.0).to(tl.float64), 0)
        square += tl.sum(tl.load(part + (theirs * (size + 1))[None, :], mask=where, other=0.0).to(tl.float64), 0)
        own += tl.load(base + piece.to(tl.int64) * size * size + mine * (size + 1), mask=real, other=0.0).to(tl.float64)
    mine_square = tl.sum(own, 0)
    norm = tl.sqrt(tl.maximum(mine_square, 0.0)) * tl.sqrt(tl.maximum(square, 0.0))
    cosine = dot / tl.where(norm == 0, 1.0, norm)
    cosine = tl.where(cosine > 1, 1.0, tl.where(cosine < -1, -1.0, cosine))  # NaN stays
    cosine = tl.where((theirs == mine) | (square + mine_square == 0), 1.0, cosine)
    tl.store(out + (pool * size + i) * size + j, cosine.to(tl.float32), mask=inside)


def pool_gram(features: Tensor, slot: Tensor, first: Tensor) -> Tensor:
    """Return S [P, N, N] float32 for the arguments of `ops.gram.pool_gram`. first is `first_equal(slot)`.

    The length of a piece of the positions x width axis depends on the shape of one pool alone.
    """
    pools, size = slot.shape
    out = torch.empty(pools, size, size, dtype=torch.float32, device=features.device)
    if not out.numel():
        return out
    if features.stride(2) != 1 or features.stride(1) != features.shape[2]:
        features = features.contiguous()
    length, step = features.shape[1] * features.shape[2], 64 if features.dtype == torch.float32 else 128
    tile = 16 if size <= 16 else 32 if size <= 32 else 64
    tiles, most = triton.cdiv(size, tile) ** 2, triton.cdiv(length, step)
    steps = triton.cdiv(most, min(most, _PIECES, max(1, _PROGRAMS // tiles)))
    count = triton.cdiv(length, step * steps)
    # [P, pieces, N, N]: if a matrix has several tiles, tiles below the diagonal stay unset.
    pieces = torch.empty(pools, count, size, size, dtype=torch.float32, device=features.device)
    block = min(64, triton.next_power_of_2(size))
    with torch.cuda.device_of(out):
        sizes = size, length, features.stride(0), steps, count
        _products[pools, tiles, count](features, slot, pieces, *sizes, tile, step, num_warps=4)
        grid = pools, size, triton.cdiv(size, block)
        _cosine[grid](pieces, first, out, size, count, block, 32, num_warps=4)
    return out
