"""Permuting groups, and items inside groups, permutes the choice: every selector, also with twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d5p4.decode.view import PoolView
from d5p4.search import ESMC, KDPP, MMR, Categorical, GreedyBeam, PartitionDPP, Random
from d5p4.types import Selector
from d5p4_lab.methods import SRSMC, PartitionSample
from tests.search.cases import inputs, keys, permute, pool, shuffle

K, W, PROMPTS = 4, 3, 16
SELECTORS: dict[str, Selector] = {
    "beam": GreedyBeam(),
    "cat": Categorical(0.5),
    "random": Random(),
    "mmr": MMR(3.0),
    "mmr max": MMR(3.0, "max"),
    "dpp": PartitionDPP(10.0),
    "dpp multiplicative": PartitionDPP(1.0, "multiplicative"),
    "dpp greedy": PartitionDPP(10.0, solver="one-start"),
    "dpp exact": PartitionDPP(10.0, solver="exact"),
    "dpp without groups": PartitionDPP(10.0, partition=False),
    "k-dpp": KDPP(10.0),
    "k-dpp multiplicative": KDPP(1.0, "multiplicative"),
    "sample": PartitionSample(10.0),
    "sample chain": PartitionSample(10.0, limit=0),
    "e-smc": ESMC(),
    "e-smc systematic": ESMC(resampling="systematic"),
    "sr-smc": SRSMC(ess=1.0),
}


def view(quality: Tensor, similarity: Tensor, tie: Tensor) -> PoolView:
    scores = dict(score=lambda kind, positions: quality - 1, path=quality - 1)
    return pool(quality, similarity, tie, **scores, vocabulary=50, step=8)


def pools(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    quality, similarity, tie = inputs(PROMPTS, K, W, 11)
    if kind == "twins":  # groups 0 and 1 hold the same children, group 2 two equal ones
        same = torch.tensor([0, 1, 2, 0, 1, 2, 6, 6, 8, 9, 10, 11])
    elif kind == "all alike":
        same = torch.zeros(12, dtype=torch.int64)
    else:
        same = torch.arange(12)
    return quality[:, same], similarity[:, same][:, :, same], tie


@pytest.mark.parametrize(
    "kind", ["twins", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("generic", "all alike"))]
)
@pytest.mark.parametrize("name", SELECTORS)
def test_neither_the_order_of_the_pool_nor_other_prompts_change_the_choice(name: str, kind: str) -> None:
    select = SELECTORS[name]
    values = pools(kind)
    key = keys(PROMPTS, 5)
    chosen = select(view(*values), K, key).parents
    for seed in range(2):
        order = shuffle(PROMPTS, K, W, seed)
        again = select(view(*(permute(x, order) for x in values)), K, key).parents
        assert torch.equal(order.gather(-1, again).sort(-1).values, chosen)
    for p in (0, PROMPTS - 1):
        alone = select(view(*(x[p : p + 1] for x in values)), K, key[p : p + 1]).parents
        assert torch.equal(alone, chosen[p : p + 1])
