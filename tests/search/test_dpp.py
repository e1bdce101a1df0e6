from __future__ import annotations

import itertools

import pytest
import torch

from d5p4.search import GreedyBeam, PartitionDPP
from d5p4.search.dpp import dpp_kernel
from d5p4_lab.methods.exact import exhaustive
from tests.refusals import refusal
from tests.search.cases import inputs, keys, pool

SOLVERS = ["full-search", "local-search", "one-start", "k-starts", "n-starts", "exact", "exhaustive"]


def test_kernels_are_the_papers() -> None:
    quality, similarity, _ = inputs(2, 2, 2, 0)
    torch.testing.assert_close(
        dpp_kernel("additive", quality, similarity, 3.0)[0], torch.diag_embed(quality) + 3 * similarity
    )
    s, gain = dpp_kernel("multiplicative", quality, similarity, 4.0)
    scale = torch.diag_embed((quality / 4).exp())
    expected = torch.linalg.slogdet(scale @ similarity @ scale).logabsdet
    torch.testing.assert_close(torch.linalg.slogdet(s).logabsdet + gain.sum(-1), expected)
    assert "beta=0" in refusal(dpp_kernel, "multiplicative", quality, similarity, 0.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_beta_to_zero_is_greedy_beam_or_without_groups_the_top_k(solver: str) -> None:
    view = pool(*inputs(10, 4, 3, 1))
    greedy, top = GreedyBeam()(view, 4, keys(10)).parents, view.quality.topk(4).indices.sort(-1).values
    for kernel, beta in itertools.product(("additive", "multiplicative"), (0.0, 1e-7)):
        picked = PartitionDPP(beta, kernel, solver)(view, 4, keys(10)).parents  # type: ignore[arg-type]
        assert torch.equal(picked, greedy), (kernel, beta)
        free = PartitionDPP(beta, kernel, partition=False)(view, 4, keys(10)).parents  # type: ignore[arg-type]
        assert torch.equal(free, top), (kernel, beta)


def test_all_rows_alike_is_solved_exactly_at_any_size() -> None:
    """The pool of the first step: no determinant, no quality; branch and bound must not enumerate 10^6 equal sets."""
    _, _, tie = inputs(2, 6, 12, 0)
    view = pool(torch.zeros(2, 72).double(), torch.ones(2, 72, 72).double(), tie)
    picked = PartitionDPP(10.0, solver="exact")(view, 6, keys(2)).parents
    assert torch.equal(picked, tie.view(2, 6, 12).argmin(-1) + torch.arange(6) * 12)
    assert "1073741824 sets are more than the limit of 1000000" in refusal(exhaustive, torch.eye(60)[None], 30)
