"""Self-rewarding SMC: when it resamples, by which weights, and what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import d5p4
from d5p4.decode.view import PoolView
from d5p4_lab.methods import SRSMC
from tests.fake import FakeModel
from tests.methods.cases import chi_square, keys, pool, repeat, ties
from tests.refusals import refusal

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
