"""SR-SMC, self-rewarding SMC (Luo et al., 2026, arXiv 2602.01849), prefers rows whose tokens were likely.

With p(i) the probability, at temperature 1, that the token at position i had at its reveal:

    log w = Σ log p(i) over the positions revealed since the row's ancestors were last resampled
    if 1 / Σ w² < ess N, for weights w that sum to 1: draw N parents with chances w; then all w are 1

At the end, the rows with the largest Σ log p(i) over all positions are the answers. The paper resamples at the ends of
blocks of 32 tokens with N = 4 and ess = 1/2, at temperature 1 with a reveal threshold of 0.9, and returns one row. For
BD3-LM and MDLM it resamples every 4 steps. The authors' code does not reset w, but subtracts the mean of log w.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from d5p4 import Choice, Final, Kept, Option, PoolView
from d5p4.ops.ties import ranked
from d5p4.search.smc import Particles, Resampling

_PATH, _START = "sr_smc_path", "sr_smc_start"


@dataclass(frozen=True)
class SRSMC(Particles):
    """At block edges, or at every `interval`, draws N parents with replacement if few rows have most of the weight."""

    interval: Annotated[
        float | None,
        Option(
            "Steps (or share of positions) between two resamplings.",
            above=0,
            unset="block edges; without blocks, 8 steps or 1/8",
        ),
    ] = None
    resampling: Resampling = "multinomial"
    ess: Annotated[float, Option("Resample if the share of effective particles is below this.", above=0, most=1)] = 0.5

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        due = self.due(pool)
        if due is False:
            return pool.stay()
        before = pool.state.get(_PATH, torch.zeros_like(pool.path))
        parents, moved = self.resampled(pool, (pool.path - before).softmax(-1), due, key)
        pool.state[_PATH] = torch.where(moved, pool.path.gather(-1, parents), before)
        return Choice(parents, 1)

    def due(self, pool: PoolView) -> Tensor | bool:
        """A prompt is at a block edge when the window position at which its block starts has changed."""
        if self.interval is not None or pool.start is None:
            return super().due(pool)
        before = pool.state.get(_START, torch.zeros_like(pool.start))
        pool.state[_START] = pool.start
        return pool.start > before

    def finish(self, final: Final, k: int) -> Kept:
        """Return the k particles (rows) with the largest sum of log-probabilities."""
        return Kept(ranked(final.path, final.tie)[:, :k])
