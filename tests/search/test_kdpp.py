from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d5p4.search import KDPP
from d5p4.search.dpp import dpp_kernel
from tests.search.cases import chi_square, inputs, keys, pool, repeat


def subset_chances(kernel: Tensor, gain: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """All subsets [M, k] of one prompt and their probabilities [M]."""
    sets = torch.combinations(torch.arange(kernel.shape[-1]), k)
    det = torch.linalg.det(kernel[sets.unsqueeze(-1), sets.unsqueeze(-2)]).clamp_min(0)
    if gain is not None:
        det = det * gain[sets].sum(-1).exp()
    return sets, det / det.sum()


def count(parents: Tensor, sets: Tensor, size: int) -> Tensor:
    place = size ** torch.arange(sets.shape[-1])
    number = {int(code): i for i, code in enumerate((sets * place).sum(-1))}
    return torch.bincount(torch.tensor([number[int(c)] for c in (parents * place).sum(-1)]), minlength=len(sets))


@pytest.mark.parametrize(("kernel", "beta"), [
    ("additive", 2.0), pytest.param("additive", 100.0, marks=pytest.mark.full), ("multiplicative", 0.7),
])  # fmt: skip
def test_draws_follow_the_determinants(kernel: str, beta: float) -> None:
    draws = 8000
    quality, similarity, tie = inputs(1, 3, 2, 5, dim=5)
    matrix, gain = dpp_kernel(kernel, quality, similarity, beta)
    sets, chances = subset_chances(matrix[0], None if gain is None else gain[0], 3)
    view = pool(repeat(quality, draws), repeat(similarity, draws), repeat(tie, draws))
    parents = KDPP(beta, kernel)(view, 3, keys(draws)).parents  # type: ignore[arg-type]
    assert chi_square(count(parents, sets, 6), chances) > 1e-3


def test_equal_eigenvalues_and_equal_rows_do_not_change_the_chances() -> None:
    draws, (_, _, tie) = 8000, inputs(1, 3, 2, 0)
    for values, content in (([0.5] * 3 + [1.0] * 3, [*range(6)]), ([0.0] * 6, [0, 0, 2, 2, 4, 4])):
        quality = torch.tensor([values], dtype=torch.float64)
        similarity = torch.eye(6, dtype=torch.float64)[content][:, content][None]
        sets, chances = subset_chances(dpp_kernel("additive", quality, similarity, 0.25)[0][0], None, 2)
        view = pool(*(repeat(x, draws) for x in (quality, similarity, tie)))
        assert chi_square(count(KDPP(0.25)(view, 2, keys(draws)).parents, sets, 6), chances) > 1e-3


def test_last_bits_do_not_choose_among_equal_eigenvalues() -> None:
    prompts = 60
    quality = torch.rand(prompts, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    quality = quality[:, torch.arange(12) // 4 * 4]
    similarity = torch.eye(12, dtype=torch.float64).expand(prompts, 12, 12)
    _, _, tie = inputs(prompts, 4, 3, 0)
    noise = torch.randn(prompts, 12, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    draws = [
        KDPP(0.3)(pool(quality, s, tie), 4, keys(prompts)).parents for s in (similarity, similarity + 1e-15 * noise)
    ]
    assert torch.equal(*draws)


def test_missing_rank_is_filled_by_quality() -> None:
    quality = torch.tensor([[0.3, 0.9, 0.1, 0.8, 0.5, 0.7]], dtype=torch.float64)
    tie = torch.arange(6).unsqueeze(0)
    view = pool(repeat(quality, 40), torch.ones(40, 6, 6).double(), repeat(tie, 40))
    parents = KDPP(0.5, "multiplicative")(view, 3, keys(40)).parents  # rank 1: one draw, then the best two left
    for row in parents.tolist():
        assert len({1, 3} & set(row)) == 2 or 5 in row
        assert any(sorted([drawn, *[i for i in (1, 3, 5) if i != drawn][:2]]) == row for drawn in range(6))
    broken = pool(quality, torch.full((1, 6, 6), torch.nan).double(), tie)
    assert KDPP(1.0)(broken, 3, keys(1)).parents.tolist() == [[1, 3, 5]]
