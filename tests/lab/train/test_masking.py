"""The loss is an unbiased estimate, and its masking chances are spread evenly."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from d5p4_lab.train.masking import LEAST, chances, masks, weighted_cross_entropy

VOCABULARY, WIDTH, LENGTH = 5, 4, 3


@pytest.fixture(scope="module")
def head() -> tuple[Tensor, Tensor, Tensor]:
    """Weight [V, D], bias [V] and a last token that may not be predicted."""
    draw = torch.Generator().manual_seed(0)
    banned = torch.arange(VOCABULARY) == VOCABULARY - 1
    return torch.randn(VOCABULARY, WIDTH, generator=draw), torch.randn(VOCABULARY, generator=draw), banned


def cross_entropies(states: Tensor, head: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """[M], from the definition and without the banned token."""
    weight, bias, banned = head
    scores = (states @ weight.T + bias)[:, ~banned].exp()
    return -(scores.gather(1, targets[:, None])[:, 0] / scores.sum(1)).log()


def test_the_cross_entropy_is_weighted_and_leaves_out_banned_tokens(head) -> None:
    states, targets, weights = torch.randn(6, WIDTH), torch.arange(6) % 4, torch.rand(6)
    expected = (cross_entropies(states, head, targets) * weights).sum()
    torch.testing.assert_close(weighted_cross_entropy(states, *head, targets, weights), expected)


def test_over_all_masks_the_weighted_loss_is_the_enumerated_bound(head) -> None:
    """The states depend on the mask, as a model's do: each mask's loss counts with the chance of that mask."""
    chance, targets = 0.3, torch.tensor([0, 2, 3])
    base, shift = torch.randn(LENGTH, WIDTH), torch.randn(LENGTH, WIDTH)
    expected = estimate = 0.0
    for bits in product([False, True], repeat=LENGTH):
        masked = torch.tensor(bits)
        states = base + masked.float() @ shift
        likely = chance ** sum(bits) * (1 - chance) ** (LENGTH - sum(bits))
        expected += likely / chance * float(cross_entropies(states, head, targets)[masked].sum())
        weights = torch.full((LENGTH,), 1 / chance)[masked]
        estimate += likely * float(weighted_cross_entropy(states[masked], *head, targets[masked], weights))
    assert estimate == pytest.approx(expected, rel=1e-5)


def test_drawn_masks_give_the_full_cross_entropy_on_average(head) -> None:
    """Where the states do not depend on the mask, the expectation is the plain sum of cross-entropies."""
    rows, draws = 8, 3000
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(rows * LENGTH).reshape(rows, LENGTH) % 4
    states = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    full = float(cross_entropies(states.flatten(0, 1), head, targets.flatten()).sum())
    found = []
    for _ in range(draws):
        chance = chances(rows, generator)
        masked = masks(chance, LENGTH, generator)
        weights = (1 / chance)[:, None].expand_as(masked)[masked]
        found.append(float(weighted_cross_entropy(states[masked], *head, targets[masked], weights)))
    values = torch.tensor(found)
    error = float(values.std()) / draws**0.5
    assert error < 0.05 * full, "too noisy to tell"
    assert abs(float(values.mean()) - full) < 4 * error


@pytest.mark.parametrize("rows", [1, 7, 128])
def test_chances_lie_one_in_each_equal_part(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    means = []
    for _ in range(200):
        chance = chances(rows, generator)
        assert chance.shape == (rows,) and float(chance.min()) >= LEAST and float(chance.max()) <= 1
        even = ((chance.double() - LEAST) / (1 - LEAST) * rows).sort().values
        # Half a part of room for each end: rounding may put a value just over an edge.
        assert ((even - torch.arange(rows) - 0.5).abs() <= 0.5 + 1e-3).all()
        means.append(float(chance[0]))
    assert 0.4 < sum(means) / len(means) < 0.6, "each row by itself is uniform"
    assert min(means) < 0.05 and max(means) > 0.95


def test_masks_have_the_chance_of_their_row() -> None:
    chance = torch.tensor([LEAST, 0.25, 0.9])
    share = masks(chance, 20_000, torch.Generator().manual_seed(3)).float().mean(1)
    assert ((share - chance).abs() < 4 * (chance * (1 - chance) / 20_000).sqrt()).all()
