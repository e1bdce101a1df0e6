"""D5P4 picks the most likely set of a determinantal point process (DPP) among sets with one child of every parent."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from ..decode.view import PoolView
from ..errors import D5P4Error
from ..ops.partition_map import partition_map
from ..ops.ties import ranked
from ..options import Checked, Option
from ..types import Choice
from .beam import GreedyBeam, by_group

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
