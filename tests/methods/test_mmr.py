from __future__ import annotations

import itertools

import pytest
import torch

from d5p4.errors import D5P4Error
from d5p4.methods import MMR, GreedyBeam
from tests.methods.cases import inputs, is_transversal, keys, pool


def by_embeddings(quality: torch.Tensor, e: torch.Tensor, k: int, alpha: float) -> list[int]:
    """The definition, one prompt, on the features themselves."""
    w = len(quality) // k
    best: tuple[float, list[int]] = (-float("inf"), [])
    for start in range(k * w):
        picks, total = [start], float(quality[start])
        while len(picks) < k:
            mean = e[picks].mean(0)
            value, item = max(
                (float(quality[i] - alpha * (mean @ e[i])), i)
                for i in range(k * w)
                if i // w not in {p // w for p in picks}
            )
            picks.append(item)
            total += value
        if total > best[0] + 1e-9:
            best = (total, sorted(picks))
    return best[1]


def test_gram_form_equals_embedding_form() -> None:
    k, w, prompts = 4, 3, 10
    for alpha in (0.3, 1.0, 10.0):
        quality, _, tie = inputs(prompts, k, w, int(alpha * 10))
        e = torch.randn(prompts, k * w, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
        e = torch.nn.functional.normalize(e, dim=-1)
        parents = MMR(alpha)(pool(quality, e @ e.mT, tie), k, keys(prompts)).parents
        assert parents.tolist() == [by_embeddings(quality[p], e[p], k, alpha) for p in range(prompts)]


def test_max_form_looks_at_the_nearest_pick_only() -> None:
    """Items: a start; then one at 0.6 to both picks against one at 0.9 to one pick and 0 to the other."""
    s = torch.eye(6, dtype=torch.float64)
    for i, j, value in ((0, 4, 0.6), (2, 4, 0.6), (0, 5, 0.9)):
        s[i, j] = s[j, i] = value
    quality = torch.tensor([[1.0, 0, 1, 0, 0.2, 0.2]], dtype=torch.float64)
    view = pool(quality, s.unsqueeze(0), torch.arange(6).unsqueeze(0))
    assert MMR(1.0, starts="one")(view, 3, keys(1)).parents.tolist() == [[0, 2, 5]]
    assert MMR(1.0, form="max", starts="one")(view, 3, keys(1)).parents.tolist() == [[0, 2, 4]]


def test_without_penalty_it_is_greedy_beam() -> None:
    view = pool(*inputs(30, 4, 3, 3))
    greedy = GreedyBeam()(view, 4, keys(30)).parents
    for form, starts in itertools.product(("mean", "max"), ("one", "k", "n")):
        picked = MMR(0.0, form, starts)(view, 4, keys(30)).parents  # type: ignore[arg-type]
        assert torch.equal(picked, greedy), (form, starts)


def test_broken_similarity_and_quality_still_give_a_transversal() -> None:
    quality, similarity, tie = inputs(4, 3, 3, 0)
    similarity[0], similarity[1, 2, 3], quality[2] = torch.nan, torch.inf, torch.nan
    view = pool(quality, similarity, tie)
    parents = MMR(2.0)(view, 3, keys(4)).parents
    assert is_transversal(parents, 3, 3)
    assert torch.equal(parents[:2], GreedyBeam()(view, 3, keys(4)).parents[:2])


def test_bad_parameters_are_named() -> None:
    with pytest.raises(D5P4Error, match="-1"):
        MMR(-1)
    with pytest.raises(D5P4Error, match="median"):
        MMR(1, form="median")  # type: ignore[arg-type]
    with pytest.raises(D5P4Error, match="two"):
        MMR(1, starts="two")  # type: ignore[arg-type]
