from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from d5p4.methods.dpp import dpp_kernel
from d5p4.ops.partition_map import Starts, _climb, condition, map_inference, partition_map
from d5p4.ops.problem import prepare
from d5p4_lab.methods.exact import branch_and_bound, exhaustive
from tests.methods.cases import inputs, is_transversal, permute, shuffle, ties

SHAPES = [(2, 2), (2, 5), (3, 3), (3, 5), (4, 2), (4, 4), (5, 3), (6, 2), (6, 3)]
LARGE_SHAPES = [(4, 5), (5, 4), (5, 5), (6, 4), (6, 5)]
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


@pytest.mark.full
@pytest.mark.parametrize(("starts", "share"), [("n", 0.99), ("k", 0.95)])
@pytest.mark.parametrize("shape", LARGE_SHAPES)
def test_finds_the_optimum_of_large_problems(shape: tuple[int, int], starts: Starts, share: float) -> None:
    total, hits = sweep([shape], 40, starts)
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
    n = k * w
    kernel = dpp_kernel("additive", quality, similarity, 5.0)[0]
    if kind == "rank one":
        kernel = torch.full_like(kernel, 3.0)
    elif kind == "low rank":
        e = torch.randn(prompts, n, max(1, k - 1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        kernel = e @ e.mT
    elif kind == "duplicates":
        same = torch.arange(n) // 2 * 2
        quality, kernel = quality[:, same] * 0, similarity[:, same][:, :, same]
    elif kind == "zero quality":
        quality = torch.zeros_like(quality)
        kernel = 5.0 * similarity
    elif kind == "zeros":
        kernel = torch.zeros_like(kernel)
    elif kind == "negative":
        kernel = -kernel
    elif kind == "indefinite":
        kernel = torch.randn(prompts, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
    elif kind == "huge":
        kernel = kernel * 1e307
    elif kind == "tiny":
        kernel = kernel * 1e-300
    elif kind == "nan":
        kernel[::2, 0, 1] = torch.nan
    elif kind == "inf":
        kernel[::2, 1, 1] = torch.inf
    elif kind == "nan quality":
        quality[:, ::3] = torch.nan
        kernel = torch.zeros_like(kernel)
    return quality, kernel, tie


DEGENERATE = [
    *("rank one", "low rank", "duplicates", "zero quality", "zeros", "negative", "indefinite"),
    *("huge", "tiny", "nan", "inf", "nan quality"),
]


def test_any_input_gives_a_valid_set() -> None:
    for kind in DEGENERATE:
        check_valid(kind, [(3, 2), (1, 2), (2, 1)], 2)


@pytest.mark.full
@pytest.mark.parametrize("kind", DEGENERATE)
def test_any_input_of_any_shape_gives_a_valid_set(kind: str) -> None:
    check_valid(kind, [(1, 4), (2, 3), (4, 3), (3, 1), (5, 2)], 16)


def check_valid(kind: str, shapes: list[tuple[int, int]], prompts: int) -> None:
    for seed, (k, w) in enumerate(shapes):
        quality, kernel, tie = degenerate(kind, k, w, prompts, seed)
        for starts, search in itertools.product(("one", "k", "n"), (False, True)):
            assert is_transversal(
                partition_map(kernel, k, None, quality, tie, starts=starts, local_search=search), k, w
            ), kind
        assert is_transversal(partition_map(kernel, k), k, w), kind
        free = map_inference(kernel, k, None, quality, tie)
        assert (free.diff(dim=-1) > 0).all() and free.min() >= 0 and free.max() < k * w, kind
        if kind != "indefinite":  # the bound holds for kernels
            best = exhaustive(kernel, k, None, quality, tie)
            assert is_transversal(best, k, w), kind
            assert torch.equal(branch_and_bound(kernel, k, None, quality, tie), best), kind


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


def test_asymmetric_noise_changes_nothing() -> None:
    quality, similarity, tie = inputs(32, 4, 4, 2)
    kernel = dpp_kernel("additive", quality, similarity, 10.0)[0]
    noise = torch.randn(32, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    skewed = kernel + (noise - noise.mT)
    assert torch.equal(partition_map(skewed, 4, None, quality, tie), partition_map(kernel, 4, None, quality, tie))


def test_regular_sets_win_over_singular_ones() -> None:
    """Group 0 holds a copy of group 1's best item; its other item is poor but independent."""
    kernel = torch.tensor([[[9.0, 0, 9, 0], [0, 0.1, 0, 0], [9, 0, 9, 0], [0, 0, 0, 1e-9]]])
    quality = torch.tensor([[9.0, 0, 9, 0]])
    assert partition_map(kernel, 2, None, quality).tolist() == [[1, 2]]
    kernel[0, 1, 1] = 0  # now only the pair with the negligible item is not better than singular ones
    assert partition_map(kernel, 2, None, quality).tolist() == exhaustive(kernel, 2, None, quality).tolist()


def test_swap_ratio_is_the_ratio_of_determinants() -> None:
    quality, similarity, _ = inputs(8, 4, 3, 3)
    kernel = dpp_kernel("additive", quality, similarity, 10.0)[0]
    sets = torch.tensor([0, 4, 7, 11]).expand(8, -1)
    inverse, cross, solved = condition(kernel, torch.arange(8), sets)
    residual = kernel.diagonal(dim1=-2, dim2=-1) - (cross * solved).sum(1)
    before = values(kernel, None, sets)
    for slot, item in itertools.product(range(4), range(12)):
        if item in sets[0]:
            continue
        after = sets.clone()
        after[:, slot] = item
        ratio = residual[:, item] * inverse[:, slot, slot] + solved[:, slot, item] ** 2
        torch.testing.assert_close(ratio.log(), values(kernel, None, after) - before, rtol=0, atol=1e-9)


def test_more_starts_are_better_on_average_and_local_search_never_worse() -> None:
    quality, similarity, tie = inputs(100, 5, 4, 4)
    kernel = dpp_kernel("additive", quality, similarity, 30.0)[0]
    value = {}
    for starts, search in itertools.product(("one", "k", "n"), (False, True)):
        chosen = partition_map(kernel, 5, None, quality, tie, starts=starts, local_search=search)
        value[starts, search] = values(kernel, None, chosen)
    means = [value[starts, False].mean() for starts in ("one", "k", "n")]
    assert means[0] < means[1] < means[2] < value["k", True].mean() <= value["n", True].mean()
    for starts in ("one", "k", "n"):
        assert (value[starts, True] >= value[starts, False] - 1e-9).all()


def test_result_of_local_search_has_no_better_neighbour() -> None:
    quality, similarity, tie = inputs(40, 4, 4, 5)
    kernel, gain = dpp_kernel("multiplicative", quality, similarity, 2.0)
    chosen = partition_map(kernel, 4, gain, quality, tie, starts="one")
    value = values(kernel, gain, chosen)
    for slot, place in itertools.product(range(4), range(4)):
        near = chosen.clone()
        near[:, slot] = slot * 4 + place
        assert (values(kernel, gain, near) <= value + 1e-8).all()


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


@pytest.mark.full  # tests/methods/test_permutation.py has the quick ones
@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("solver", ["one", "k", "n", "greedy", "exhaustive", "bound", "free"])
def test_permuting_the_pool_permutes_the_choice(solver: str, twins: bool) -> None:
    k, w, prompts = 4, 3, 60
    quality, similarity, tie = inputs(prompts, k, w, 6)
    if twins:  # groups 0 and 1 hold the same children, and group 2 two equal ones
        same = torch.tensor([0, 1, 2, 0, 1, 2, 6, 6, 8, 9, 10, 11])
        quality, similarity = quality[:, same], similarity[:, same][:, :, same]
    solve = {
        "one": lambda *a: partition_map(*a, starts="one"),
        "k": lambda *a: partition_map(*a, starts="k"),
        "n": partition_map,
        "greedy": lambda *a: partition_map(*a, local_search=False),
        "exhaustive": exhaustive,
        "bound": branch_and_bound,
        "free": map_inference,
    }[solver]
    for kind, beta in (("additive", 10.0), ("multiplicative", 1.0)):
        kernel, gain = dpp_kernel(kind, quality, similarity, beta)
        chosen = solve(kernel, k, gain, quality, tie)
        for seed in range(3):
            order = shuffle(prompts, k, w, seed)
            again = solve(
                permute(kernel, order),
                k,
                None if gain is None else permute(gain, order),
                permute(quality, order),
                permute(tie, order),
            )
            assert torch.equal(order.gather(-1, again).sort(-1).values, chosen)


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


def test_prompts_do_not_see_each_other() -> None:
    quality, similarity, tie = inputs(20, 4, 4, 8)
    kernel = dpp_kernel("additive", quality, similarity, 100.0)[0]
    whole = partition_map(kernel, 4, None, quality, tie)
    alone = [partition_map(kernel[p : p + 1], 4, None, quality[p : p + 1], tie[p : p + 1]) for p in range(20)]
    assert torch.equal(whole, torch.cat(alone))
    assert partition_map(kernel[:0], 4).shape == (0, 4)


def test_gains_do_not_overflow() -> None:
    quality, similarity, tie = inputs(50, 4, 4, 9)
    for beta in (1e-5, 1e-30, 1e-320):
        kernel, gain = dpp_kernel("multiplicative", quality, similarity, beta)
        chosen = partition_map(kernel, 4, gain, quality, tie)
        assert torch.equal(chosen, quality.view(50, 4, 4).argmax(-1) + torch.arange(4) * 4)


def test_gains_equal_a_scaled_kernel() -> None:
    quality, similarity, tie = inputs(50, 4, 4, 10)
    kernel, gain = dpp_kernel("multiplicative", quality, similarity, 1.0)
    scale = (gain / 2).exp()
    scaled = scale.unsqueeze(-1) * kernel * scale.unsqueeze(-2)
    assert torch.equal(partition_map(kernel, 4, gain, quality, tie), partition_map(scaled, 4, None, quality, tie))


def test_bad_shapes_are_named() -> None:
    kernel = torch.eye(6).expand(2, 6, 6)
    with pytest.raises(ValueError, match="N = 6.*k = 4"):
        partition_map(kernel, 4)
    with pytest.raises(ValueError, match="k = 0"):
        partition_map(kernel, 0)
    with pytest.raises(ValueError, match="k = 7"):
        map_inference(kernel, 7)
    with pytest.raises(ValueError, match="some"):
        partition_map(kernel, 2, starts="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[6, 6\]"):
        partition_map(torch.eye(6), 2)


def test_ties_of_sets_are_decided_by_their_smallest_members() -> None:
    tie = ties(1, 6, 3)
    chosen = exhaustive(torch.ones(1, 6, 6), 3, None, torch.zeros(1, 6), tie)
    assert torch.equal(chosen, tie.view(1, 3, 2).argmin(-1) + torch.arange(3) * 2)


def test_arrays_are_taken_and_bad_shapes_are_named() -> None:
    kernel = np.eye(6)[None] + 0.1
    assert partition_map(kernel, np.int64(3)).tolist() == [[0, 2, 4]]
    with pytest.raises(ValueError, match=r"kernel\[None\] for one problem"):
        partition_map(kernel[0], 3)
    with pytest.raises(ValueError, match=r"quality must be \[P, N\] = \[1, 6\]"):
        partition_map(kernel, 3, quality=np.ones((1, 5)))
    with pytest.raises(ValueError, match="k must be a whole number, got 2.0"):
        partition_map(kernel, 2.0)  # type: ignore[arg-type]
