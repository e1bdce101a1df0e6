"""Identity, GreedyBeam, Categorical, Random."""

from __future__ import annotations

import re

import torch

from d5p4.methods import Categorical, GreedyBeam, Identity, Random
from tests.methods.cases import chi_square, inputs, is_transversal, keys, pool, repeat
from tests.refusals import refusal


def test_identity_keeps_everyone() -> None:
    choice = Identity()(pool(*inputs(3, 2, 3, 0)), 2, keys(3))
    assert choice.parents.tolist() == [list(range(6))] * 3 and choice.children == 1


def test_greedy_beam_takes_the_best_child_of_every_parent() -> None:
    quality, similarity, tie = inputs(5, 3, 4, 0)
    choice = GreedyBeam()(pool(quality, similarity, tie, width=4), 3, keys(5))
    assert torch.equal(choice.parents, quality.view(5, 3, 4).argmax(-1) + torch.arange(3) * 4)
    assert choice.children == 4
    assert GreedyBeam()(pool(quality, similarity, tie, last=True), 3, keys(5)).children == 1


def test_greedy_beam_asks_for_no_similarity() -> None:
    quality, _, tie = inputs(2, 2, 2, 0)

    def explode() -> torch.Tensor:
        raise AssertionError("similarity was asked for")

    for selector in (GreedyBeam(), Categorical(0.5), Random()):
        selector(pool(quality, explode, tie), 2, keys(2))  # type: ignore[arg-type]


def test_nan_quality_is_the_worst() -> None:
    quality, similarity, tie = inputs(4, 2, 3, 0)
    quality[:, 0], quality[:, 3:] = torch.nan, torch.nan
    for selector in (GreedyBeam(), Categorical(0.3)):
        parents = selector(pool(quality, similarity, tie), 2, keys(4)).parents
        assert is_transversal(parents, 2, 3) and (parents[:, 0] > 0).all()


def test_categorical_draws_from_the_softmax() -> None:
    draws = 20_000
    quality, similarity, tie = (repeat(x, draws) for x in inputs(1, 2, 5, 1))
    for temperature in (0.1, 3.0):
        parents = Categorical(temperature)(pool(quality, similarity, tie), 2, keys(draws)).parents
        chances = (quality[0].view(2, 5) / temperature).softmax(-1)
        joint = torch.bincount(parents[:, 0] * 5 + parents[:, 1] - 5, minlength=25)
        assert chi_square(joint, torch.outer(chances[0], chances[1]).flatten()) > 1e-3, temperature


def test_random_is_uniform_and_ignores_quality() -> None:
    draws = 20_000
    quality, similarity, tie = (repeat(x, draws) for x in inputs(1, 2, 5, 1))
    parents = Random()(pool(quality, similarity, tie), 2, keys(draws)).parents
    assert (
        chi_square(torch.bincount(parents[:, 0] * 5 + parents[:, 1] - 5, minlength=25), torch.ones(25).double()) > 1e-3
    )


def test_cold_categorical_is_greedy() -> None:
    view = pool(*inputs(50, 3, 4, 2))
    greedy = GreedyBeam()(view, 3, keys(50)).parents
    for temperature in (0.0, 1e-6, 1e-300):
        assert torch.equal(Categorical(temperature)(view, 3, keys(50)).parents, greedy)


def test_bad_input_is_named() -> None:
    for temperature in (-1.0, float("nan"), float("inf")):
        assert str(temperature) in refusal(Categorical, temperature)
    assert re.search("6 rows.*k = 4", refusal(GreedyBeam(), pool(*inputs(1, 2, 3, 0)), 4, keys(1)))
