"""Greedy elimination from several starts and 1-swap local search for P problems at once: see `ops.partition_map`.

One program solves one start of one problem. `problem.best_set` compares the sets of all starts, without a wait for the
device. Problems of at most EXACT items are computed in float64, because memory and barriers limit their speed, not
arithmetic. Larger problems are computed in float32, but every program scores its greedy set and its improved set in
float64 and keeps the better one, so that no rounding error makes the result worse than the best greedy set.

Two recurrences keep the time of a step at O(k N):
 * The greedy rows c_t (see `ops.problem`) are continued over k identity columns, E = F^-1 for L_S = F F^T, so that
   A = (L_S)^-1 = E^T E and Y = A L_S,: = E^T C come out of the same loop.
 * Of Y, only the numbers u_i = Y_ai are kept, with r_i = L_ii - L_i,S A L_S,i and p_i = A_aa, where a is the slot of
   item i. Putting i into slot a multiplies the determinant by r_i p_i + u_i^2. After a swap, u, r and p follow from two
   weighted sums of the k rows L_S,: (the row of Y of the changed slot, and the covariance of the new item with others).
Sums over slots run in the order of the picks, so that a permuted pool gives the permuted answer, bit for bit. Ties
decide between values of equal bits (in the plain version, between values within 1e-9).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem import best_set, bounded

EXACT = 256  # problems of at most this many items are computed in float64
MOST_TILE = tl.constexpr(8)  # the most rows of L or C that are loaded together
_SCRATCH = 1 << 28  # one launch uses at most about this many bytes of scratch memory; a start needs k N numbers


@triton.jit
def _better(value, tie, item, extra, other_value, other_tie, other_item, other_extra):
    """Return the larger value with its tie, item and `extra`. Between equal values, the smaller tie wins, then item."""
    equal = value == other_value
    first = (value > other_value) | (equal & ((tie < other_tie) | ((tie == other_tie) & (item < other_item))))
    return (
        tl.where(first, value, other_value),
        tl.where(first, tie, other_tie),
        tl.where(first, item, other_item),
        tl.where(first, extra, other_extra),
    )


@triton.jit
def _finite(values):
    """Return values limited to -1e30 .. 1e30; NaN becomes -1e30."""
    return tl.where(values > -1e30, tl.where(values < 1e30, values, 1e30), -1e30)


@triton.jit
def _greedy(kernel, gain, rows, roots, diagonal, worth, order, size, k, start, least, START, SEARCH, N, K):
    """Return, after greedy elimination, residuals [N], each item's slot [N], picks [K], zero-pivot count and log value
    of the pivots that are not zero.

    The matrix C of the rows c_t is written to `rows` [k, N] and, if SEARCH, the matrix E to `roots` [k, K].
    """
    LOW: tl.constexpr = -float("inf")
    FLOAT: tl.constexpr = diagonal.dtype
    HAS_GAIN: tl.constexpr = gain is not None
    TILE: tl.constexpr = MOST_TILE if K > MOST_TILE else K
    item, slot_id = tl.arange(0, N), tl.arange(0, K)
    width = size // k
    group = item // width
    if HAS_GAIN:
        gains = _finite(tl.load(gain + item, mask=item < size, other=0.0).to(FLOAT))
    residual = diagonal
    free = item < size
    slot = tl.zeros((N,), tl.int32)
    picks = tl.zeros((K,), tl.int32)
    logs = tl.full((K,), 0.0 if HAS_GAIN else 1.0, FLOAT)  # log pivot + gain of each pick; without gains, the pivot
    zeros = 0
    for t in range(k):
        allowed = free
        if START == 1:
            allowed = free & ((t > 0) | (group == start))
        if START == 2:
            allowed = free & ((t > 0) | (item == start))
        regular = allowed & (residual > least)
        weight = tl.where(regular, residual, LOW)
        if HAS_GAIN:
            weight = tl.where(regular, tl.log(tl.where(regular, residual, 1.0)) + gains, LOW)
        best, _, pick, pivot = tl.reduce((weight, order, item, residual), 0, _better)
        positive = best > LOW
        if best == LOW:  # all remaining pivots are zero, so quality decides
            _, _, pick, pivot = tl.reduce((tl.where(allowed, worth, LOW), order, item, residual), 0, _better)
        scale = tl.where(positive, tl.rsqrt(tl.where(positive, pivot, 1.0)), 0.0)
        row = tl.load(kernel + pick.to(tl.int64) * size + item, mask=item < size, other=0.0).to(FLOAT)
        identity = tl.where(slot_id == t, 1.0, 0.0).to(FLOAT)
        for base in range(0, t, TILE):
            for j in tl.static_range(TILE):  # the loop is unrolled, so that the loads of a tile overlap
                past = base + j
                share = tl.load(rows + past * size + pick, mask=past < t, other=0.0)
                row -= share * tl.load(rows + past * size + item, mask=item < size * (past < t), other=0.0)
                if SEARCH:
                    identity -= share * tl.load(roots + past * K + slot_id, mask=slot_id < k * (past < t), other=0.0)
        row *= scale
        tl.store(rows + t * size + item, row, mask=item < size)
        if SEARCH:
            tl.store(roots + t * K + slot_id, identity * scale)
        tl.debug_barrier()
        residual -= row * row
        mine = group == pick // width
        free = free & ~mine
        slot = tl.where(mine, t, slot)
        picks = tl.where(slot_id == t, pick, picks)
        zeros += tl.where(positive, 0, 1)
        logs = tl.where(slot_id == t, tl.where(positive, best, 0.0 if HAS_GAIN else 1.0), logs)
    value = tl.sum(logs.to(tl.float64), 0)
    if not HAS_GAIN:
        value = tl.sum(tl.log(logs.to(tl.float64)), 0)
    return residual, slot, picks, zeros, value


@triton.jit
def _climb(kernel, gain, rows, roots, inverse, members, residual, slot, picks, order, size, k, least, enough, N, K):
    """Make the best swap until no swap gains more than `enough`, and return the members [K]. What a move changes is
    stored in two places, for odd and for even moves, so that one barrier per move is enough."""
    LOW: tl.constexpr = -float("inf")
    carries = inverse + 2 * K * K
    FLOAT: tl.constexpr = residual.dtype
    HAS_GAIN: tl.constexpr = gain is not None
    TILE: tl.constexpr = MOST_TILE if K > MOST_TILE else K
    item, slot_id = tl.arange(0, N), tl.arange(0, K)
    live, inside = item < size, slot_id < k
    tl.store(members + slot_id, picks)
    u = tl.zeros((N,), FLOAT)
    p = tl.zeros((N,), FLOAT)
    for base in range(0, k, TILE):
        for j in tl.static_range(TILE):
            past = base + j
            root = tl.load(roots + past * K + slot, mask=item < size * (past < k), other=0.0)
            u += root * tl.load(rows + past * size + item, mask=item < size * (past < k), other=0.0)
            p += root * root
    tl.debug_barrier()
    chosen = item == tl.load(members + slot)
    if HAS_GAIN:
        gains = _finite(tl.load(gain + item, mask=live, other=0.0).to(FLOAT))
        member_gain = _finite(tl.load(gain + tl.load(members + slot)).to(FLOAT))  # the gain of the slot's member
    code = item + slot * 4096
    threshold = tl.full((), 0.0 if HAS_GAIN else 1.0, FLOAT) + enough  # computed here, because float32(1 + 1e-9) is 1
    moves = 0
    while moves >= 0:
        old, new = (moves % 2) * K, ((moves + 1) % 2) * K
        ratio = residual * p + u * u
        allowed = live & ~chosen & (ratio > least * p)
        weight = tl.where(allowed, ratio, LOW)
        if HAS_GAIN:
            weight = tl.where(allowed, tl.log(tl.where(allowed, ratio, 1.0)) + gains - member_gain, LOW)
        best, _, move, through = tl.reduce((weight, order, code, u), 0, _better)
        if (best > threshold) & (moves < 20 * k + 100):
            if moves == 0:  # A is computed at the first move, which many starts never make
                a = tl.zeros((K, K), FLOAT)
                for base in range(0, k, TILE):
                    for j in tl.static_range(TILE):
                        past = base + j
                        root_row = roots + past * K
                        left = tl.load(root_row + slot_id[:, None], mask=slot_id[:, None] < k * (past < k), other=0.0)
                        right = tl.load(root_row + slot_id[None, :], mask=slot_id[None, :] < k * (past < k), other=0.0)
                        a += left * right
                tl.store(inverse + slot_id[:, None] * K + slot_id[None, :], a)
                tl.debug_barrier()
            a = tl.load(inverse + (old + slot_id)[:, None] * K + slot_id[None, :])
            pick, at = move % 4096, move // 4096
            lost = tl.load(inverse + (old + at) * K + slot_id)
            precision = tl.load(inverse + (old + at) * K + at)
            member = tl.load(members + old + slot_id, mask=inside, other=0)
            cross = tl.load(kernel + member.to(tl.int64) * size + pick, mask=inside, other=0.0).to(FLOAT)
            gone = 1.0 / precision
            if HAS_GAIN:
                alone = tl.sum(tl.where(item == pick, ratio, 0.0), 0) * gone
            else:
                alone = best * gone  # the pivot of the new item given the members that stay
            come = 1.0 / alone
            across = tl.sum(a * cross[None, :], 1)
            carry = tl.where(slot_id == at, 0.0, across - lost * (through * gone))
            tl.store(carries + old + slot_id, carry)
            tl.store(members + new + slot_id, tl.where(slot_id == at, pick, member))
            signed = tl.where(slot_id == at, -1.0, carry)
            kept = (slot_id != at)[:, None] & (slot_id != at)[None, :]
            a = tl.where(kept, a - lost[:, None] * (lost * gone)[None, :], 0.0)
            a += signed[:, None] * (signed * come)[None, :]
            tl.store(inverse + (new + slot_id)[:, None] * K + slot_id[None, :], a)
            tl.debug_barrier()
            shadow = tl.zeros((N,), FLOAT)  # the row of Y that belongs to the changed slot
            joint = tl.load(kernel + pick.to(tl.int64) * size + item, mask=live, other=0.0).to(FLOAT)
            for base in range(0, k, TILE):
                for j in tl.static_range(TILE):
                    past = base + j
                    source = tl.load(members + old + past, mask=past < k, other=0).to(tl.int64)
                    block = tl.load(kernel + source * size + item, mask=item < size * (past < k), other=0.0).to(FLOAT)
                    shadow += block * tl.load(inverse + (old + at) * K + past, mask=past < k, other=0.0)
                    joint -= block * tl.load(carries + old + past, mask=past < k, other=0.0)
            my_lost = tl.load(inverse + (old + at) * K + slot)
            my_carry = tl.load(carries + old + slot)
            mine = slot == at
            residual += shadow * shadow * gone - joint * joint * come
            u = tl.where(mine, joint * come, u - my_lost * gone * shadow - my_carry * joint * come)
            p = tl.where(mine, come, p - my_lost * my_lost * gone + my_carry * my_carry * come)
            chosen = tl.where(mine, item == pick, chosen)
            if HAS_GAIN:
                member_gain = tl.where(mine, _finite(tl.load(gain + pick).to(FLOAT)), member_gain)
            moves += 1
        else:
            picks = tl.load(members + old + slot_id, mask=inside, other=0)
            moves = -1
    return picks


@triton.jit(do_not_specialize=["first"])
def _solve(
    kernel,  # [P, N, N]
    gain,  # [P, N] or None
    quality,  # [P, N]
    tie,  # [P, N]
    sets,  # [P, starts, k]; the next two arguments are [P, starts], with the starts of all launches
    zeros_out,
    value_out,
    rows,  # [programs, k, N]; this argument and the next three are scratch memory of this launch
    roots,  # [programs, K, K]
    inverse,  # [programs, 2 K + 2, K]: two copies of A = (L_S)^-1, then two of the vector of a move
    members,  # [programs, 2, K]
    size,
    k,
    first,  # the number of the first start of this launch
    floor,
    enough,
    START: tl.constexpr,
    SEARCH: tl.constexpr,
    WIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    problem = tl.program_id(0).to(tl.int64)
    program = problem * tl.num_programs(1) + tl.program_id(1)
    start = first + tl.program_id(1)
    starts = 1 if START == 0 else (k if START == 1 else size)
    at = problem * starts + start
    kernel += problem * size * size
    quality += problem * size
    tie += problem * size
    rows += program * k * size
    roots += program * K * K
    FLOAT: tl.constexpr = tl.float64 if WIDE else tl.float32

    item, slot_id = tl.arange(0, N), tl.arange(0, K)
    live, inside = item < size, slot_id < k
    diagonal = tl.load(kernel + item * (size + 1), mask=live, other=0.0).to(FLOAT)
    diagonal = tl.where(diagonal == diagonal, diagonal, 0.0)
    worth = _finite(tl.load(quality + item, mask=live, other=0.0).to(FLOAT))
    order = tl.load(tie + item, mask=live, other=0)
    if gain is not None:
        gain += problem * size
    least = tl.max(diagonal, 0) * floor  # a pivot of at most this counts as zero
    residual, slot, picks, zeros, value = _greedy(
        kernel, gain, rows, roots, diagonal, worth, order, size, k, start, least, START, SEARCH, N, K
    )
    if zeros == 0:
        value = _log_value(kernel, gain, picks, size, k, K)
        if SEARCH:
            inverse += program * (2 * K + 2) * K
            members += program * 2 * K
            climbed = _climb(
                kernel, gain, rows, roots, inverse, members, residual, slot, picks, order, size, k, least, enough, N, K
            )
            if tl.sum(tl.where(inside & (climbed != picks), 1, 0), 0) > 0:
                improved = _log_value(kernel, gain, climbed, size, k, K)
                picks = tl.where(improved > value, climbed, picks)
                value = tl.where(improved > value, improved, value)
    tl.store(sets + at * k + slot_id, picks, mask=inside)
    tl.store(zeros_out + at, zeros)
    tl.store(value_out + at, value)


@triton.jit
def _log_value(kernel, gain, picks, size, k, K: tl.constexpr):
    """Return log det(L_S) + sum of gains of the set `picks` [K] in float64, by elimination of its k x k matrix."""
    slot = tl.arange(0, K)
    inside = slot < k
    items = picks.to(tl.int64)
    where = inside[:, None] & inside[None, :]
    matrix = tl.load(kernel + items[:, None] * size + items[None, :], mask=where, other=0.0).to(tl.float64)
    pivots = tl.full((K,), 1.0, tl.float64)
    for t in range(k):
        here = slot == t
        column = tl.sum(tl.where(here[:, None], matrix, 0.0), 0)
        pivot = tl.sum(tl.where(here, column, 0.0), 0)
        pivot = tl.where(pivot > 0, pivot, 1e-300)
        pivots = tl.where(here, pivot, pivots)
        matrix -= column[:, None] * (column / pivot)[None, :]
    value = tl.sum(tl.log(pivots), 0)
    if gain is not None:
        gains = tl.load(gain + items, mask=inside, other=0.0).to(tl.float64)
        value += tl.sum(tl.where(inside, _finite(gains), 0.0), 0)
    return value


def partition_map(
    kernel: Tensor,
    k: int,
    log_gain: Tensor | None,
    quality: Tensor,
    tie: Tensor,
    starts: str = "n",
    local_search: bool = True,
) -> Tensor:
    """Return the chosen items [P, k], ascending, for a float32, symmetric kernel [P, N, N].

    A pivot of at most 1e-10 of the largest diagonal entry (1e-6 in problems of more than EXACT items) counts as zero,
    as does a pivot that is not finite.
    """
    prompts, size, _ = kernel.shape
    kind, count = {"one": (0, 1), "k": (1, k), "n": (2, size)}[starts]
    exact = size <= EXACT
    dtype = torch.float64 if exact else torch.float32
    fitting = max(1, _SCRATCH // (k * size * dtype.itemsize))  # one launch has scratch memory for this many starts
    together, at_once = max(1, fitting // count), min(count, fitting)
    block = max(16, triton.next_power_of_2(size))
    slots = triton.next_power_of_2(k)
    warps = 1 if block <= 64 else 4 if block <= 256 else 8 if block <= 2048 else 16
    flags = kind, local_search, exact, block, slots
    kernel, quality, tie = kernel.contiguous(), quality.contiguous(), tie.to(torch.int64).contiguous()
    log_gain = None if log_gain is None else log_gain.contiguous()

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=kernel.device)

    chosen = [new(0, k, dtype=torch.int64)]
    for first in range(0, prompts, together):
        cut = slice(first, min(prompts, first + together))
        part = cut.stop - cut.start
        sets, zeros = new(part, count, k, dtype=torch.int32), new(part, count, dtype=torch.int32)
        value = new(part, count, dtype=torch.float64)
        programs = part * at_once
        rows, roots = new(programs, k, size, dtype=dtype), new(programs, slots, slots, dtype=dtype)
        inverse, members = new(programs, 2 * slots + 2, slots, dtype=dtype), new(programs, 2, slots, dtype=torch.int32)
        problems = kernel[cut], None if log_gain is None else log_gain[cut], quality[cut], tie[cut]
        given = *problems, sets, zeros, value, rows, roots, inverse, members, size, k
        bounds = (1e-10, 1e-9) if exact else (1e-6, 1e-5)
        with torch.cuda.device_of(kernel):
            for start in range(0, count, at_once):
                _solve[part, min(at_once, count - start)](*given, start, *bounds, *flags, num_warps=warps)
        chosen.append(best_set(sets.long().sort(-1).values, zeros, value, bounded(quality[cut].double()), tie[cut]))
    return torch.cat(chosen)
