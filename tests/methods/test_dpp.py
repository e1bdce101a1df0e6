from __future__ import annotations

import itertools

import pytest
import torch

from d5p4.errors import D5P4Error
from d5p4.methods import GreedyBeam, PartitionDPP
from d5p4.methods.dpp import dpp_kernel
from d5p4_lab.methods.exact import exhaustive
from tests.methods.cases import inputs, is_transversal, keys, pool
from tests.refusals import refusal

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


def test_bad_beta_is_named() -> None:
    for beta in (-0.5, float("nan"), float("inf")):
        assert str(beta) in refusal(PartitionDPP, beta)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(D5P4Error, match="beta=0"):
        dpp_kernel("multiplicative", torch.ones(1, 2), torch.ones(1, 2, 2), 0.0)
    with pytest.raises(D5P4Error, match="magic"):
        PartitionDPP(1.0, solver="magic")  # type: ignore[arg-type]
    with pytest.raises(D5P4Error, match="cubic"):
        PartitionDPP(1.0, kernel="cubic")  # type: ignore[arg-type]
    view = pool(*inputs(1, 2, 3, 0))
    with pytest.raises(D5P4Error, match="exhaustive"):
        PartitionDPP(1.0, solver="exact", partition=False)(view, 2, keys(1))
    with pytest.raises(D5P4Error, match="6 rows.*k = 4"):
        PartitionDPP(1.0)(view, 4, keys(1))
    with pytest.raises(D5P4Error, match="k = 7.*6 rows"):
        PartitionDPP(1.0, partition=False)(view, 7, keys(1))
    with pytest.raises(D5P4Error, match=r"1073741824 sets.*limit of 1000000"):
        exhaustive(torch.eye(60).unsqueeze(0), 30)


@pytest.mark.parametrize("solver", SOLVERS)
def test_beta_to_zero_is_greedy_beam(solver: str) -> None:
    view = pool(*inputs(10, 4, 3, 1))
    greedy = GreedyBeam()(view, 4, keys(10)).parents
    for kernel, beta in itertools.product(("additive", "multiplicative"), (0.0, 1e-7)):
        picked = PartitionDPP(beta, kernel, solver)(view, 4, keys(10)).parents  # type: ignore[arg-type]
        assert torch.equal(picked, greedy), (kernel, beta)


def test_beta_to_zero_without_groups_is_the_top_k() -> None:
    quality, similarity, tie = inputs(40, 4, 3, 1)
    view = pool(quality, similarity, tie)
    top = quality.topk(4).indices.sort(-1).values
    for kernel, beta in itertools.product(("additive", "multiplicative"), (0.0, 1e-7)):
        picked = PartitionDPP(beta, kernel, partition=False)(view, 4, keys(40)).parents  # type: ignore[arg-type]
        assert torch.equal(picked, top), (kernel, beta)


def test_zero_beta_asks_for_no_similarity() -> None:
    quality, _, tie = inputs(2, 2, 2, 0)

    def explode() -> torch.Tensor:
        raise AssertionError("similarity was asked for")

    for partition in (True, False):
        PartitionDPP(0.0, partition=partition)(pool(quality, explode, tie), 2, keys(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["additive", "multiplicative"])
def test_larger_beta_is_more_diverse(kernel: str) -> None:
    quality, similarity, tie = inputs(200, 4, 4, 2)
    p = torch.arange(200).view(-1, 1, 1)
    spread = []
    for beta in (0.0, 0.1, 1.0, 10.0, 1000.0):
        s = PartitionDPP(beta, kernel)(pool(quality, similarity, tie), 4, keys(200)).parents  # type: ignore[arg-type]
        spread.append(torch.linalg.slogdet(similarity[p, s.unsqueeze(-1), s.unsqueeze(-2)]).logabsdet.mean().item())
    assert spread == sorted(spread) and spread[-1] > spread[0] + 0.1


def test_edges_of_k_and_w() -> None:
    one_child, (quality, similarity, tie) = pool(*inputs(6, 5, 1, 3)), inputs(6, 1, 5, 3)
    for solver in SOLVERS:
        select = PartitionDPP(3.0, solver=solver)  # type: ignore[arg-type]
        assert select(one_child, 5, keys(6)).parents.tolist() == [list(range(5))] * 6, solver
        picked = select(pool(quality, similarity, tie), 1, keys(6)).parents
        assert torch.equal(picked, quality.argmax(-1, keepdim=True)), solver


def test_solvers_are_ordered_by_strength() -> None:
    quality, similarity, tie = inputs(60, 5, 3, 4)
    kernel = dpp_kernel("additive", quality, similarity, 50.0)[0]
    p = torch.arange(60).view(-1, 1, 1)
    value = {}
    for solver in SOLVERS:
        s = PartitionDPP(50.0, solver=solver)(pool(quality, similarity, tie), 5, keys(60)).parents  # type: ignore[arg-type]
        assert is_transversal(s, 5, 3)
        value[solver] = torch.linalg.slogdet(kernel[p, s.unsqueeze(-1), s.unsqueeze(-2)]).logabsdet.mean().item()
    assert value["one-start"] < value["k-starts"] < value["n-starts"] <= value["exact"] + 1e-9
    assert value["k-starts"] < value["local-search"] <= value["full-search"] <= value["exact"] + 1e-9
    assert value["n-starts"] <= value["full-search"]
    assert abs(value["exact"] - value["exhaustive"]) < 1e-12


def test_without_groups_siblings_may_both_win() -> None:
    quality = torch.tensor([[1.0, 1.0, 0.1, 0.1]], dtype=torch.float64)
    view = pool(quality, torch.eye(4, dtype=torch.float64).unsqueeze(0), torch.arange(4).unsqueeze(0))
    assert PartitionDPP(0.5, partition=False)(view, 2, keys(1)).parents.tolist() == [[0, 1]]
    assert PartitionDPP(0.5, partition=False, solver="exhaustive")(view, 2, keys(1)).parents.tolist() == [[0, 1]]
    assert PartitionDPP(0.5)(view, 2, keys(1)).parents.tolist() == [[0, 2]]


def test_all_rows_alike_is_solved_exactly_at_any_size() -> None:
    """The pool of the first step: no determinant, no quality; branch and bound must not enumerate 10^6 equal sets."""
    _, _, tie = inputs(2, 6, 12, 0)
    view = pool(torch.zeros(2, 72).double(), torch.ones(2, 72, 72).double(), tie)
    picked = PartitionDPP(10.0, solver="exact")(view, 6, keys(2)).parents
    assert torch.equal(picked, tie.view(2, 6, 12).argmin(-1) + torch.arange(6) * 12)
