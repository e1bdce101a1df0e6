from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from d5p4.decode.view import PoolView
from d5p4.search import ESMC
from tests.search.cases import chi_square, keys, pool, repeat, ties

VOCABULARY = 16
REWARD = torch.tensor([[0.9, 0.2, 0.5, 0.65]], dtype=torch.float64)


def view(reward: Tensor, step: int = 8, **more: Any) -> PoolView:
    """A pool whose rows have these rewards: h = (1 - r) log2 V bits, handed over as negative nats."""

    def score(kind: str, positions: str) -> Tensor:
        assert (kind, positions) == ("entropy", "masked")
        return -(1 - reward) * math.log(VOCABULARY)

    more.setdefault("vocabulary", VOCABULARY)
    nothing = torch.zeros_like(reward)
    return pool(
        nothing, nothing.unsqueeze(-1), ties(1, reward.shape[1]).expand(reward.shape), score=score, step=step, **more
    )


@pytest.mark.parametrize("weights", ["literal", "textbook"])
def test_multinomial_counts(weights: Any) -> None:
    draws = 5000
    choice = ESMC(lam=2.0, weights=weights)(view(repeat(REWARD, draws)), 2, keys(draws))
    g = (2 * REWARD[0]).exp()
    expected = g.softmax(-1) if weights == "literal" else g / g.sum()
    assert choice.children == 1 and choice.parents.shape == (draws, 4)
    assert (choice.parents.diff(dim=-1) >= 0).all()
    assert chi_square(torch.bincount(choice.parents.flatten(), minlength=4), expected) > 1e-3


def test_systematic_counts_differ_from_their_mean_by_less_than_one() -> None:
    draws = 5000
    selector = ESMC(lam=2.0, weights="textbook", resampling="systematic")
    parents = selector(view(repeat(REWARD, draws)), 2, keys(draws)).parents
    expected = (2 * REWARD[0]).softmax(-1)
    counts = torch.stack([(parents == i).sum(-1) for i in range(4)], -1)
    assert ((counts - 4 * expected).abs() < 1).all()
    for i in range(4):
        low = math.floor(4 * expected[i])
        up = float(4 * expected[i] - low)
        seen = torch.bincount(counts[:, i] - low, minlength=2)
        assert chi_square(seen, torch.tensor([1 - up, up], dtype=torch.float64)) > 1e-3


def test_resamples_only_at_its_interval_and_never_at_the_first_step() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    selector = ESMC(lam=5.0, interval=4)
    moved = [s for s in range(13) if selector(view(reward, s), 1, keys(1)).parents.tolist() != [[0, 1, 2, 3]]]
    assert moved == [4, 8, 12]


def test_resamples_only_where_the_effective_size_is_small() -> None:
    reward = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.49]], dtype=torch.float64)
    parents = ESMC(lam=20.0, weights="textbook", ess=0.5)(view(reward), 1, keys(2)).parents
    assert parents.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]


def test_nan_entropy_counts_as_the_worst() -> None:
    reward = torch.tensor([[0.9, torch.nan, 0.5, 0.4]], dtype=torch.float64)
    parents = ESMC(lam=100.0, weights="textbook")(view(reward), 1, keys(1)).parents
    assert parents.tolist() == [[0, 0, 0, 0]]
