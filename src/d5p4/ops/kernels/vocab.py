"""Statistics of logits (defined in `ops.vocab`), computed in one pass over the logits.

The vocabulary is split into blocks of a few thousand ids. One program reads some rows of one block and stores, for each
row, the block's largest logit m_b, the block's mass Σ e^{x - m_b} and other wanted values (Σ (x - m_b) e^{x - m_b}, the
second largest logit, Σ x). A second launch combines the blocks of a row in float64. The masses are also the upper level
of the inverse CDF in `kernels.sample`. Sums inside a block are float32 trees (relative error about 1e-7).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = tl.constexpr(1.4426950408889634)


class Blocks(NamedTuple):
    """The statistics of each block of the vocabulary for each row. All tensors are [R, blocks] float32."""

    top: Tensor  # largest logit
    mass: Tensor  # Σ e^{(x - top) / temperature}
    moment: Tensor | None  # Σ (x - top) e^{x - top}
    second: Tensor | None  # second largest logit
    total: Tensor | None  # Σ x over ids that are not banned
    size: int  # number of ids in a block


@triton.jit
def _block_stats(
    logits, offset, top, mass, moment, second, total, rows, ids, step, sharpness, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    """logits are [rows, ids], rows are `step` apart in memory; offset is [ids] or None. The results are
    [rows, blocks]; each of the last three may be None."""
    block, blocks = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    place = block * SIZE + tl.arange(0, SIZE)
    inside = place < ids
    where = real[:, None] & inside[None, :]
    x = tl.load(logits + row.to(tl.int64)[:, None] * step + place[None, :], mask=where, other=-float("inf")).to(
        tl.float32
    )
    if offset is not None:
        shift = tl.load(offset + place, mask=inside, other=0.0)
        x += shift[None, :]
    largest = tl.max(x, 1)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    above = x - base[:, None]
    e = tl.exp2(above * (sharpness * _LOG2E))
    target = row.to(tl.int64) * blocks + block
    tl.store(top + target, largest, mask=real)
    tl.store(mass + target, tl.sum(e, 1), mask=real)
    if moment is not None:
        # The bound -1e30 replaces -inf, because 0 * -inf is NaN. Ids that far below the largest logit have no mass.
        tl.store(moment + target, tl.sum(tl.maximum(above, -1e30) * e, 1), mask=real)
    if second is not None:
        first = tl.argmax(x, 1)
        rest = tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], -float("inf"), x)
        tl.store(second + target, tl.max(rest, 1), mask=real)
    if total is not None:
        counted = where
        if offset is not None:
            counted = where & (shift > -float("inf"))[None, :]
        tl.store(total + target, tl.sum(tl.where(counted, x, 0.0), 1), mask=real)


@triton.jit
def _join_blocks(
    top, mass, moment, second, total, lse, entropy, best, margin, certainty, drawable, blocks, SIZE: tl.constexpr
):
    """The first five arguments are [R, blocks], the next five are [R]. Statistics that are not wanted are None."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    inside = block < blocks
    tops = tl.load(top + row * blocks + block, mask=inside, other=-float("inf")).to(tl.float64)
    masses = tl.load(mass + row * blocks + block, mask=inside, other=0.0).to(tl.float64)
    largest = tl.max(tops, 0)
    apart = tl.maximum(tops - largest, -1e30)
    weight = tl.exp(apart)
    heap = tl.sum(masses * weight, 0)
    log_heap = tl.log(heap)
    tl.store(lse + row, (largest + log_heap).to(tl.float32))
    if entropy is not None:
        moments = tl.load(moment + row * blocks + block, mask=inside, other=0.0).to(tl.float64)
        mean = tl.sum(weight * (moments + apart * masses), 0) / heap
        h = log_heap - mean
        tl.store(entropy + row, tl.where(h < 0, 0.0, h).to(tl.float32))
    if best is not None:
        tl.store(best + row, (-log_heap).to(tl.float32))
    if margin is not None:
        seconds = tl.load(second + row * blocks + block, mask=inside, other=-float("inf")).to(tl.float64)
        winner = tl.argmax(tops, 0)
        runner_up = tl.max(tl.where(block == winner, seconds, tops), 0)
        tl.store(margin + row, ((1.0 - tl.exp(runner_up - largest)) / heap).to(tl.float32))
    if certainty is not None:
        totals = tl.load(total + row * blocks + block, mask=inside, other=0.0).to(tl.float64)
        number = tl.load(drawable).to(tl.float64)
        tl.store(certainty + row, (largest + log_heap - tl.sum(totals, 0) / number).to(tl.float32))


def sharpness(temperature: float) -> float:
    """Return 1 / temperature, limited to 1e-30 .. 1e30, because minus infinity times 0 would be NaN."""
    return min(max(1.0 / max(temperature, 1e-30), 1e-30), 1e30)


def block_stats(logits: Tensor, offset: Tensor | None, want: Collection[str] = (), temperature: float = 1.0) -> Blocks:
    """Return `Blocks` of logits [R, V] + offset [V] (minus infinity at banned ids)."""
    count, vocabulary = logits.shape
    size = min(4096 if logits.element_size() == 2 else 2048, triton.next_power_of_2(vocabulary))
    blocks = triton.cdiv(vocabulary, size)
    top, mass = torch.empty(2, count, blocks, dtype=torch.float32, device=logits.device)
    moment, second, total = (
        torch.empty_like(top) if name in want else None for name in ("entropy", "margin", "certainty")
    )
    group = 2 if count * blocks >= 4096 else 1
    if count:
        with torch.cuda.device_of(top):
            sizes = count, vocabulary, logits.stride(0), sharpness(temperature), group, size
            results = top, mass, moment, second, total
            _block_stats[triton.cdiv(count, group), blocks](logits, offset, *results, *sizes, num_warps=4)
    return Blocks(top, mass, moment, second, total, size)


def join_blocks(blocks: Blocks, want: Collection[str], offset: Tensor | None = None) -> dict[str, Tensor]:
    """Return the wanted statistics and "logsumexp", [R] float32. "certainty" averages over ids that are not banned."""
    count, number = blocks.top.shape
    names = ("logsumexp", "entropy", "best", "margin", "certainty")
    out = {name: blocks.top.new_empty(count) for name in names if name == "logsumexp" or name in want}
    if count:
        drawable = (offset > -torch.inf).sum() if "certainty" in want and offset is not None else None
        with torch.cuda.device_of(blocks.top):
            results, room = [out.get(name) for name in names], triton.next_power_of_2(number)
            _join_blocks[count,](*blocks[:5], *results, drawable, number, room, num_warps=1)
    return out
