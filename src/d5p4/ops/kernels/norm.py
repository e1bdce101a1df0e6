"""`ops.norm` in one pass: a program holds one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import as_rows


@triton.jit
def _add_rms_norm(
    x: tl.tensor,  # [rows, D], x_step apart
    delta: tl.tensor,  # [rows, D], delta_step apart
    weight: tl.tensor,  # [D]
    total: tl.tensor,  # [rows, D]
    normal: tl.tensor,  # [rows, D]
    x_step: int,
    delta_step: int,
    eps: float,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < D
    value = tl.load(x + row * x_step + i, inside, 0.0)
    if ADD:
        more = tl.load(delta + row * delta_step + i, inside, 0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * D + i, value, inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    rounded = wide.to(value.dtype).to(tl.float32)
    scaled = rounded * tl.load(weight + i, inside, 0.0).to(tl.float32)
    tl.store(normal + row * D + i, scaled.to(normal.dtype.element_ty), inside)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [..., D] and weight [D] to x + delta and its norm, both [..., D]. No delta: x itself and its norm."""
    width = x.shape[-1]
    rows, more = as_rows(x), as_rows(x if delta is None else delta)
    total = x if delta is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, delta.dtype))
    normal = x.new_empty(x.shape, dtype=torch.promote_types(total.dtype, weight.dtype))
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _add_rms_norm[(rows.shape[0],)](
            rows,
            more,
            weight.contiguous(),
            total,
            normal,
            rows.stride(0),
            more.stride(0),
            eps,
            D=width,
            BLOCK=block,
            ADD=delta is not None,
            num_warps=min(max(block // 512, 1), 8),
        )
    return total, normal
