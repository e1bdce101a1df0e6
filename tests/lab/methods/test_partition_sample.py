from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d5p4.search.dpp import dpp_kernel
from d5p4_lab.methods import PartitionSample
from d5p4_lab.methods.exact import transversals
from tests.search.cases import chi_square, inputs, is_transversal, keys, pool, repeat


def chances(kernel: Tensor, gain: Tensor | None, k: int, temperature: float) -> Tensor:
    """Probabilities [w^k] of one prompt, in the order of `transversals`."""
    sets = transversals(k, kernel.shape[-1] // k, kernel.device)
    value = torch.linalg.slogdet(kernel[sets.unsqueeze(-1), sets.unsqueeze(-2)]).logabsdet
    if gain is not None:
        value = value + gain[sets].sum(-1)
    return (value / temperature).softmax(-1)


CASES = [("additive", 5.0, 1.0), ("additive", 5.0, 0.3), ("multiplicative", 1.0, 1.0)]


@pytest.mark.parametrize(("kernel", "beta", "temperature", "limit", "draws"), [
    ("additive", 5.0, 0.3, 20_000, 2000), ("multiplicative", 1.0, 1.0, 0, 2000),  # enumerated, and by a chain
    *[pytest.param(*case, limit, 6000, marks=pytest.mark.full) for case in CASES for limit in (20_000, 0)],
])  # fmt: skip
def test_draws_follow_the_determinants(kernel: str, beta: float, temperature: float, limit: int, draws: int) -> None:
    quality, similarity, tie = inputs(1, 3, 3, 8)
    matrix, gain = dpp_kernel(kernel, quality, similarity, beta)
    selector = PartitionSample(beta, kernel, temperature, limit)  # type: ignore[arg-type]
    view = pool(repeat(quality, draws), repeat(similarity, draws), repeat(tie, draws))
    parents = selector(view, 3, keys(draws)).parents
    assert is_transversal(parents, 3, 3)
    code = ((parents % 3) * torch.tensor([9, 3, 1])).sum(-1)
    expected = chances(matrix[0], None if gain is None else gain[0], 3, temperature)
    assert chi_square(torch.bincount(code, minlength=27), expected) > 1e-3


@pytest.mark.parametrize("limit", [20_000, 0])
def test_any_input_gives_a_valid_set(limit: int) -> None:
    quality, similarity, tie = inputs(5, 3, 3, 9)
    similarity[0], similarity[1, 2, 3], similarity[2] = torch.nan, torch.inf, 1.0
    quality[2], quality[3] = 0.0, torch.nan
    parents = PartitionSample(3.0, limit=limit)(pool(quality, similarity, tie), 3, keys(5)).parents
    assert is_transversal(parents, 3, 3)
    best = quality.nan_to_num(nan=-1).view(5, 3, 3).argmax(-1) + torch.arange(3) * 3
    assert torch.equal(parents[:2], best[:2])
