"""Exact maximisation of log det(L_S) + sum of log_gain over S, by enumeration or by branch and bound."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d5p4 import D5P4Error
from d5p4.ops.partition_map import solve
from d5p4.ops.problem import Problem, prepare

LIMIT = 1_000_000
_CHUNK = 1 << 22  # sets are scored in chunks; the sets of a chunk, times k, are at most this many
_SLACK = 1e-6  # sets within this of the best value are scored again exactly; the bound's rounding errors are smaller
_NOISE = 1e-14  # added to each pivot in the bound; the rounding error of a pivot is smaller
_DEAD = 1e-13  # a pivot of at most this is zero up to rounding errors, so its item is left out


def exhaustive(kernel: Tensor, k: int, *more: Tensor | None, partition: bool = True) -> Tensor:
    """Compare all w^k sets with one item per group (or all C(N, k) sets of k items) and return the best sets [P, k].

    more: log_gain, quality and tie, as for `ops.problem.prepare`. The time is O(w^k k^3) per prompt.
    """
    problem = prepare(kernel, k, *more, partition=partition)
    size, device = problem.kernel.shape[-1], problem.kernel.device
    count = (size // k) ** k if partition else math.comb(size, k)
    if count > LIMIT:
        reason = f"{count} sets are more than the limit of {LIMIT}"
        raise D5P4Error(f"{reason}; use solver 'exact' or 'full-search', or a smaller k or w")
    items = torch.arange(size, device=device)
    sets = transversals(k, size // k, device) if partition else torch.combinations(items, k)
    return problem.restore(_best_of_all(problem, sets))


def transversals(k: int, width: int, device: torch.device) -> Tensor:
    """Return all sets [w^k, k] with one item from each of k groups of w adjacent items."""
    place = width ** torch.arange(k - 1, -1, -1, device=device)
    number = torch.arange(width**k, device=device).unsqueeze(-1)
    return number // place % width + torch.arange(k, device=device) * width


def branch_and_bound(kernel: Tensor, k: int, *more: Tensor | None, partition: bool = True) -> Tensor:
    """Return the same sets [P, k] as `exhaustive` with the partition, usually with far less work.

    The search is depth first and starts from the result of local search from k starts. The value of a set that contains
    the partial set A is at most log det(L_A) + the sum over free groups of the largest log pivot given A (inequalities
    of Hadamard and Fischer). The search branches on the group with the fewest items that can still win. Of
    interchangeable items (see `_distinct_items`), only one is tried. If every set is singular, all distinct sets are
    compared, but if there are more than `LIMIT` such sets, the result of local search is returned.
    """
    if not partition:
        raise D5P4Error("needs the partition; without it use 'exhaustive'", option="solver", value="exact")
    problem = prepare(kernel, k, *more)
    start = solve(problem, "k")
    sets = [_one_prompt(problem.part(p, p + 1), start[p : p + 1]) for p in range(start.shape[0])]
    return problem.restore(torch.cat(sets)) if sets else start


def _one_prompt(problem: Problem, start: Tensor) -> Tensor:
    """Return the best set [1, k] of one prompt. The search leaves out sets that are worse than `start` [1, k]."""
    zeros, logs = problem.score(start.unsqueeze(1))
    distinct = _distinct_items(problem)
    regular = bool(zeros == 0)
    leaves = _search(problem, [i for members in distinct for i in members], float(logs) if regular else -math.inf)
    if regular or leaves:
        candidates = torch.tensor([start[0].tolist(), *leaves], device=start.device)
        return problem.best(candidates.unsqueeze(0))
    if math.prod(len(items) for items in distinct) > LIMIT:
        return start
    items = [torch.tensor(members, device=start.device) for members in distinct]
    return _best_of_all(problem, torch.cartesian_prod(*items).view(-1, problem.k))


def _distinct_items(problem: Problem) -> list[list[int]]:
    """Return the items of each group. Of interchangeable items, only that with the smallest tie number is returned.

    Two items of a group are interchangeable if they have equal diagonal entries, gains and qualities, and equal kernel
    entries with the items of all other groups.
    """
    kernel, width = problem.kernel[0].cpu().numpy(), problem.kernel.shape[-1] // problem.k
    own = torch.stack([problem.log_gain[0], problem.quality[0]], -1).cpu().numpy()
    result = []
    for low in range(0, kernel.shape[0], width):
        seen: dict[bytes, int] = {}
        for i in range(low, low + width):
            outside = np.concatenate([kernel[i, :low], kernel[i, low + width :], kernel[i, i : i + 1], own[i]])
            seen.setdefault((outside + 0.0).tobytes(), i)  # adding 0.0 turns -0.0 into 0.0
        result.append(list(seen.values()))
    return result


def _search(problem: Problem, items: list[int], best: float) -> list[list[int]]:
    """Return all sets of one prompt whose value is that of the best regular set, up to rounding, by depth-first search.

    `items` may be chosen. `best` is the value of a known set, which the search improves.
    """
    kernel, gain = (x[0].cpu().numpy().astype(np.float64) for x in (problem.kernel, problem.log_gain))
    group = problem.group.cpu().numpy()
    leaves: list[tuple[float, list[int]]] = []

    def descend(items: NDArray[np.int64], given: NDArray[np.float64], value: float, chosen: list[int]) -> None:
        """Extend the set `chosen` of log value `value`. `given` is the kernel of `items` conditioned on `chosen`."""
        nonlocal best
        left = problem.k - len(chosen)
        if left == 0:
            members = sorted(chosen)
            if value > best:
                zeros, logs = problem.score(torch.tensor([[members]], device=problem.kernel.device))
                if int(zeros) > 0:
                    return
                best = max(best, float(logs))
            leaves.append((value, members))
            return
        pivots = given.diagonal()
        alive = pivots > _DEAD
        items, given, pivots = items[alive], given[np.ix_(alive, alive)], pivots[alive]
        groups, heads, place = np.unique(group[items], return_index=True, return_inverse=True)
        if len(groups) < left:
            return
        worth = np.log(pivots + _NOISE) + gain[items]
        tops = np.maximum.reduceat(worth, heads)
        bound = value + tops.sum() - tops[place] + worth  # per item: no set with this item has a larger value
        hopeful = bound >= best - _SLACK
        branch = int(np.bincount(place, hopeful, len(groups)).argmin())
        rest = hopeful & (place != branch)
        branches = np.flatnonzero(hopeful & (place == branch))
        for i in branches[np.argsort(-worth[branches], kind="stable")]:
            if bound[i] < best - _SLACK:
                break
            column = given[rest, i]
            conditioned = given[np.ix_(rest, rest)] - np.outer(column, column / pivots[i])
            descend(items[rest], conditioned, value + float(worth[i]), [*chosen, int(items[i])])

    descend(np.array(items), kernel[np.ix_(items, items)], 0.0, [])
    return [members for value, members in leaves if value >= best - _SLACK]


def _best_of_all(problem: Problem, sets: Tensor) -> Tensor:
    """Return the best set [P, k] of each prompt among sets [M, k] that all prompts share."""
    step = max(1, _CHUNK // sets.numel())
    parts = [problem.part(p, p + step) for p in range(0, problem.kernel.shape[0], step)]
    return torch.cat([part.best(sets.expand(part.kernel.shape[0], -1, -1)) for part in parts] or [sets[:0]])
