"""D5P4 picks the most likely set of a determinantal point process (DPP) among sets with one child of every parent.

The k-DPP samples k items, without groups, with chances proportional to det(L_S).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from ..decode.view import PoolView
from ..errors import D5P4Error
from ..ops.partition_map import partition_map
from ..ops.problem import Problem, prepare
from ..ops.ties import argbest, ranked
from ..options import Checked, Option
from ..rng import draw_index, uniform
from ..types import Choice
from .beam import GreedyBeam, by_group

_EIGENVECTOR, _ITEM = 0, 1
_PARTING = 1e-7  # see `KDPP`

SOLVERS: dict[str, Callable[..., Tensor]] = {
    "full-search": partition_map,
    "local-search": partial(partition_map, starts="k"),
    "one-start": partial(partition_map, starts="one", local_search=False),
    "k-starts": partial(partition_map, starts="k", local_search=False),
    "n-starts": partial(partition_map, local_search=False),
}
"""A solver `solve(kernel, k, log_gain, quality, tie, partition=...)` returns the best set [P, k] (`ops.partition_map`).
A plugin may add solvers. det(L_S) is never smaller with "full-search" than with "n-starts", the paper's solver."""

Kernel = Annotated[Literal["additive", "multiplicative"], Option("L = diag(Q) + beta S, or e^(Q/beta) S e^(Q/beta).")]
Solver = Annotated[str, Option("How the best set is found.", choices=lambda: SOLVERS, hidden=("http",))]
Beta = Annotated[float, Option("Weight of diversity; with 0, only quality counts.", least=0)]


def dpp_kernel(kind: str, quality: Tensor, similarity: Tensor, beta: float) -> tuple[Tensor, Tensor | None]:
    """Return the kernel L [P, N, N] and log_gain [P, N] from quality Q [P, N] and similarity S [P, N, N].

    additive: L = diag(Q) + beta S, and log_gain is None. multiplicative: L = diag(e^{Q/beta}) S diag(e^{Q/beta}),
    returned as S and log_gain = 2 Q / beta so that nothing overflows: det(L_A) = det(S_A) exp(sum of log_gain over A).
    """
    if kind == "additive":
        return torch.diag_embed(quality) + beta * similarity, None
    if beta == 0:
        raise D5P4Error("must be above 0, because the multiplicative kernel divides by it", option="beta", value=beta)
    return similarity, 2 * quality / beta


def check_size(pool: PoolView, k: int, partition: bool) -> None:
    """Raise an error if k items cannot be chosen from the pool, one per group under the partition."""
    if partition:
        by_group(pool.tie, k)
    elif not 1 <= k <= pool.size:
        raise D5P4Error(f"cannot choose k = {k} of a pool of {pool.size} rows; k must be from 1 to {pool.size}")


@dataclass(frozen=True)
class PartitionDPP(Checked):
    """Picks the set S with the largest det(L_S) among sets with one item per group (in D5P3, all sets of k items)."""

    timeless: ClassVar[bool] = True
    beta: Beta = 20.0
    kernel: Kernel = "additive"
    solver: Solver = "full-search"
    partition: bool = True

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        check_size(pool, k, self.partition)
        if self.beta == 0 and self.partition:
            return GreedyBeam()(pool, k, key)
        if self.beta == 0:
            return pool.keep(ranked(pool.quality, pool.tie)[:, :k].sort(-1).values)
        kernel, log_gain = dpp_kernel(self.kernel, pool.quality, pool.similarity, self.beta)
        kernel = kernel.to(pool.similarity.dtype)  # L needs only the digits of S, and float32 is solved faster
        solve = SOLVERS[self.solver]
        return pool.keep(solve(kernel, k, log_gain, pool.quality, pool.tie, partition=self.partition))


@dataclass(frozen=True)
class D5P4(PartitionDPP):
    """The paper's main method, with the additive kernel and one selected child per parent."""

    kernel: Kernel = field(default="additive", init=False)
    partition: bool = field(default=True, init=False)


@dataclass(frozen=True)
class D5P4x(D5P4):
    """D5P4 with the multiplicative kernel."""

    beta: Beta = 1.0
    kernel: Kernel = field(default="multiplicative", init=False)


@dataclass(frozen=True)
class D5P3(D5P4):
    """D5P4 without the partition, so that lineages may die out."""

    partition: bool = field(default=False, init=False)


@dataclass(frozen=True)
class Sampler(Checked):
    """The parameters of methods that sample from a DPP instead of picking its most likely set."""

    timeless: ClassVar[bool] = True
    beta: Beta = 20.0
    kernel: Kernel = "additive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel == "multiplicative" and self.beta == 0:
            raise D5P4Error("must be above 0 for the multiplicative kernel", option="beta", value=self.beta)


@dataclass(frozen=True)
class KDPP(Sampler):
    """Draws k items S with P(S) = det(L_S) / e_k(eigenvalues of L) (Kulesza and Taskar, 2011). O(N^3 + N k^2).

    e_k is the k-th elementary symmetric polynomial. If eigenvalues coincide (as with equal rows), the eigenvectors
    would depend on the last bits of L. Therefore items are put in the order of their ties, and each diagonal entry is
    raised by a different amount of up to 1e-7 of the largest entry, far more than a rounding error and far too little
    to show in samples. Eigenvalues of at most 1e-6 of the largest entry count as zero. If fewer than k are not zero,
    the best remaining items complete the set. If L is not finite, the items are chosen by quality.
    """

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        check_size(pool, k, partition=False)
        kernel, log_gain = dpp_kernel(self.kernel, pool.quality, pool.similarity, self.beta)
        problem = prepare(kernel, k, log_gain, pool.quality, pool.tie, partition=False)
        return pool.keep(problem.restore(sample(problem, key)))


def sample(problem: Problem, key: Tensor) -> Tensor:
    """Return the items [P, k] of one k-DPP draw. key [P] keys the random numbers of the draw."""
    scale = (problem.log_gain / 2).exp()
    kernel = scale.unsqueeze(-1) * problem.kernel * scale.unsqueeze(-2)
    place = torch.arange(kernel.shape[-1], device=kernel.device)
    apart = _PARTING * uniform(torch.zeros_like(place), place).to(kernel.dtype)  # unequal, so no eigenvalues coincide
    values, vectors = torch.linalg.eigh(kernel + apart.diag())
    values = torch.where(values > 10 * _PARTING, values, 0.0)
    chosen = choose_eigenvectors(values.log(), problem.k, key)
    return _sample_projection(problem, vectors * chosen.unsqueeze(1), chosen.sum(-1), key)


def log_elementary(log_values: Tensor, k: int) -> Tensor:
    """Return a table [P, N+1, k+1] with log e_l(first m values) at (m, l), for the elementary symmetric polynomial e_l.
    log_values [P, N] are the logs of the values, minus infinity for a value of zero. O(N k)."""
    prompts, size = log_values.shape
    row = log_values.new_full((prompts, k + 1), -torch.inf)
    row[:, 0] = 0.0
    rows = [row]
    for m in range(size):
        row = row.clone()
        row[:, 1:] = torch.logaddexp(row[:, 1:], log_values[:, m : m + 1] + rows[-1][:, :-1])
        rows.append(row)
    return torch.stack(rows, 1)


def choose_eigenvectors(log_values: Tensor, k: int, key: Tensor) -> Tensor:
    """Draw k eigenvectors (or all with a positive eigenvalue, if these are fewer than k) and return their mask [P, N].

    m runs from N down to 1. Eigenvector m is taken with chance lambda_m e_{l-1}(first m-1) / e_l(first m), where l is
    the number of eigenvectors still to be taken.
    """
    size = log_values.shape[-1]
    table = log_elementary(log_values, k)
    wanted = (log_values > -torch.inf).sum(-1, keepdim=True).clamp_max(k)
    u = uniform(key.unsqueeze(-1), torch.arange(size, device=key.device), _EIGENVECTOR).to(log_values.dtype)
    taken = []
    for m in range(size, 0, -1):
        below = table[:, m - 1].gather(-1, (wanted - 1).clamp_min(0))
        chance = log_values[:, m - 1 : m] + below - table[:, m].gather(-1, wanted)
        take = (wanted > 0) & (u[:, m - 1 : m].log() < chance)
        wanted = wanted - take.to(wanted.dtype)
        taken.append(take)
    return torch.cat(taken[::-1], -1)


def _sample_projection(problem: Problem, basis: Tensor, rank: Tensor, key: Tensor) -> Tensor:
    """Draw items [P, k] of the projection DPP K = V V^T in turn, with chances proportional to K_ii given earlier items.

    basis V [P, N, N] has columns of zeros for the eigenvectors that were not drawn. rank [P] is how many
    eigenvectors were drawn. After this many items, the items with the best quality follow.
    """
    variance = (basis * basis).sum(-1)
    free = torch.ones_like(variance, dtype=torch.bool)
    rows: list[Tensor] = []
    items = []
    for t in range(problem.k):
        weight = torch.where(free, variance.clamp_min(0), 0.0)
        drawn = draw_index(weight, uniform(key.unsqueeze(-1), t, _ITEM).to(weight.dtype))
        best = argbest(torch.where(free, problem.quality, -torch.inf), problem.tie).unsqueeze(-1)
        drawing = (rank.unsqueeze(-1) > t) & (weight.sum(-1, keepdim=True) > 0)
        item = torch.where(drawing, drawn, best)
        own = basis.gather(1, item.unsqueeze(-1).expand(-1, -1, basis.shape[-1]))  # [P, 1, N]
        row = (basis @ own.transpose(1, 2)).squeeze(-1)
        for earlier in rows:
            row = row - earlier * earlier.gather(-1, item)
        row = torch.where(drawing, row / variance.gather(-1, item).sqrt(), 0.0)
        rows.append(row)
        variance = variance - row * row
        free = free.scatter(-1, item, False)
        items.append(item)
    return torch.cat(items, -1)
