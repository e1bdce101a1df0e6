"""The reveal tree: k different answers, by a search that chooses rows before it runs them.

Children are enumerated (`project.enumerated`), so all rows of the tree differ. A greedy search over the SHORTLIST * K
best children of a prompt keeps a set A of K = k + spare rows for which this sum is large:

    Σ_{i in A} G_i + λ log det S_A,      S_ij = ρ^(d_ij + h_ij / 2)

G is the joint log-probability of a row at temperature 0, and its perturbed value otherwise. λ is the option
`diversity`; with 0, the K best rows are kept. S is `ops.gram.token_kernel` of the tokens before the end of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ..ops.gram import token_kernel
from ..ops.partition_map import map_inference
from ..ops.ties import ranked
from ..options import Checked, Option
from ..types import Choice

if TYPE_CHECKING:
    from ..decode.tree import Leaves
    from ..decode.view import PoolView

SHORTLIST = 4  # the DPP chooses K of the SHORTLIST * K best children
MOST_STARTS = 32  # with more beams, the greedy search has one start instead of K, which would take minutes


def awake_rows(pool: PoolView, k: int) -> Tensor:
    """Return the indices [P, k] of the rows that are awake. If there are fewer than k, others fill the last places."""
    assert pool.awake is not None
    return (~pool.awake).to(torch.uint8).argsort(dim=-1, stable=True)[:, :k]


@dataclass(frozen=True)
class Tree(Checked):
    """Keeps every row that was run, and prunes the children before they are run."""

    diversity: Annotated[float, Option("Weight of diversity among branches; 0 keeps the best.", least=0)] = 0.0

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        return pool.keep(awake_rows(pool, k))

    def prune(self, leaves: Leaves, k: int, key: Tensor) -> Tensor:
        """Return the indices [P, k] of the leaves that are kept. Leaves without a row have the value -inf."""
        order = ranked(leaves.value, leaves.tie)
        if self.diversity == 0 or k == 1:
            return order[:, :k]
        order = order[:, : SHORTLIST * k]
        value, tie = leaves.value.gather(1, order), leaves.tie.gather(1, order)
        exists = value > -torch.inf
        similarity = self.similarity(leaves, order)
        similarity = torch.where(exists[:, :, None] & exists[:, None, :], similarity, 0.0)
        similarity = similarity.diagonal_scatter(torch.ones_like(value, dtype=similarity.dtype), 0, 1, 2)
        # A place without a row is chosen only if there are fewer than k rows: it is far worse than the worst row.
        least = torch.where(exists, value, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0)
        gain = torch.where(exists, value, least - 1e4 * (1 + self.diversity)) / self.diversity
        starts: Literal["k", "one"] = "k" if k <= MOST_STARTS else "one"
        chosen = map_inference(similarity, k, gain, None, tie, starts=starts, local_search=False)
        return order.gather(1, chosen)

    def similarity(self, leaves: Leaves, order: Tensor) -> Tensor:
        """Return the similarity [P, n, n] of the leaves with the indices order [P, n]."""
        return token_kernel(leaves.rows(order), leaves.mask_id)
