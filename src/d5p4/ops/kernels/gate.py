"""`ops.gate` in one pass: a program holds a piece of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import as_rows

PIECE = 2048  # columns of a program, a power of two


# Pieces of rows, not of everything at once: a bound that varies with the rows would keep loads from being wide.
@triton.jit
def _silu_gate(
    a: tl.tensor,  # [rows, WIDTH], a_step apart
    b: tl.tensor,  # [rows, WIDTH], b_step apart
    out: tl.tensor,  # [rows, WIDTH]
    a_step: int,
    b_step: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pieces: tl.constexpr = tl.cdiv(WIDTH, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    i = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(a + row * a_step + i, inside, 0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    value = silu * tl.load(b + row * b_step + i, inside, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), inside)


def silu_gate(a: Tensor, b: Tensor) -> Tensor:
    """a and b [..., I] to silu(a) * b [..., I]."""
    width = a.shape[-1]
    left, right = as_rows(a), as_rows(b)
    out = a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype))
    block = min(triton.next_power_of_2(width), PIECE)
    with torch.cuda.device_of(a):
        _silu_gate[(left.shape[0] * triton.cdiv(width, block),)](
            left,
            right,
            out,
            left.stride(0),
            right.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 8),
        )
    return out
