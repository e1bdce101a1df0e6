"""Methods that ignore similarity, diverse beam search, and what every method refuses or does not ask for."""

from __future__ import annotations

import torch

from d5p4.search import ESMC, KDPP, MMR, BestOfN, Categorical, GreedyBeam, PartitionDPP, Random
from d5p4_lab.methods import ODD, SRSMC, PartitionSample
from tests.refusals import refusal
from tests.search.cases import chi_square, inputs, is_transversal, keys, pool, repeat


def test_greedy_beam_takes_the_best_child_of_every_parent() -> None:
    quality, similarity, tie = inputs(5, 3, 4, 0)
    choice = GreedyBeam()(pool(quality, similarity, tie, width=4), 3, keys(5))
    assert torch.equal(choice.parents, quality.view(5, 3, 4).argmax(-1) + torch.arange(3) * 4)
    assert choice.children == 4
    assert GreedyBeam()(pool(quality, similarity, tie, last=True), 3, keys(5)).children == 1


def test_nan_quality_is_the_worst() -> None:
    quality, similarity, tie = inputs(4, 2, 3, 0)
    quality[:, 0], quality[:, 3:] = torch.nan, torch.nan
    for selector in (GreedyBeam(), Categorical(0.3), MMR(2.0)):
        parents = selector(pool(quality, similarity, tie), 2, keys(4)).parents
        assert is_transversal(parents, 2, 3) and (parents[:, 0] > 0).all()


def test_categorical_draws_from_the_softmax_and_random_from_all() -> None:
    draws = 20_000
    quality, similarity, tie = (repeat(x, draws) for x in inputs(1, 2, 5, 1))
    softmax = [(Categorical(t), (quality[0].view(2, 5) / t).softmax(-1)) for t in (0.1, 3.0)]
    for selector, chances in (*softmax, (Random(), torch.ones(2, 5).double())):
        parents = selector(pool(quality, similarity, tie), 2, keys(draws)).parents
        joint = torch.bincount(parents[:, 0] * 5 + parents[:, 1] - 5, minlength=25)
        assert chi_square(joint, torch.outer(chances[0], chances[1]).flatten()) > 1e-3, selector


def test_cold_categorical_and_unweighted_mmr_are_greedy() -> None:
    view = pool(*inputs(50, 3, 4, 2))
    greedy = GreedyBeam()(view, 3, keys(50)).parents
    cold = [Categorical(temperature) for temperature in (0.0, 1e-6, 1e-300)]
    unweighted = [MMR(0.0, "mean"), MMR(0.0, "max")]
    for selector in (*cold, *unweighted):
        assert torch.equal(selector(view, 3, keys(50)).parents, greedy), selector


def by_embeddings(quality: torch.Tensor, e: torch.Tensor, k: int, alpha: float) -> list[int]:
    """The definition of MMR, one prompt, on the features themselves."""
    w = len(quality) // k
    best: tuple[float, list[int]] = (-float("inf"), [])
    for start in range(k * w):
        picks, total = [start], float(quality[start])
        while len(picks) < k:
            mean, taken = e[picks].mean(0), {p // w for p in picks}
            free = (i for i in range(k * w) if i // w not in taken)
            value, item = max((float(quality[i] - alpha * (mean @ e[i])), i) for i in free)
            picks.append(item)
            total += value
        if total > best[0] + 1e-9:
            best = (total, sorted(picks))
    return best[1]


def test_mmr_equals_its_definition() -> None:
    k, w, prompts = 4, 3, 10
    for alpha in (0.3, 1.0, 10.0):
        quality, _, tie = inputs(prompts, k, w, int(alpha * 10))
        e = torch.randn(prompts, k * w, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
        e = torch.nn.functional.normalize(e, dim=-1)
        parents = MMR(alpha)(pool(quality, e @ e.mT, tie), k, keys(prompts)).parents
        assert parents.tolist() == [by_embeddings(quality[p], e[p], k, alpha) for p in range(prompts)]


BAD = [
    *((Categorical, {"score_temperature": x}) for x in (-1.0, float("nan"), float("inf"))),
    *((MMR, one) for one in ({"alpha": -1}, {"form": "median"})),
    *((PartitionDPP, one) for one in ({"beta": -0.5}, {"beta": float("nan")}, {"solver": "magic"}, {"kernel": "x"})),
    *((KDPP, one) for one in ({"beta": -2}, {"beta": 0, "kernel": "multiplicative"})),
    *((ESMC, one) for one in ({"lam": -1}, {"interval": 0}, {"weights": "w"}, {"resampling": "r"}, {"ess": 1.5})),
    *((SRSMC, one) for one in ({"interval": 0}, {"resampling": "r"}, {"ess": 0}, {"ess": None})),
    *((PartitionSample, one) for one in ({"set_temperature": 0.0}, {"limit": -1}, {"moves": 0}, {"beta": -3})),
    *((ODD, {"alpha": -1}), (BestOfN, {"rank": "luck"})),
]


def test_bad_parameters_are_named() -> None:
    for table, given in BAD:
        name, value = next(iter(given.items()))
        message = refusal(table, **given)
        assert name in message and str(value) in message, (table, given)
    view = pool(*inputs(1, 2, 3, 0))
    for selector, k, message in (
        (GreedyBeam(), 4, "a pool of 6 rows does not split into k = 4 groups"),
        (PartitionDPP(1.0), 4, "a pool of 6 rows does not split into k = 4 groups"),
        (PartitionDPP(1.0, partition=False), 7, "cannot choose k = 7 of a pool of 6 rows"),
        (KDPP(1.0), 9, "cannot choose k = 9 of a pool of 6 rows"),
        (PartitionDPP(1.0, solver="exact", partition=False), 2, "use 'exhaustive'"),
        (PartitionDPP(0.0, "multiplicative"), 2, "(nothing was refused)"),  # no kernel is needed
    ):
        assert message in refusal(selector, view, k, keys(1)), selector
