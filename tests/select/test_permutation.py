"""Permuting groups, and items inside groups, permutes the choice: every selector, also with twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d5p4.select import ESMC, KDPP, MMR, Categorical, GreedyBeam, PartitionDPP, PartitionSample, Random
from d5p4.types import PoolView, Selector
from tests.select.cases import inputs, is_transversal, keys, permute, pool, shuffle

K, W, PROMPTS = 4, 3, 40
SELECTORS: dict[str, Selector] = {
    "beam": GreedyBeam(),
    "cat": Categorical(0.5),
    "random": Random(),
    "mmr": MMR(3.0),
    "mmr max": MMR(3.0, "max", "k"),
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
}


def view(quality: Tensor, similarity: Tensor, tie: Tensor) -> PoolView:
    return pool(quality, similarity, tie, score=lambda kind, positions: quality - 1, vocabulary=50, step=8)


def pools(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    quality, similarity, tie = inputs(PROMPTS, K, W, 11)
    if kind == "twins":  # groups 0 and 1 hold the same children, group 2 two equal ones
        same = torch.tensor([0, 1, 2, 0, 1, 2, 6, 6, 8, 9, 10, 11])
    elif kind == "all alike":
        same = torch.zeros(12, dtype=torch.int64)
    else:
        same = torch.arange(12)
    return quality[:, same], similarity[:, same][:, :, same], tie


@pytest.mark.parametrize("kind", ["generic", "twins", "all alike"])
@pytest.mark.parametrize("name", SELECTORS)
def test_permuting_the_pool_permutes_the_choice(name: str, kind: str) -> None:
    select = SELECTORS[name]
    values = pools(kind)
    key = keys(PROMPTS, 5)
    chosen = select(view(*values), K, key).parents
    for seed in range(3):
        order = shuffle(PROMPTS, K, W, seed)
        again = select(view(*(permute(x, order) for x in values)), K, key).parents
        assert torch.equal(order.gather(-1, again).sort(-1).values, chosen)


@pytest.mark.parametrize("name", SELECTORS)
def test_prompts_do_not_see_each_other(name: str) -> None:
    select = SELECTORS[name]
    values = pools("twins")
    key = keys(PROMPTS, 6)
    whole = select(view(*values), K, key).parents
    for p in range(0, PROMPTS, 7):
        alone = select(view(*(x[p : p + 1] for x in values)), K, key[p : p + 1]).parents
        assert torch.equal(alone, whole[p : p + 1])


@pytest.mark.parametrize("name", ["cat", "random", "k-dpp", "sample", "sample chain", "e-smc"])
def test_another_key_is_another_draw(name: str) -> None:
    values = pools("generic")
    assert not torch.equal(
        SELECTORS[name](view(*values), K, keys(PROMPTS, 1)).parents,
        SELECTORS[name](view(*values), K, keys(PROMPTS, 2)).parents,
    )


@pytest.mark.parametrize("name", [n for n in SELECTORS if not n.startswith("e-smc")])
def test_one_child_each_returns_everyone(name: str) -> None:
    parents = SELECTORS[name](view(*inputs(5, 6, 1, 3)), 6, keys(5)).parents
    assert parents.tolist() == [list(range(6))] * 5


@pytest.mark.parametrize("name", [n for n in SELECTORS if not n.startswith(("e-smc", "k-dpp")) and "without" not in n])
def test_one_beam(name: str) -> None:
    assert is_transversal(SELECTORS[name](view(*inputs(5, 1, 6, 3)), 1, keys(5)).parents, 1, 6)
