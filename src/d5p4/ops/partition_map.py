"""MAP inference of a determinantal point process with one item per group.

Maximise log det(L_S) + sum of log_gain over S, over sets S with one item from each of k groups of w = N / k items.

Greedy elimination runs from several first picks (starts), O(k^2 N) each, and a 1-swap local search improves each
result, O(k^2 N) per move. The best of all these sets, the greedy ones too, is found by an exact re-scoring. So the
default, which starts from all N items as the paper's code does, is never worse than the best greedy set (up to
TOLERANCE). A float32 L on CUDA is solved by a Triton kernel (`kernels.partition_map`). Where this computes in float32,
N > 256, the bound is 1e-3 nat.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from . import kernels
from .problem import Problem, check, eliminate, prepare, zero_pivot
from .ties import TOLERANCE, argbest

Starts = Literal["one", "k", "n"]
_CHUNK = 1 << 24  # at most this many numbers are in one temporary tensor
_GOLDEN = -7046029254386353131


def partition_map(
    kernel: Tensor,
    k: int,
    log_gain: Tensor | None = None,
    quality: Tensor | None = None,
    tie: Tensor | None = None,
    *,
    partition: bool = True,
    starts: Starts = "n",
    local_search: bool = True,
) -> Tensor:
    """Return the chosen items [P, k], ascending, one from each group. Group g has the items g*w .. (g+1)*w - 1.

    kernel [P, N, N]. log_gain [P, N] is twice the log of a diagonal scaling of the kernel (the scaling itself could
    overflow). quality [P, N] decides between sets of determinant zero, and tie [P, N] decides between equal values.
    starts: "one" (the best item of all), "k" (the best item of each group or, without the partition, the k best),
    "n" (every item). The best item has the largest diagonal times gain. Every input gives a valid choice, even if
    numbers are not finite (see `ops.problem`). Of a float32 kernel on CUDA, only one half is read.
    """
    if starts not in ("one", "k", "n"):
        raise ValueError(f'starts must be "one", "k" or "n", got {starts!r}')
    check(kernel, k, log_gain, quality, tie, partition)
    size = kernel.shape[1]
    if partition and kernel.is_cuda and kernels.usable(kernel, size) and k <= kernels.MOST_GROUPS:
        from .kernels.partition_map import partition_map as launch

        worth = kernel.diagonal(dim1=-2, dim2=-1).log() if quality is None else quality
        ties = torch.arange(size, device=kernel.device).expand(kernel.shape[:2]) if tie is None else tie
        return launch(kernel.detach(), k, log_gain, worth, ties, starts, local_search)
    problem = prepare(kernel, k, log_gain, quality, tie, partition=partition)
    return problem.restore(solve(problem, starts, local_search))


map_inference = partial(partition_map, partition=False)
"""`partition_map` over all sets of k items."""


def solve(problem: Problem, starts: Starts = "n", local_search: bool = True) -> Tensor:
    """Return the chosen items [P, k] of a prepared problem, as indices into the problem's own (canonical) order."""
    first = _first_picks(problem, starts)
    most = max(1, 4 * _CHUNK // (problem.k * problem.quality.numel() or 1))  # at most this many starts run at once
    own = problem.kernel, problem.log_gain, problem.quality, problem.tie, problem.group, problem.k
    results = [eliminate(*own, head) for head in ([None] if first is None else first.split(most, 1))]
    # Sorting makes rows of equal sets equal. Slot a has group a's item or, without groups, the a-th smallest item.
    sets = torch.cat([result.picks for result in results], 1).sort(-1).values
    if local_search:
        regular = torch.cat([result.zeros for result in results], 1) == 0
        sets = torch.cat([sets, _climb(problem, sets, regular)], 1)
    return problem.best(sets) if sets.shape[1] > 1 else sets.squeeze(1)


def _first_picks(problem: Problem, starts: Starts) -> Tensor | None:
    """Return the first pick of each of s starts, [P, s], or None if the only start chooses its first pick itself."""
    if starts == "one":
        return None
    prompts, size = problem.quality.shape
    if starts == "n":
        return torch.arange(size, device=problem.kernel.device).expand(prompts, size)
    diagonal = problem.kernel.diagonal(dim1=-2, dim2=-1)
    regular = diagonal > zero_pivot(diagonal.dtype)
    weight = torch.where(regular, diagonal.log() + problem.log_gain, torch.finfo(diagonal.dtype).min)
    weight = torch.where(regular.any(-1, keepdim=True), weight, problem.quality)
    picks, group = [], problem.group
    for _ in range(problem.k):
        pick = argbest(weight, problem.tie).unsqueeze(-1)
        weight = torch.where(group == group[pick], -torch.inf, weight)
        picks.append(pick)
    return torch.cat(picks, -1)


def _climb(problem: Problem, sets: Tensor, regular: Tensor) -> Tensor:
    """Improve the sets [P, s, k] where regular [P, s] is True by local search. A move is the best swap of one item.

    With A = (L_S)^-1, Y = A L_{S,:} and r_i = L_ii - sum_a L_{S_a,i} Y_ai, putting item i into slot a multiplies the
    determinant by r_i A_aa + Y_ai^2. A is computed afresh for every move, so that errors do not build up.
    """
    prompts, starts, k = sets.shape
    size = problem.kernel.shape[-1]
    device = sets.device
    items = torch.arange(size, device=device)
    if problem.groups == k:
        slot, item = problem.group, items
    else:
        slot, item = torch.arange(k, device=device).repeat_interleave(size), items.repeat(k)
    prompt = torch.arange(prompts, device=device).repeat_interleave(starts)
    # Several starts often reach the same set, so the search climbs once from each distinct set.
    rows, twin = torch.cat([prompt.unsqueeze(-1), sets.view(-1, k)], -1).unique(dim=0, return_inverse=True)
    prompt, current = rows[:, 0], rows[:, 1:].contiguous()
    active = twin[regular.view(-1)].unique()
    for _ in range(20 * k + 100):
        if active.numel() == 0:
            break
        moved = []
        for rows_now in active.split(max(1, _CHUNK // (k * size))):
            change, move = _best_move(problem, prompt[rows_now], current[rows_now], slot, item)
            better = change > TOLERANCE
            rows_now, move = rows_now[better], move[better]
            current[rows_now, slot[move]] = item[move]
            moved.append(rows_now)
        active = torch.cat(moved)
    return current[twin].view(prompts, starts, k)


def _best_move(problem: Problem, prompt: Tensor, sets: Tensor, slot: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each set [b] how much its best move changes the log value, and that move: item[move] to slot[move]."""
    inverse, cross, solved = condition(problem.kernel, prompt, sets)
    residual = problem.kernel.diagonal(dim1=-2, dim2=-1)[prompt] - (cross * solved).sum(1)
    precision = inverse.diagonal(dim1=-2, dim2=-1)[:, slot]
    ratio = residual[:, item] * precision + solved[:, slot, item] ** 2
    gain, tie = problem.log_gain[prompt], problem.tie[prompt]
    change = ratio.log() + gain[:, item] - gain.gather(-1, sets)[:, slot]
    inside = torch.zeros_like(gain, dtype=torch.bool).scatter_(-1, sets, True)
    # A singular set never wins, however large its gain. (Rounding may make its determinant tiny instead of zero.)
    allowed = ~inside[:, item] & (ratio > zero_pivot(ratio.dtype) * precision)
    change = torch.where(allowed, change, -torch.inf)
    by = tie[:, item]
    if problem.groups > problem.k:  # without groups, an item may go into any slot
        by = by ^ (tie.gather(-1, sets)[:, slot] * _GOLDEN)
    move = argbest(change, by)
    return change.gather(-1, move.unsqueeze(-1)).squeeze(-1), move


def condition(
    kernel: Tensor, prompt: Tensor, sets: Tensor, columns: slice = slice(None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return A = (L_S)^-1 [b, k, k], L_{S,c} [b, k, c] and A L_{S,c} for each set S in sets [b, k] and the columns c.
    prompt [b] is the prompt of each set."""
    inside = kernel[prompt.view(-1, 1, 1), sets.unsqueeze(-1), sets.unsqueeze(-2)]
    inverse = torch.linalg.inv_ex(inside).inverse
    cross = kernel[:, :, columns][prompt.unsqueeze(-1), sets]
    return inverse, cross, inverse @ cross
