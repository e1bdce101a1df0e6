"""`ops.rotate` in one pass: a program holds all heads of one token, or of a few where they are narrow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import as_rows

PAIRS = 2048  # of a program, in powers of two


# No count of rows or tokens is specialised: any batch runs on one compilation.
@triton.jit(do_not_specialize=["tokens", "length", "angle_rows"])
def _rotate(
    x: tl.tensor,  # [tokens, HEADS * 2 * HALF], step apart
    cos: tl.tensor,  # [angle_rows, length, 2 * HALF]
    sin: tl.tensor,  # [angle_rows, length, 2 * HALF]
    out: tl.tensor,  # [tokens, HEADS, 2 * HALF]
    step: int,
    tokens: int,
    length: int,
    angle_rows: int,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    token = (tl.program_id(0) * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK))[:, None, None]
    head = tl.arange(0, HEADS_BLOCK)[None, :, None]
    i = tl.arange(0, HALF_BLOCK)[None, None, :]
    known = (token < tokens) & (i < HALF)
    inside = known & (head < HEADS)
    position = token // length % angle_rows * length + token % length
    position, token = position.to(tl.int64), token.to(tl.int64)
    c = tl.load(cos + position * (2 * HALF) + i, known, 0.0).to(tl.float32)
    s = tl.load(sin + position * (2 * HALF) + i, known, 0.0).to(tl.float32)
    place = head * (2 * HALF) + i
    left = tl.load(x + token * step + place, inside, 0.0).to(tl.float32)
    right = tl.load(x + token * step + place + HALF, inside, 0.0).to(tl.float32)
    place = token * (HEADS * 2 * HALF) + place
    tl.store(out + place, (left * c - right * s).to(out.dtype.element_ty), inside)
    tl.store(out + place + HALF, (right * c + left * s).to(out.dtype.element_ty), inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, T, H * d] with cos, sin [R or 1, 1, T, d], whose two halves are equal, to [R, T, H, d]."""
    length, width = cos.shape[-2:]
    heads, half = x.shape[-1] // width, width // 2
    rows = as_rows(x)
    out = x.new_empty(*x.shape[:-1], heads, width)
    heads_block, half_block = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    tokens_block = max(1, PAIRS // (heads_block * half_block))
    with torch.cuda.device_of(x):
        _rotate[(triton.cdiv(rows.shape[0], tokens_block),)](
            rows,
            cos.contiguous(),
            sin.contiguous(),
            out,
            rows.stride(0),
            rows.shape[0],
            length,
            cos.shape[0],
            HEADS=heads,
            HALF=half,
            TOKENS_BLOCK=tokens_block,
            HEADS_BLOCK=heads_block,
            HALF_BLOCK=half_block,
            num_warps=4,
            enable_fp_fusion=False,  # round each product, as the plain version does
        )
    return out
