from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from d5p4.ops.partition_map import Starts, _climb, map_inference, partition_map
from d5p4.ops.problem import prepare
from d5p4.search.dpp import dpp_kernel
from d5p4_lab.methods.exact import branch_and_bound, exhaustive
from tests.search.cases import inputs, is_transversal

SHAPES = [(2, 2), (2, 5), (3, 3), (3, 5), (4, 2), (4, 4), (5, 3), (6, 2), (6, 3)]
KERNELS = [("additive", b) for b in (0.0, 0.1, 1.0, 10.0, 100.0, 1000.0)] + [
    ("multiplicative", b) for b in (0.01, 0.1, 1.0, 100.0, 1000.0)
]


def values(kernel: Tensor, gain: Tensor | None, sets: Tensor) -> Tensor:
    """log det + gains, by slogdet."""
    p = torch.arange(len(sets)).view(-1, 1, 1)
    value = torch.linalg.slogdet(kernel[p, sets.unsqueeze(-1), sets.unsqueeze(-2)]).logabsdet
    return value if gain is None else value + gain.gather(-1, sets).sum(-1)


def sweep(shapes: list[tuple[int, int]], prompts: int, starts: Starts) -> tuple[int, int]:
    """Number of regular problems and in how many of them local search from these starts finds the optimum."""
    total = hits = 0
    for number, ((k, w), (kind, beta)) in enumerate(itertools.product(shapes, KERNELS)):
        dim, parent = (16, 768)[number % 2], (0.0, 0.7)[number // 2 % 2]
        quality, similarity, tie = inputs(prompts, k, w, number, dim=dim, parent=parent)
        kernel, gain = dpp_kernel(kind, quality, similarity, beta)
        chosen = partition_map(kernel, k, gain, quality, tie, starts=starts)
        assert is_transversal(chosen, k, w)
        optimum = exhaustive(kernel, k, gain, quality, tie)
        assert torch.equal(branch_and_bound(kernel, k, gain, quality, tie), optimum)
        problem = prepare(kernel, k, gain, quality, None)
        zeros, best = problem.score(optimum.unsqueeze(1))
        missed, value = problem.score(chosen.unsqueeze(1))
        greedy = partition_map(kernel, k, gain, quality, tie, starts=starts, local_search=False)
        _, start = problem.score(greedy.unsqueeze(1))
        regular = zeros == 0
        assert (missed[regular] == 0).all()
        assert (value[regular] <= best[regular] + 1e-8).all()
        assert (value[regular] >= start[regular] - 1e-8).all()
        total += int(regular.sum())
        hits += int((value >= best - 1e-8)[regular].sum())
    return total, hits


@pytest.mark.parametrize(
    ("shapes", "prompts", "least", "starts", "share"),
    [
        ([(3, 3), (4, 4)], 5, 90, "n", 0.99),
        ([(3, 3), (4, 4)], 5, 90, "k", 0.95),
        pytest.param(SHAPES, 22, 2000, "n", 0.99, marks=pytest.mark.full),
        pytest.param(SHAPES, 22, 2000, "k", 0.97, marks=pytest.mark.full),
    ],
    ids=["few", "few, k starts", "many", "many, k starts"],
)
def test_finds_the_optimum_of_most_problems(
    shapes: list[tuple[int, int]], prompts: int, least: int, starts: Starts, share: float
) -> None:
    """From k starts, 97 percent of many problems, and 95 percent of few, because there chance has more of a say."""
    total, hits = sweep(shapes, prompts, starts)
    assert total >= least
    assert hits >= share * total, f"{hits} of {total}"


@pytest.mark.parametrize("prompts", [2, pytest.param(12, marks=pytest.mark.full)])
def test_never_below_greedy_from_all_starts(prompts: int) -> None:
    """Features of few dimensions and a large beta, where local search from k starts loses to greedy from all items."""
    total = hits = below = 0
    for seed, (k, w, beta, shared) in enumerate(
        itertools.product((3, 4, 5), (3, 4), (0.0, 1.0, 30.0, 300.0), (0.2, 0.9))
    ):
        quality, similarity, tie = inputs(prompts, k, w, seed, dim=24, shared=shared, parent=0.0)
        kernel = dpp_kernel("additive", quality, similarity, beta)[0]
        for partition in (True, False):
            problem = prepare(kernel, k, None, quality, None, partition=partition)
            ours = map_inference(kernel, k, None, quality, tie, partition=partition)
            others = [
                map_inference(kernel, k, None, quality, tie, partition=partition, starts="n", local_search=False),
                map_inference(kernel, k, None, quality, tie, partition=partition, starts="k"),
                exhaustive(kernel, k, None, quality, tie) if partition else ours,
            ]
            zeros, value = problem.score(torch.stack([ours, *others], 1))
            assert (zeros == 0).all()
            assert (value[:, 0] >= value[:, 1] - 1e-12).all()
            if partition:
                total += prompts
                hits += int((value[:, 0] >= value[:, 3] - 1e-9).sum())
                below += int((value[:, 2] < value[:, 1] - 1e-9).sum())
    assert total == 48 * prompts and below > 0
    assert hits >= 0.99 * total, f"{hits} of {total}"


def degenerate(kind: str, k: int, w: int, prompts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """quality, kernel, tie"""
    quality, similarity, tie = inputs(prompts, k, w, seed)
    g, size = torch.Generator().manual_seed(seed), k * w
    kernel = dpp_kernel("additive", quality, similarity, 5.0)[0]
    low = torch.randn(prompts, size, max(1, k - 1), generator=g, dtype=torch.float64)
    noise = torch.randn(prompts, size, size, generator=g, dtype=torch.float64)
    same, nan, infinite = torch.arange(size) // 2 * 2, kernel.clone(), kernel.clone()
    nan[::2, 0, 1], infinite[::2, 1 % size, 1 % size] = torch.nan, torch.inf
    if kind in ("duplicates", "zero quality"):
        quality = quality * 0
    if kind == "nan quality":
        quality[:, ::3] = torch.nan
    kernels = {"rank one": torch.full_like(kernel, 3.0), "low rank": low @ low.mT, "indefinite": noise * 10}
    kernels |= {"duplicates": similarity[:, same][:, :, same], "zero quality": 5.0 * similarity, "nan": nan}
    kernels |= {"zeros": 0 * kernel, "nan quality": 0 * kernel, "negative": -kernel, "inf": infinite}
    return quality, kernels.get(kind, kernel * {"huge": 1e307, "tiny": 1e-300}.get(kind, 1.0)), tie


DEGENERATE = [
    *("rank one", "low rank", "duplicates", "zero quality", "zeros", "negative", "indefinite"),
    *("huge", "tiny", "nan", "inf", "nan quality"),
]
FEW, MANY = [(3, 2), (1, 2), (2, 1)], [(1, 4), (2, 3), (4, 3), (3, 1), (5, 2)]


@pytest.mark.parametrize(("shapes", "prompts"), [(FEW, 2), pytest.param(MANY, 16, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_any_input_gives_a_valid_set(kind: str, shapes: list[tuple[int, int]], prompts: int) -> None:
    for seed, (k, w) in enumerate(shapes):
        quality, kernel, tie = degenerate(kind, k, w, prompts, seed)
        for starts, search in itertools.product(("one", "k", "n"), (False, True)):
            chosen = partition_map(kernel, k, None, quality, tie, starts=starts, local_search=search)
            assert is_transversal(chosen, k, w), (starts, search)
        assert is_transversal(partition_map(kernel, k), k, w)
        free = map_inference(kernel, k, None, quality, tie)
        assert (free.diff(dim=-1) > 0).all() and free.min() >= 0 and free.max() < k * w
        if kind != "indefinite":  # the bound holds for kernels
            best = exhaustive(kernel, k, None, quality, tie)
            assert is_transversal(best, k, w)
            assert torch.equal(branch_and_bound(kernel, k, None, quality, tie), best)


def test_a_broken_prompt_falls_back_to_quality_and_leaves_the_others_alone() -> None:
    quality, similarity, tie = inputs(6, 3, 4, 1)
    kernel = dpp_kernel("additive", quality, similarity, 20.0)[0]
    whole = partition_map(kernel, 3, None, quality, tie)
    kernel[2, 0, 5], kernel[4, 7, 7] = torch.nan, torch.inf
    quality[4, 1] = torch.nan
    chosen = partition_map(kernel, 3, None, quality, tie)
    expected = quality.nan_to_num(nan=-1).view(6, 3, 4).argmax(-1) + torch.arange(3) * 4
    assert torch.equal(chosen[[2, 4]], expected[[2, 4]])
    assert torch.equal(chosen[[0, 1, 3, 5]], whole[[0, 1, 3, 5]])


@pytest.mark.parametrize("partition", [True, False])
def test_a_large_gain_does_not_lead_local_search_into_a_lost_rank(partition: bool) -> None:
    """Copies of rows in several groups and gains of hundreds of nats: rounding must not pass for a determinant."""
    k, w, prompts = 4, 4, 60
    quality, similarity, tie = inputs(prompts, k, w, 12)
    same = torch.tensor([0, 1, 2, 3, 0, 1, 6, 7, 2, 3, 10, 11, 6, 10, 0, 15])
    kernel, gain = dpp_kernel("multiplicative", quality, similarity[:, same][:, :, same], 0.003)
    problem = prepare(kernel, k, gain, quality, tie, partition=partition)
    start = exhaustive(kernel, k, None, None, None, partition=partition)  # regular, and with much quality left to gain
    start = problem.order.argsort(-1).gather(-1, start).sort(-1).values.unsqueeze(1)
    regular, before = problem.score(start)
    assert (regular == 0).all()
    zeros, after = problem.score(_climb(problem, start, regular == 0))
    assert (zeros == 0).all()
    assert (after >= before).all() and (after > before + 1).double().mean() > 0.9


def test_without_groups_against_all_subsets() -> None:
    hits = total = 0
    for seed, (kind, beta) in enumerate(KERNELS[1:]):
        quality, similarity, tie = inputs(20, 3, 3, seed)
        kernel, gain = dpp_kernel(kind, quality, similarity, beta)
        chosen = map_inference(kernel, 3, gain, quality, tie)
        best = exhaustive(kernel, 3, gain, quality, tie, partition=False)
        reference = torch.combinations(torch.arange(9), 3)
        by_slogdet = torch.stack([values(kernel, gain, s.expand(20, -1)) for s in reference], -1).amax(-1)
        torch.testing.assert_close(values(kernel, gain, best), by_slogdet, rtol=0, atol=1e-7)
        hits += int((values(kernel, gain, chosen) > by_slogdet - 1e-8).sum())
        total += 20
    assert hits >= 0.97 * total, f"{hits} of {total}"


def test_last_bits_of_the_kernel_do_not_decide_between_equals() -> None:
    k, w, prompts = 4, 4, 80
    quality, similarity, tie = inputs(prompts, k, w, 7)
    same = torch.arange(16) // 2 * 2
    quality, similarity = quality[:, same], similarity[:, same][:, :, same]
    kernel = dpp_kernel("additive", quality, similarity, 10.0)[0]
    noise = torch.randn(prompts, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(
        partition_map(kernel * (1 + 1e-15 * noise), k, None, quality, tie), partition_map(kernel, k, None, quality, tie)
    )


def test_gains_equal_a_scaled_kernel_and_do_not_overflow() -> None:
    quality, similarity, tie = inputs(50, 4, 4, 9)
    for beta in (1e-5, 1e-30, 1e-320):
        kernel, gain = dpp_kernel("multiplicative", quality, similarity, beta)
        chosen = partition_map(kernel, 4, gain, quality, tie)
        assert torch.equal(chosen, quality.view(50, 4, 4).argmax(-1) + torch.arange(4) * 4)
    kernel, gain = dpp_kernel("multiplicative", quality, similarity, 1.0)
    scale = (gain / 2).exp()
    scaled = scale.unsqueeze(-1) * kernel * scale.unsqueeze(-2)
    assert torch.equal(partition_map(kernel, 4, gain, quality, tie), partition_map(scaled, 4, None, quality, tie))


def test_bad_shapes_are_named() -> None:
    kernel = torch.eye(6).expand(2, 6, 6)
    for given, message in (
        ((kernel, 4), "N = 6.*k = 4"),
        ((kernel, 0), "k = 0"),
        ((torch.eye(6), 2), r"kernel\[None\] for one problem.*\[6, 6\]"),
        ((kernel, 3, None, torch.ones(1, 5)), r"quality must be \[P, N\] = \[2, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            partition_map(*given)
