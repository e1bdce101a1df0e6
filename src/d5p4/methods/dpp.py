"""D5P4: the most likely set of a determinantal point process, with one child of every parent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor

from ..errors import D5P4Error
from ..kernel import build
from ..ops.partition_map import map_inference
from ..ops.ties import ranked
from ..options import Option
from ..types import Choice, PoolView
from .beam import GreedyBeam
from .common import Checked, by_group
from .exact import branch_and_bound, exhaustive

Solver = Literal["local-search", "one-start", "k-starts", "n-starts", "exact", "exhaustive"]
Kernel = Annotated[Literal["additive", "multiplicative"], Option("diag(Q) + beta S, or e^(Q/beta) S e^(Q/beta).")]
Beta = Annotated[float, Option("Weight of diversity; 0 looks at quality alone.", least=0)]


@dataclass(frozen=True)
class PartitionDPP(Checked):
    """argmax of det(L_S) over sets with one item per group (partition) or over all sets of k items (D5P3).

    kernel: "additive" (D5P4) or "multiplicative" (D5P4x); larger beta, more diverse; beta = 0 is quality alone.
    solver: "local-search" (greedy from k starts and swaps from each, the default), greedy alone from one, k or all N
    starts, "exact" (branch and bound), "exhaustive" (every set).
    """

    beta: Beta = 20.0
    kernel: Kernel = "additive"
    solver: Annotated[Solver, Option("How the best set is searched for.", hidden=("http",))] = "local-search"
    partition: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver == "exact" and not self.partition:
            raise D5P4Error("needs the partition; without it use 'exhaustive'", option="solver", value="exact")

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        if self.partition:
            by_group(pool.tie, k)
        elif not 1 <= k <= pool.size:
            raise D5P4Error(f"cannot choose k = {k} of a pool of {pool.size} rows")
        if self.beta == 0:
            return GreedyBeam()(pool, k, key) if self.partition else pool.keep(top(pool.quality, pool.tie, k))
        kernel, log_gain = build(self.kernel, pool.quality, pool.similarity, self.beta)
        kernel = kernel.to(pool.similarity.dtype)  # no finer than what it is made of; float32 takes the fast solver
        return pool.keep(self._solve(kernel, k, log_gain, pool.quality, pool.tie))

    def _solve(self, kernel: Tensor, k: int, log_gain: Tensor | None, quality: Tensor, tie: Tensor) -> Tensor:
        if self.solver == "exact":
            return branch_and_bound(kernel, k, log_gain, quality, tie)
        if self.solver == "exhaustive":
            return exhaustive(kernel, k, log_gain, quality, tie, partition=self.partition)
        search = self.solver == "local-search"
        return map_inference(
            kernel,
            k,
            log_gain,
            quality,
            tie,
            partition=self.partition,
            starts="one" if self.solver == "one-start" else "n" if self.solver == "n-starts" else "k",
            local_search=search,
        )


@dataclass(frozen=True)
class D5P4(PartitionDPP):
    """The paper's method: additive kernel, one child per parent."""

    kernel: Kernel = field(default="additive", init=False)
    partition: bool = field(default=True, init=False)


@dataclass(frozen=True)
class D5P4x(D5P4):
    """The multiplicative kernel."""

    beta: Beta = 1.0
    kernel: Kernel = field(default="multiplicative", init=False)


@dataclass(frozen=True)
class D5P3(D5P4):
    """Without the partition, so that lineages may die out."""

    partition: bool = field(default=False, init=False)


def top(quality: Tensor, tie: Tensor, k: int) -> Tensor:
    """The k best items [P, k], ascending."""
    return ranked(quality, tie)[:, :k].sort(-1).values
