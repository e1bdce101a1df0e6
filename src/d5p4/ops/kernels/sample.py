"""Inverse-CDF draws in two levels: the blocks' masses select a block, and the logits of this block select a token.

Each program draws one token for one row and reads one block of the row's logits, so that C draws from a row read C
blocks and not C rows. Both cumulative sums run in float64. The border between two tokens is off by no more than the
rounding of the masses, about 1e-7 of the row's mass, less than the last bit of a float32 logit of size 10.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .vocab import _LOG2E, Blocks, sharpness


@triton.jit
def _draw(logits, offset, top, mass, u, token, ids, stride, blocks, sharpness, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Draw tokens [R, C] for uniforms u [R, C]. A row has `ids` logits in `blocks` <= COUNT blocks of SIZE logits."""
    row, child = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place_of_draw = row * tl.num_programs(1) + child
    block = tl.arange(0, COUNT)
    inside = block < blocks
    tops = tl.load(top + row * blocks + block, mask=inside, other=-float("inf")).to(tl.float64)
    masses = tl.load(mass + row * blocks + block, mask=inside, other=0.0).to(tl.float64)
    largest = tl.max(tops, 0)
    scaled = masses * tl.exp(tl.maximum(tops - largest, -1e30) * sharpness)
    heap = tl.cumsum(scaled, 0)
    goal = tl.maximum(tl.load(u + place_of_draw) * tl.sum(scaled, 0), 1e-300)  # > 0: skip blocks without mass
    short = heap < goal
    last_block = tl.max(tl.where(scaled > 0, block, 0), 0)
    chosen = tl.minimum(tl.sum(short.to(tl.int32), 0), last_block)
    before = tl.sum(tl.where(block < chosen, scaled, 0.0), 0)

    place = chosen * SIZE + tl.arange(0, SIZE)
    here = place < ids
    x = tl.load(logits + row * stride + place, mask=here, other=-float("inf")).to(tl.float32)
    if offset is not None:
        x += tl.load(offset + place, mask=here, other=0.0)
    e = tl.exp2((x - largest.to(tl.float32)) * (sharpness * _LOG2E)).to(tl.float64)
    climb = tl.cumsum(e, 0) + before
    last = tl.max(tl.where(e > 0, tl.arange(0, SIZE), 0), 0)
    inner = tl.minimum(tl.sum((climb < goal).to(tl.int32), 0), last)
    tl.store(token + place_of_draw, (chosen * SIZE + inner).to(tl.int64))


def draw_tokens(logits: Tensor, offset: Tensor | None, blocks: Blocks, u: Tensor, temperature: float = 1.0) -> Tensor:
    """Return tokens [R, C] for float64 uniforms u [R, C]. `blocks` must come from `block_stats` at this temperature."""
    token = torch.empty(u.shape, dtype=torch.int64, device=logits.device)
    number = blocks.top.shape[1]
    sizes = logits.shape[1], logits.stride(0), number, sharpness(temperature)
    room = triton.next_power_of_2(number), blocks.size
    if token.numel():
        with torch.cuda.device_of(token):
            given = logits, offset, blocks.top, blocks.mass, u.contiguous()
            _draw[tuple(u.shape)](*given, token, *sizes, *room, num_warps=4)
    return token
