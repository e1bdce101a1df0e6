"""The operations of `ops.body`, each as one Triton kernel. A program is one of the parallel instances of a kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 2048  # one program of `_norm_rotate` handles this many pairs of numbers (sizes rounded up to powers of two)
PIECE = 2048  # one program of `_silu_gate` handles at most this many columns; a power of two


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., D] as [rows, D] with columns adjacent in memory, as a view if possible. The distance between rows
    then depends on the model alone, so Triton can specialise the kernels for it (wide loads need that) only once."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit
def _add_rms_norm(
    x, delta, weight, total, normal, x_step, delta_step, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """weight is [D], other tensors are [rows, D]. In memory, rows of x are x_step apart, rows of delta delta_step."""
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
    """Return x' = x + delta and the normalised x', both [..., D] (see `ops.body`). Without delta, x' is x itself."""
    width = x.shape[-1]
    rows, more = as_rows(x), as_rows(x if delta is None else delta)
    total = x if delta is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, delta.dtype))
    normal = x.new_empty(x.shape, dtype=torch.promote_types(total.dtype, weight.dtype))
    block = triton.next_power_of_2(width)
    steps = rows.stride(0), more.stride(0)
    add, warps = delta is not None, min(max(block // 512, 1), 8)
    with torch.cuda.device_of(x):
        _add_rms_norm[(rows.shape[0],)](
            rows, more, weight.contiguous(), total, normal, *steps, eps, width, block, add, num_warps=warps
        )
    return total, normal


@triton.jit
def _scale(part, weight, inside, factor, dtype: tl.constexpr):
    """Return part * factor * weight for a part of each head. The first product is rounded to dtype. The second product
    is rounded, too, if the weight has the same dtype; otherwise the product is a float32 in plain torch, too."""
    scaled = (part * factor).to(dtype).to(tl.float32) * tl.load(weight, inside, 0.0).to(tl.float32)
    return scaled.to(dtype).to(tl.float32) if weight.dtype.element_ty == dtype else scaled


# Triton must not specialise the numbers of rows and tokens, so that one compilation serves every batch.
@triton.jit(do_not_specialize=["tokens", "length", "angle_rows"])
def _norm_rotate(
    x: tl.tensor,  # [tokens, HEADS * WIDTH], rows are `step` apart in memory
    weight: tl.tensor,  # [WIDTH], or None if there is no norm
    cos: tl.tensor,  # [angle_rows, length, 2 * HALF]
    sin: tl.tensor,  # [angle_rows, length, 2 * HALF]
    out: tl.tensor,  # [tokens, HEADS, WIDTH]
    step: int,
    tokens: int,
    length: int,
    angle_rows: int,
    eps: float,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,  # 0 if every number is rotated
) -> None:
    token = (tl.program_id(0) * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK))[:, None, None]
    head = tl.arange(0, HEADS_BLOCK)[None, :, None]
    i = tl.arange(0, HALF_BLOCK)[None, None, :]
    known = (token < tokens) & (i < HALF)
    inside = known & (head < HEADS)
    position = token // length % angle_rows * length + token % length
    position, token = position.to(tl.int64), token.to(tl.int64)
    source, target = x + token * step + head * WIDTH, out + (token * HEADS + head) * WIDTH
    left = tl.load(source + i, inside, 0.0).to(tl.float32)
    right = tl.load(source + HALF + i, inside, 0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if REST_BLOCK > 0:
        j = 2 * HALF + tl.arange(0, REST_BLOCK)[None, None, :]
        rest_inside = (token < tokens) & (head < HEADS) & (j < WIDTH)
        rest = tl.load(source + j, rest_inside, 0.0).to(tl.float32)
    if weight is not None:
        total = tl.sum(left * left + right * right, 2, keep_dims=True)
        if REST_BLOCK > 0:
            total += tl.sum(rest * rest, 2, keep_dims=True)
        factor = tl.rsqrt(total / WIDTH + eps)
        left = _scale(left, weight + i, i < HALF, factor, dtype)
        right = _scale(right, weight + HALF + i, i < HALF, factor, dtype)
        if REST_BLOCK > 0:
            rest = _scale(rest, weight + j, j < WIDTH, factor, dtype)
    if REST_BLOCK > 0:
        tl.store(target + j, rest.to(out.dtype.element_ty), rest_inside)
    c = tl.load(cos + position * (2 * HALF) + i, known, 0.0).to(tl.float32)
    s = tl.load(sin + position * (2 * HALF) + i, known, 0.0).to(tl.float32)
    tl.store(target + i, (left * c - right * s).to(out.dtype.element_ty), inside)
    tl.store(target + HALF + i, (right * c + left * s).to(out.dtype.element_ty), inside)


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """Normalise and rotate the heads of x [R, T, H * width], and return them as [R, T, H, width] (see `ops.body`)."""
    length, turned = cos.shape[-2:]
    heads, half, rest = x.shape[-1] // width, turned // 2, width - turned
    rows = as_rows(x)
    out = x.new_empty(*x.shape[:-1], heads, width)
    heads_block, half_block = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    rest_block = triton.next_power_of_2(rest) if rest else 0
    tokens_block = max(1, PAIRS // (heads_block * max(half_block, rest_block // 2)))
    counts = rows.stride(0), rows.shape[0], length, cos.shape[0]
    blocks = tokens_block, heads_block, half_block, rest_block
    options = {"num_warps": 4, "enable_fp_fusion": False}  # without fusion, products are rounded as in plain torch
    weight = None if weight is None else weight.contiguous()
    angles = cos.contiguous(), sin.contiguous()
    with torch.cuda.device_of(x):
        _norm_rotate[(triton.cdiv(rows.shape[0], tokens_block),)](
            rows, weight, *angles, out, *counts, eps, heads, width, half, *blocks, **options
        )
    return out


# A program handles a piece of one row. Triton could not use wide loads if a mask depended on the number of rows.
@triton.jit
def _silu_gate(a, b, out, a_step, b_step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """a, b and out are [rows, WIDTH]. In memory, rows of a are a_step apart, and rows of b are b_step apart."""
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
    width = a.shape[-1]
    left, right = as_rows(a), as_rows(b)
    out = a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype))
    block = min(triton.next_power_of_2(width), PIECE)
    grid, warps = (left.shape[0] * triton.cdiv(width, block),), min(max(block // 256, 1), 8)
    with torch.cuda.device_of(a):
        _silu_gate[grid](left, right, out, left.stride(0), right.stride(0), width, block, num_warps=warps)
    return out
