"""Maximal marginal relevance (`ops.mmr`) of P pools in one launch. A program runs one start (from one first pick)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .partition_map import STARTS, _better, tickets


@triton.jit
def _mmr(
    quality,  # [P, N]
    similarity,  # [P, N, N]
    tie,  # [P, N]
    sets,  # [P, starts, k] the k items that each start has picked
    value_out,  # [P, starts] the value of each start's set
    tie_out,  # [P, starts] the tie-breaking number of each start's first pick
    done,  # [P] the number of programs of each pool that have finished
    out,  # [P, k]
    size,
    k,
    alpha_high,
    alpha_low,
    MEAN: tl.constexpr,
    START: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    S: tl.constexpr = 1 if START == 0 else (K if START == 1 else N)  # an upper bound on the number of starts
    pool, start = tl.program_id(0).to(tl.int64), tl.program_id(1)
    starts, width = tl.num_programs(1), size // k
    program = pool * starts + start
    item = tl.arange(0, N)
    live = item < size
    group = item // width
    worth = tl.load(quality + pool * size + item, mask=live, other=0.0).to(tl.float64)
    order = tl.load(tie + pool * size + item, mask=live, other=0)
    alpha = tl.full((), 0.0, tl.float64) + alpha_high + alpha_low  # two float32 arguments keep 48 bits of alpha
    free = live
    near = tl.zeros((N,), tl.float64)
    slot = tl.arange(0, K)
    picks = tl.zeros((K,), tl.int32)
    total = tl.zeros((), tl.float64)
    first = 0
    for t in range(k):
        count = tl.where(t > 0, t, 1).to(tl.float64)
        if MEAN:
            value = worth - alpha * near / count
        else:
            value = worth - alpha * near
        allowed = free
        if START == 1:
            allowed = free & ((t > 0) | (group == start))
        if START == 2:
            allowed = free & ((t > 0) | (item == start))
        best, _, pick = tl.reduce((tl.where(allowed, value, -float("inf")), order, item), 0, _better)
        total += best
        picks = tl.where(slot == t, pick, picks)
        first = tl.where(t == 0, pick, first)
        row = tl.load(similarity + (pool * size + pick) * size + item, mask=live, other=0.0).to(tl.float64)
        row = tl.where(tl.abs(row) < 1e30, row, 0.0)  # a similarity that is not finite counts as 0
        if MEAN:
            near += row
        else:
            near = tl.where(t == 0, row, tl.maximum(near, row))
        free = free & (group != pick // width)
    tl.store(sets + program * k + slot, picks, mask=slot < k)
    tl.store(value_out + program, total)
    tl.store(tie_out + program, tl.load(tie + pool * size + first))
    tl.debug_barrier()
    if tl.atomic_add(done + pool, 1, sem="acq_rel") == starts - 1:
        tl.store(done + pool, 0)
        number = tl.arange(0, S)
        at = pool * starts + number
        totals = tl.load(value_out + at, mask=number < starts, other=-float("inf"), cache_modifier=".cg")
        close = (number < starts) & (totals >= tl.max(totals, 0) - 1e-9)
        heads = tl.load(tie_out + at, mask=number < starts, other=0, cache_modifier=".cg")
        heads = tl.where(close, heads, 9223372036854775807)
        winner = tl.min(tl.where(close & (heads == tl.min(heads, 0)), number, S - 1), 0)
        chosen = tl.load(sets + (pool * starts + winner) * k + slot, mask=slot < k, other=0, cache_modifier=".cg")
        tl.store(out + pool * k + chosen // width, chosen.to(tl.int64), mask=slot < k)


def mmr(quality: Tensor, similarity: Tensor, tie: Tensor, k: int, alpha: float, form: str, starts: str) -> Tensor:
    """Return the chosen items [P, k] int64, ascending, for finite quality [P, N] and similarity [P, N, N]."""
    pools, size = quality.shape
    count = {"one": 1, "k": k, "n": size}[starts]
    device = quality.device
    out = torch.empty(pools, k, dtype=torch.int64, device=device)
    if pools:
        sets = torch.empty(pools * count, k, dtype=torch.int32, device=device)
        value = torch.empty(pools * count, dtype=torch.float64, device=device)
        heads = torch.empty(pools * count, dtype=torch.int64, device=device)
        done = tickets(device, pools)
        block = max(16, triton.next_power_of_2(size))
        with torch.cuda.device_of(out):
            ties = tie.to(torch.int64).contiguous()
            high = torch.tensor(float(alpha), dtype=torch.float32).item()
            given = quality.contiguous(), similarity.contiguous(), ties
            alphas = high, float(alpha) - high
            kind = form == "mean", STARTS[starts], block, triton.next_power_of_2(k)
            warps = 1 if block <= 64 else 4
            _mmr[pools, count](*given, sets, value, heads, done, out, size, k, *alphas, *kind, num_warps=warps)
    return out
