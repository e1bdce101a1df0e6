"""The GRPO loop of the lab: it learns from rollouts, leaves flat groups out, and draws its tables."""

import math
from dataclasses import replace

import pytest
import torch

import d5p4
from d5p4.eval.countdown import Problem
from d5p4.integrations.rl import ON_POLICY, log_probabilities, rollout, weighted_advantages
from d5p4_lab.bench import read, rollouts
from tests.checkpoints import write_llada

PLAN = replace(rollouts.SMALL, updates=1)


def test_training_puzzles_are_new_in_every_update_and_never_held_out():
    first, again, later = (rollouts.training_puzzles(20, 5, 0, update) for update in (0, 0, 1))
    assert first == again != later and len(set(first)) == 20
    assert not any(Problem.parse(prompt).heldout for prompt in first + later)
    assert all(prompt.count(",") == 4 for prompt in first)


def test_gradients_do_not_depend_on_the_parts_and_flat_groups_have_none(tmp_path, monkeypatch):
    model = d5p4.load(write_llada(tmp_path), dtype="float64").requires_grad_(True)
    drawn = rollout(model, ["a cat", "two", "words here"], 4, seed=0, gen_length=8, **ON_POLICY)
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1], dtype=torch.float64)
    advantages = weighted_advantages(rewards, drawn)
    assert advantages.view(3, 4).sum(1).abs().max() < 1e-12 and advantages[4:8].tolist() == [0] * 4
    gradients = []
    for tokens in (rollouts.TOKENS, 200):
        monkeypatch.setattr(rollouts, "TOKENS", tokens)
        model.zero_grad()
        rollouts.add_gradients(model, drawn, advantages, 8)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-12, rtol=1e-9)
    model.zero_grad()
    logp, _ = log_probabilities(model, drawn)
    (-(advantages[:, None] * logp).mean(0).sum() / 8).backward()
    for whole, parameter in zip(gradients[0], model.parameters(), strict=True):
        torch.testing.assert_close(whole, parameter.grad, atol=1e-12, rtol=1e-9)


def test_a_run_and_its_tables():
    runs = [rollouts.train((name, 0, rate), PLAN, "cpu") for name, rate in (("start", 0.0), ("tree", 1e-4))]
    [update] = runs[1]["updates"]
    assert update["different"] == PLAN.k and update["plain"] == update["unknown"] == 0
    assert 0 <= update["estimate"] <= 1 and all(math.isfinite(value) for value in update.values())
    assert rollouts.pass_rates([16, 0, 8], 1) == [100, 0, 50] and rollouts.pass_rates([1, 0, 8], 16) == [100, 0, 100]
    results = [{"plan": vars(PLAN)}, *runs]
    assert "| 0.0001 | tree, left |" in rollouts.table(results) and "tree, left" in rollouts.seeds_table(results)


@pytest.mark.full
def test_the_command_trains_with_every_sampler(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollouts, "SEEDS", (0,))
    out = tmp_path / "runs.jsonl.xz"
    rollouts.main(["--device", "cpu", "--small", "--out", str(out)])
    runs = [(run["sampler"], run["rate"]) for run in read(out)[1:]]
    assert runs == [("start", 0.0), *((name, rate) for rate in rollouts.RATES for name in rollouts.SAMPLERS)]
    assert "before training" in capsys.readouterr().out
