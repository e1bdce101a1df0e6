"""Sampling of a set S with one item per group. The chance of S is proportional to det(L_S)^(1/set_temperature)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from d5p4 import Choice, Option, PoolView
from d5p4.ops.partition_map import condition, solve
from d5p4.ops.problem import Problem, prepare
from d5p4.ops.ties import argbest
from d5p4.rng import draw_index, gumbel, mix, uniform
from d5p4.search.beam import by_group
from d5p4.search.dpp import Sampler, dpp_kernel

from .exact import transversals

_CHUNK = 1 << 22  # at most this many items are scored at once, where each of the sets counts k items


@dataclass(frozen=True)
class PartitionSample(Sampler):
    """Draws one set S with one item per group. P(S) is proportional to det(L_S)^(1/set_temperature).

    If there are at most `limit` sets, all sets are enumerated, and the draw is exact, O(w^k k^3). Otherwise, a
    Markov chain starts from the result of local search from k starts, and each of its `moves` redraws the item of one
    group given the other items, O(k^3 + k^2 w). If every set is singular, the result of local search is returned.
    """

    set_temperature: Annotated[float, Option("Temperature of the draw of a set.", above=0)] = 1.0
    limit: Annotated[
        int, Option("With more sets than this limit, a Markov chain draws the set.", least=0, hidden=("http",))
    ] = 20_000
    moves: Annotated[
        int | None, Option("Moves of the Markov chain.", least=1, unset="20 per answer", hidden=("http",))
    ] = None

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        width = by_group(pool.tie, k).shape[-1]
        kernel, log_gain = dpp_kernel(self.kernel, pool.quality, pool.similarity, self.beta)
        problem = prepare(kernel, k, log_gain, pool.quality, pool.tie)
        exact = width**k <= self.limit
        sets = self._enumerate(problem, key) if exact else self._walk(problem, key, self.moves or 20 * k)
        return pool.keep(problem.restore(sets))

    def _enumerate(self, problem: Problem, key: Tensor) -> Tensor:
        """Draw one set per prompt, [P, k]: of all sets, the one with the largest log weight + Gumbel noise."""
        sets = transversals(problem.k, problem.kernel.shape[-1] // problem.k, key.device)
        step = max(1, _CHUNK // sets.numel())
        drawn = []
        for p in range(0, key.shape[0], step):
            part = problem.part(p, p + step)
            zeros, logs = part.score(sets.expand(part.tie.shape[0], -1, -1))
            members = mix(part.tie)[:, sets].sum(-1)  # [P, w^k] a hash of each set, which selects its noise
            noise = gumbel(uniform(mix(key[p : p + step].unsqueeze(-1), members), 0)).to(logs.dtype)
            weight = torch.where(zeros == 0, logs / self.set_temperature + noise, -torch.inf)
            pick = sets[argbest(weight, members)]
            singular = (zeros > 0).all(-1)
            if singular.any():
                pick[singular] = solve(part, "k")[singular]
            drawn.append(pick)
        return torch.cat(drawn) if drawn else torch.zeros(0, problem.k, dtype=torch.int64, device=key.device)

    def _walk(self, problem: Problem, key: Tensor, moves: int) -> Tensor:
        """Draw one set per prompt, [P, k], by a Markov chain that keeps the target distribution, group after group.

        A move draws item i of group a with chance proportional to det^(1/set_temperature) of the set with i in slot a.
        This determinant is proportional to r_i A_aa + Y_ai^2 in the notation of `ops.partition_map._climb`.
        """
        sets = solve(problem, "k")
        zeros, _ = problem.score(sets.unsqueeze(1))
        prompts = torch.arange(sets.shape[0], device=sets.device)
        width = problem.kernel.shape[-1] // problem.k
        diagonal = problem.kernel.diagonal(dim1=-2, dim2=-1)
        for move in range(moves):
            slot = move % problem.k
            here = slice(slot * width, (slot + 1) * width)
            inverse, cross, solved = condition(problem.kernel, prompts, sets, here)
            residual = (diagonal[:, here] - (cross * solved).sum(1)).clamp_min(0)
            ratio = residual * inverse[:, slot, slot].unsqueeze(-1) + solved[:, slot] ** 2
            weight = (ratio.log() + problem.log_gain[:, here]) / self.set_temperature
            weight = (weight - weight.amax(-1, keepdim=True)).exp()
            drawn = draw_index(weight, uniform(key.unsqueeze(-1), move).to(weight.dtype)).squeeze(-1)
            moved = sets.clone()
            moved[:, slot] = drawn + slot * width
            sets = torch.where(zeros == 0, moved, sets)
        return sets
