"""k-DPP sampling without groups: of all sets S of k items, one is drawn with chance proportional to det(L_S)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode.view import PoolView
from ..ops.problem import Problem, prepare
from ..ops.ties import argbest
from ..rng import draw_index, uniform
from ..types import Choice
from .dpp import Sampler, check_size, dpp_kernel

_EIGENVECTOR, _ITEM = 0, 1
_PARTING = 1e-7


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
