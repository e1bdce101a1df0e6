"""D5P4 picks the most likely set of a determinantal point process (DPP) among sets with one child of every parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.partition_map import Starts, partition_map
from ..ops.ties import ranked
from ..options import Checked, Option
from ..types import Choice
from .beam import GreedyBeam, by_group
from .exact import branch_and_bound, exhaustive

if TYPE_CHECKING:
    from ..decode.view import PoolView

Solver = Literal["full-search", "local-search", "one-start", "k-starts", "n-starts", "exact", "exhaustive"]
Kernel = Annotated[Literal["additive", "multiplicative"], Option("L = diag(Q) + beta S, or e^(Q/beta) S e^(Q/beta).")]
Beta = Annotated[float, Option("Weight of diversity; with 0, only quality counts.", least=0)]

_SEARCHES: dict[str, tuple[Starts, bool]] = {  # the starts of greedy elimination, and whether swaps follow
    "full-search": ("n", True),
    "local-search": ("k", True),
    "one-start": ("one", False),
    "k-starts": ("k", False),
    "n-starts": ("n", False),
}


def dpp_kernel(kind: str, quality: Tensor, similarity: Tensor, beta: float) -> tuple[Tensor, Tensor | None]:
    """Return the kernel L [P, N, N] and log_gain [P, N] from quality Q [P, N] and similarity S [P, N, N].

    additive: L = diag(Q) + beta S, and log_gain is None. multiplicative: L = diag(e^{Q/beta}) S diag(e^{Q/beta}),
    returned as S and log_gain = 2 Q / beta so that nothing overflows. Then det(L_A) = det(S_A) exp(sum of log_gain over
    A). A larger beta gives more diverse sets.
    """
    if kind == "additive":
        return torch.diag_embed(quality) + beta * similarity, None
    if beta == 0:
        raise D5P4Error("must be above 0, because the multiplicative kernel divides by it", option="beta", value=beta)
    return similarity, 2 * quality / beta


@dataclass(frozen=True)
class PartitionDPP(Checked):
    """Picks the set S with the largest det(L_S) among sets with one item per group (in D5P3, all sets of k items).

    kernel: "additive" (D5P4) or "multiplicative" (D5P4x). A larger beta gives more diverse sets; with beta = 0, only
    quality counts. solver: "full-search" (the default: greedy elimination from all N starts, then swaps),
    "local-search" (the same from k starts), "one-start", "k-starts", "n-starts" (greedy elimination alone), "exact"
    (branch and bound), "exhaustive" (compares all sets). "full-search" also compares the greedy sets that it starts
    from, so det(L_S) is never smaller than with "n-starts", the solver of the paper's code: see `ops.partition_map`.
    """

    beta: Beta = 20.0
    kernel: Kernel = "additive"
    solver: Annotated[Solver, Option("How the best set is found.", hidden=("http",))] = "full-search"
    partition: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver == "exact" and not self.partition:
            raise D5P4Error("needs the partition; without it use 'exhaustive'", option="solver", value="exact")

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        if self.partition:
            by_group(pool.tie, k)
        elif not 1 <= k <= pool.size:
            raise D5P4Error(f"cannot choose k = {k} of a pool of {pool.size} rows; k must be from 1 to {pool.size}")
        if self.beta == 0:
            return GreedyBeam()(pool, k, key) if self.partition else pool.keep(top(pool.quality, pool.tie, k))
        kernel, log_gain = dpp_kernel(self.kernel, pool.quality, pool.similarity, self.beta)
        kernel = kernel.to(pool.similarity.dtype)  # L needs only the digits of S, and float32 is solved faster
        problem = (kernel, k, log_gain, pool.quality, pool.tie)
        if self.solver == "exact":
            return pool.keep(branch_and_bound(*problem))
        if self.solver == "exhaustive":
            return pool.keep(exhaustive(*problem, partition=self.partition))
        starts, swaps = _SEARCHES[self.solver]
        return pool.keep(partition_map(*problem, partition=self.partition, starts=starts, local_search=swaps))


@dataclass(frozen=True)
class Sampler(Checked):
    """The parameters of methods that sample from a DPP instead of picking its most likely set."""

    beta: Beta = 20.0
    kernel: Kernel = "additive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel == "multiplicative" and self.beta == 0:
            raise D5P4Error("must be above 0 for the multiplicative kernel", option="beta", value=self.beta)


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


def top(quality: Tensor, tie: Tensor, k: int) -> Tensor:
    """Return the indices [P, k] of the k best items, sorted by index."""
    return ranked(quality, tie)[:, :k].sort(-1).values
