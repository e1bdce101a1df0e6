from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import d5p4
from d5p4.decode.view import PoolView
from d5p4.methods import ESMC, SRSMC
from tests.fake import FakeModel
from tests.methods.cases import chi_square, keys, pool, repeat, ties
from tests.refusals import refusal

VOCABULARY = 16
REWARD = torch.tensor([[0.9, 0.2, 0.5, 0.65]], dtype=torch.float64)


def view(reward: Tensor, step: int = 8, **more: Any) -> PoolView:
    """A pool whose rows have these rewards: h = (1 - r) log2 V bits, handed over as negative nats."""
    asked = []

    def score(kind: str, positions: str) -> Tensor:
        asked.append((kind, positions))
        assert (kind, positions) == ("entropy", "masked")
        return -(1 - reward) * math.log(VOCABULARY)

    more.setdefault("vocabulary", VOCABULARY)
    nothing = torch.zeros_like(reward)
    return pool(
        nothing, nothing.unsqueeze(-1), ties(1, reward.shape[1]).expand(reward.shape), score=score, step=step, **more
    )


@pytest.mark.parametrize("weights, potential", [
    ("literal", "max"), ("textbook", "max"),
    pytest.param("literal", "mean", marks=pytest.mark.full), pytest.param("textbook", "mean", marks=pytest.mark.full),
])  # fmt: skip
def test_multinomial_counts(weights: str, potential: str) -> None:
    draws = 5000
    selector = ESMC(lam=2.0, weights=weights, potential=potential)  # type: ignore[arg-type]
    choice = selector(view(repeat(REWARD, draws)), 2, keys(draws))
    g = (2 * REWARD[0]).exp() if potential == "max" else 2 * REWARD[0] + 1
    expected = g.softmax(-1) if weights == "literal" else g / g.sum()
    assert choice.children == 1 and choice.parents.shape == (draws, 4)
    assert (choice.parents.diff(dim=-1) >= 0).all()
    assert chi_square(torch.bincount(choice.parents.flatten(), minlength=4), expected) > 1e-3
    # Copies within one draw are independent too: number of times the best row is drawn is binomial.
    times = torch.bincount((choice.parents == 0).sum(-1), minlength=5)
    p = float(expected[0])
    binomial = torch.tensor([math.comb(4, i) * p**i * (1 - p) ** (4 - i) for i in range(5)], dtype=torch.float64)
    assert chi_square(times, binomial) > 1e-3


def test_literal_weights_nearly_choose_the_best_row_and_textbook_weights_do_not() -> None:
    """softmax(exp(λr)) depends on differences of exp(λr), which are large at λ = 5; exp(λr) / Σ depends on ratios."""
    reward = torch.tensor([[0.70, 0.75, 0.80, 0.85]], dtype=torch.float64)
    literal, textbook = (ESMC(lam=5.0, weights=weights).chances(reward)[0] for weights in ("literal", "textbook"))
    assert float(literal[-1]) > 0.99 and 0.3 < float(textbook[-1]) < 0.4
    torch.testing.assert_close(textbook[1:] / textbook[:-1], torch.full((3,), math.exp(0.25), dtype=torch.float64))


def test_systematic_counts_differ_from_their_mean_by_less_than_one() -> None:
    draws = 5000
    selector = ESMC(lam=2.0, weights="textbook", resampling="systematic")
    parents = selector(view(repeat(REWARD, draws)), 2, keys(draws)).parents
    expected = (2 * REWARD[0]).softmax(-1)
    counts = torch.stack([(parents == i).sum(-1) for i in range(4)], -1)
    assert ((counts - 4 * expected).abs() < 1).all()
    for i in range(4):
        low = math.floor(4 * expected[i])
        up = float(4 * expected[i] - low)
        seen = torch.bincount(counts[:, i] - low, minlength=2)
        assert chi_square(seen, torch.tensor([1 - up, up], dtype=torch.float64)) > 1e-3


def test_resamples_only_at_its_interval_and_never_at_the_first_step() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    selector = ESMC(lam=5.0, interval=4)
    moved = [s for s in range(13) if selector(view(reward, s), 1, keys(1)).parents.tolist() != [[0, 1, 2, 3]]]
    assert moved == [4, 8, 12]


def test_resamples_only_where_the_effective_size_is_small() -> None:
    reward = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0.5, 0.49]], dtype=torch.float64)
    parents = ESMC(lam=20.0, weights="textbook", ess=0.5)(view(reward), 1, keys(2)).parents
    assert parents.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]


def test_incremental_weights_follow_the_ancestors() -> None:
    selector = ESMC(lam=2.0, interval=1, weights="textbook", incremental=True)
    state: dict[str, Any] = {}
    first = selector(view(REWARD, 1, state=state), 1, keys(1)).parents
    assert len(first.unique()) < 4  # with this key some row was drawn twice, so rows have moved
    new = torch.tensor([[0.95, 0.9, 0.6, 0.7]], dtype=torch.float64)
    seen: list[Tensor] = []

    class Spy(ESMC):
        def chances(self, reward: Tensor) -> Tensor:
            seen.append(reward)
            return super().chances(reward)

    Spy(2.0, 1, "textbook", incremental=True)(view(new, 2, state=state), 1, keys(1))
    torch.testing.assert_close(seen[0], new - REWARD.gather(-1, first))


def test_unused_weights_are_carried_until_the_next_resampling() -> None:
    selector = ESMC(lam=0.01, interval=1, weights="textbook", incremental=True, ess=0.5)
    state: dict[str, Any] = {}
    selector(view(REWARD, 1, state=state), 1, keys(1))
    assert all((value == 0).all() for value in state.values())


def test_nan_entropy_counts_as_the_worst() -> None:
    reward = torch.tensor([[0.9, torch.nan, 0.5, 0.4]], dtype=torch.float64)
    parents = ESMC(lam=100.0, weights="textbook")(view(reward), 1, keys(1)).parents
    assert parents.tolist() == [[0, 0, 0, 0]]


def test_bad_parameters_are_named() -> None:
    for bad in (
        {"lam": -1}, {"interval": 0}, {"weights": "w"}, {"potential": "sum"}, {"resampling": "r"}, {"ess": 1.5},
        {"potential": "mean", "incremental": True},
    ):  # fmt: skip
        assert re.search(f"{next(iter(bad))}.*{next(iter(bad.values()))}", refusal(ESMC, **bad)), bad
    assert "got 0" in refusal(ESMC(), view(REWARD, vocabulary=0), 1, keys(1))


PATH = torch.tensor([[-1.0, -2.0, -4.0, -1.5]], dtype=torch.float64)


def particles(path: Tensor, step: int = 8, **more: Any) -> PoolView:
    """A pool whose rows have these sums of log-probabilities."""
    nothing = torch.zeros_like(path)
    tie = ties(1, path.shape[1]).expand(path.shape)
    return pool(nothing, nothing.unsqueeze(-1), tie, path=path, step=step, **more)


def test_self_rewarding_parents_are_drawn_by_their_likelihood() -> None:
    draws = 5000
    parents = SRSMC(ess=1.0)(particles(repeat(PATH, draws)), 2, keys(draws)).parents
    expected = PATH[0].exp() / PATH[0].exp().sum()
    assert chi_square(torch.bincount(parents.flatten(), minlength=4), expected) > 1e-3


def test_self_rewarding_weights_are_one_after_a_resampling_and_are_carried_without_one() -> None:
    state: dict[str, Any] = {}
    select = SRSMC(interval=1)
    few = torch.tensor([[-1.0, -1.0, -1.0, -2.0], [-1.0, -90.0, -90.0, -90.0]], dtype=torch.float64)
    parents = select(particles(few, 1, state=state), 1, keys(2)).parents
    assert parents.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    # Prompt 0 has its old weights: rows 0 to 2 together reach one half of N, row 3 does not. Prompt 1 starts anew.
    more = torch.tensor([[-1.0, -1.0, -60.0, -61.0], [-2.0, -2.1, -2.2, -2.3]], dtype=torch.float64)
    assert select(particles(more, 2, state=state), 1, keys(2)).parents.tolist() == [[0, 1, 2, 3]] * 2
    more = torch.tensor([[-1.0, -3.0, -60.0, -61.0], [-90.0, -2.1, -90.0, -90.0]], dtype=torch.float64)
    parents = select(particles(more, 3, state=state), 1, keys(2, seed=1)).parents
    assert set(parents[0].tolist()) <= {0, 1} and parents[1].tolist() == [1, 1, 1, 1]


def test_self_rewarding_particles_are_resampled_at_block_edges() -> None:
    path = torch.tensor([[0.0, -90, -90, -90]], dtype=torch.float64)

    def moved(select: SRSMC, blocks: bool) -> list[int]:
        """The steps at which rows move, if all rows but the first are unlikely at every step."""
        state: dict[str, Any] = {}
        steps = []
        for step in range(12):
            start = torch.tensor([step // 5 * 5]) if blocks else None
            parents = select(particles(path, step, state=state, start=start), 1, keys(1)).parents
            steps += [step] if parents.tolist() != [[0, 1, 2, 3]] else []
            state.pop("sr_smc_path", None)  # or the rows would be equally likely from now on
        return steps

    assert moved(SRSMC(), blocks=True) == [5, 10]
    assert moved(SRSMC(interval=4), blocks=True) == [4, 8]
    assert moved(SRSMC(), blocks=False) == [8]


def decoded(method: str, **options: Any) -> tuple[d5p4.Result, list[Any]]:
    shots: list[Any] = []
    keep = ("tokens", "next_logprobs", "source")
    options = dict(gen_length=9, seed=5, eos="never", logprobs=True, temperature=2.0) | options
    result = d5p4.generate(
        FakeModel(),
        ["abc", "head"],
        method=method,
        callback=lambda shot: shots.append({n: getattr(shot, n) for n in keep} | {"path": shot.view.path}) and None,
        **options,
    )
    return result, shots


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_self_rewarding_weights_are_the_log_probabilities_of_a_real_decode() -> None:
    _, shots = decoded("sr-smc", k=2, w=3, block_length=3)
    logp, before, moves = torch.zeros(2, 6, 9, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64), 0
    for step, shot in enumerate(shots):
        path = logp.sum(-1)
        torch.testing.assert_close(shot["path"], path)
        w = (path - before).softmax(-1)
        resample = (1 / w.square().sum(-1) < 3) & (step in (3, 6))
        assert ((shot["source"] == torch.arange(6)).all(-1) | resample).all()
        moves += int((shot["source"] != torch.arange(6)).any(-1).sum())
        before = torch.where(resample[:, None], path.gather(1, shot["source"]), before)
        logp = shot["next_logprobs"]
    assert moves > 0


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_self_rewarding_particles_that_are_never_resampled_are_the_likeliest_of_independent_answers() -> None:
    smc, _ = decoded("sr-smc", k=2, w=4, interval=100)
    independent, _ = decoded("independent", k=8)
    assert independent.logprobs is not None
    for ours, answers, values in zip(smc.answers, independent.answers, independent.logprobs, strict=True):
        order = sorted(range(8), key=lambda i: -sum(values[i]))  # noqa: B023
        assert sorted(ours) == sorted(answers[i] for i in order[:2])


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
@pytest.mark.parametrize("options", [{"method": "e-smc", "lam": 20.0}, {"method": "sr-smc", "block_length": 3}])
def test_prompts_outside_of_the_window_are_not_changed_by_others_that_select(options: dict[str, Any]) -> None:
    options |= dict(reveal="threshold", tau=0.8, select_window=(0.3, 0.8), temperature=1.5, gen_length=24, k=2, w=3)
    model, prompts = FakeModel(scale=2.0, seed=3), ["abc", "ahead", "c", "bigfee", "jig"]
    together = d5p4.generate(model, prompts, seed=5, **options).answers
    assert together == [d5p4.generate(model, prompt, seed=5, **options).answers[0] for prompt in prompts]


def test_bad_parameters_of_self_rewarding_particles_are_named() -> None:
    for bad in ({"interval": 0}, {"resampling": "r"}, {"ess": 0}, {"ess": 1.5}, {"ess": None}):
        assert next(iter(bad)) in refusal(SRSMC, **bad), bad
