"""Attention over a row's own tokens and over stored keys and values: see `ops.attention`.

A program computes the attention of one tile of queries: some tokens of one row, and some of the query heads that share
a key head. It reads keys and values in place, one step of positions after another (the online softmax of flash
attention). The order of its sums depends on the row's own lengths alone, and tiles and steps depend on the shape of one
row alone, so no row's bits depend on other rows. Lengths are read on the device, so a forward with this kernel can be
recorded in a CUDA graph and replayed with other lengths. It is fast for blocks of 4 to 64 tokens that read some hundred
positions: programs that read the same positions find them in the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ...types import Store

WIDEST = 128  # heads may be at most this wide: wider tiles would not fit into shared memory
MOST_STORES = 2


@triton.jit
def _fold(
    top, mass, mixed, query, keys, values, key_step, value_step, place, readable, visible, scale, WIDTH, PRECISION
):
    """Return top, mass and mixed of the queries [queries, BLOCK] after one more step over the positions `place`.

    top [queries] is the largest score so far, in units of log 2, mass [queries] the sum of the weights 2^(score - top),
    and mixed [queries, BLOCK] the sum of weight * value. Keys and values [positions, WIDTH] lie key_step and value_step
    apart in memory. What is not `readable` [positions of this step] may be NaN. Each query reads what is `visible`
    [queries or 1, positions].
    """
    i = tl.arange(0, query.shape[1])[None, :]
    inside = readable[:, None] & (i < WIDTH)
    place = place.to(tl.int64)[:, None]
    key = tl.load(keys + place * key_step + i, inside, 0.0)
    value = tl.load(values + place * value_step + i, inside, 0.0)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    score = tl.where(visible, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # as long as nothing is readable, every weight is 0
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(top - shift)
    mass = mass * fade + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision=PRECISION)
    return highest, mass, mixed


@triton.jit
def _fold_store(top, mass, mixed, query, keys, values, step, end, hole, row, scale, WIDTH, STEP, PRECISION):
    """Return top, mass and mixed after the positions 0..end-1 of a store, except the hole [R, 2] of the row, if any."""
    left, right = end, end
    if hole is not None:
        left, right = tl.load(hole + row * 2).to(tl.int32), tl.load(hole + row * 2 + 1).to(tl.int32)
    for first in range(0, end, STEP):
        place = first + tl.arange(0, STEP)
        readable = (place < end) & ((place < left) | (place >= right))
        top, mass, mixed = _fold(
            *(top, mass, mixed, query, keys, values, step, step, place, readable, readable[None, :]),
            *(scale, WIDTH, PRECISION),
        )
    return top, mass, mixed


# Triton must not specialise the number of tokens, so that one compilation serves blocks of many lengths.
@triton.jit(do_not_specialize=["tokens"])
def _attend_stored(
    query: tl.tensor,  # [R, tokens, K * COPIES, WIDTH]
    key: tl.tensor,  # [R, tokens, K, WIDTH]
    value: tl.tensor,  # [R, tokens, K, WIDTH]
    own: tl.tensor,  # [R, tokens] bool, or None
    causal: tl.tensor,  # [R] bool, or None
    out: tl.tensor,  # [R, tokens, K * COPIES, WIDTH], contiguous
    keys_0: tl.tensor,  # [slots, C, K, WIDTH], or None if there is no store; the same for the other tensors of stores
    values_0: tl.tensor,  # [slots, C, K, WIDTH]
    slot_0: tl.tensor,  # [R]
    length_0: tl.tensor,  # [R]
    hole_0: tl.tensor,  # [R, 2], or None
    keys_1: tl.tensor,
    values_1: tl.tensor,
    slot_1: tl.tensor,
    length_1: tl.tensor,
    hole_1: tl.tensor,
    query_row: int,  # the distances of rows, tokens and heads in memory
    query_step: int,
    query_head: int,
    key_row: int,
    key_step: int,
    key_head: int,
    value_row: int,
    value_step: int,
    value_head: int,
    slot_step_0: int,  # the distances of slots, positions and heads in memory
    step_0: int,
    head_step_0: int,
    slot_step_1: int,
    step_1: int,
    head_step_1: int,
    tokens: int,
    scale: float,
    KEY_HEADS: tl.constexpr,
    COPIES: tl.constexpr,  # query heads per key head
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,  # a tile has TOKENS tokens of PACKED query heads
    PACKED: tl.constexpr,
    OWN: tl.constexpr,  # tokens per step
    STEP: tl.constexpr,  # positions of a store per step
    PRECISION: tl.constexpr,
) -> None:
    packs: tl.constexpr = tl.cdiv(COPIES, PACKED)
    tiles = tl.cdiv(tokens, TOKENS)
    program = tl.program_id(0)
    tile, pack, head = program % tiles, program // tiles % packs, program // (tiles * packs) % KEY_HEADS
    row = (program // (tiles * packs * KEY_HEADS)).to(tl.int64)

    place = tl.arange(0, TOKENS * PACKED)
    token, copy = tile * TOKENS + place % TOKENS, pack * PACKED + place // TOKENS
    i = tl.arange(0, BLOCK)[None, :]
    inside = ((token < tokens) & (copy < COPIES))[:, None] & (i < WIDTH)
    token, query_place = token.to(tl.int64)[:, None], (head * COPIES + copy)[:, None]
    asked = tl.load(query + row * query_row + token * query_step + query_place * query_head + i, inside, 0.0)

    top = tl.full((TOKENS * PACKED,), float("-inf"), tl.float32)
    mass = tl.zeros((TOKENS * PACKED,), tl.float32)
    mixed = tl.zeros((TOKENS * PACKED, BLOCK), tl.float32)
    if keys_0 is not None:
        start = tl.load(slot_0 + row).to(tl.int64) * slot_step_0 + head * head_step_0
        end = tl.load(length_0 + row).to(tl.int32)
        keys, values = keys_0 + start, values_0 + start
        top, mass, mixed = _fold_store(
            top, mass, mixed, asked, keys, values, step_0, end, hole_0, row, scale, WIDTH, STEP, PRECISION
        )
    if keys_1 is not None:
        start = tl.load(slot_1 + row).to(tl.int64) * slot_step_1 + head * head_step_1
        end = tl.load(length_1 + row).to(tl.int32)
        keys, values = keys_1 + start, values_1 + start
        top, mass, mixed = _fold_store(
            top, mass, mixed, asked, keys, values, step_1, end, hole_1, row, scale, WIDTH, STEP, PRECISION
        )
    keys, values = key + row * key_row + head * key_head, value + row * value_row + head * value_head
    for first in range(0, tokens, OWN):
        other = first + tl.arange(0, OWN)
        readable = other < tokens
        if own is not None:
            readable &= tl.load(own + row * tokens + other, readable, 0) != 0
        visible = readable[None, :]
        if causal is not None:
            visible = visible & ((tl.load(causal + row) == 0) | (other[None, :] <= token))
        top, mass, mixed = _fold(
            *(top, mass, mixed, asked, keys, values, key_step, value_step, other, readable, visible),
            *(scale, WIDTH, PRECISION),
        )
    mixed = mixed / tl.where(mass == 0, 1.0, mass)[:, None]
    where = ((row * tokens + token) * (KEY_HEADS * COPIES) + query_place) * WIDTH + i
    tl.store(out + where, mixed.to(out.dtype.element_ty), inside)


def attend_stored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Tensor | None,
    stores: Sequence[Store],
    layer: int,
    causal: Tensor | None = None,
) -> Tensor:
    """Return [R, S, H * d] for the arguments of `ops.attention.attend_stored`, with at most MOST_STORES stores."""
    rows, tokens, heads, width = query.shape
    key_heads, copies = key.shape[2], heads // key.shape[2]
    out = query.new_empty(rows, tokens, heads * width)
    if not out.numel():
        return out
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    steps = [step for x in (query, key, value) for step in x.stride()[:3]]
    parts: list[Tensor | None] = []
    for store in stores:
        keys, values = store.kv[layer]
        hole = None if store.hole is None else store.hole.contiguous()
        parts += [keys, values, store.slot.contiguous(), store.length.contiguous(), hole]
        steps += keys.stride()[:3]
    absent = MOST_STORES - len(stores)
    own = None if own is None else own.contiguous()
    sizes = tile_sizes(tokens, copies, query.dtype)
    grid = (rows * key_heads * triton.cdiv(copies, sizes[1]) * triton.cdiv(tokens, sizes[0]),)
    widths = width, max(16, triton.next_power_of_2(width))
    scale = math.log2(math.e) / math.sqrt(width)
    with torch.cuda.device_of(query):
        _attend_stored[grid](
            *(query, key, value, own, causal, out, *parts, *[None] * 5 * absent),
            *(*steps, *[0] * 3 * absent, tokens, scale),
            *(key_heads, copies, *widths, *sizes, precision()),
            num_warps=8 if query.dtype == torch.float32 else 4,  # exact products of float32 need many registers
            num_stages=3,
        )
    return out


def tile_sizes(tokens: int, copies: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return TOKENS, PACKED, OWN and STEP. They depend on the shape of one row, never on the number of rows. A tile has
    at most 64 queries, the least for which Hopper's matrix units are fast."""
    most = 64 if dtype != torch.float32 else 32
    own = min(max(16, triton.next_power_of_2(tokens)), most)
    packed = min(most // min(triton.next_power_of_2(tokens), most), triton.next_power_of_2(copies))
    return max(min(triton.next_power_of_2(tokens), most), 16 // packed), packed, own, most


def precision() -> str:
    """Return how float32 numbers are multiplied: exactly, or rounded to TF32 if torch is allowed to do so, too."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
