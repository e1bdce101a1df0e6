"""The GRPO loop of the lab: it learns from rollouts, and draws its tables."""

import math
from dataclasses import replace

import pytest

from d5p4.eval.countdown import Problem
from d5p4_lab.bench import read, rollouts
from d5p4_lab.puzzles import is_heldout

PLAN = replace(rollouts.SMALL, updates=1)


def test_training_puzzles_are_new_in_every_update_and_never_held_out():
    first, again, later = (rollouts.training_puzzles(20, 5, 0, update) for update in (0, 0, 1))
    assert first == again != later and len(set(first)) == 20
    assert not any(is_heldout(Problem.parse(prompt)) for prompt in first + later)
    assert all(prompt.count(",") == 4 for prompt in first)


def test_a_run_and_its_tables(monkeypatch):
    monkeypatch.setattr(rollouts, "DRAWN", 4)
    runs = [rollouts.train((name, 0, rate), PLAN, "cpu") for name, rate in (("start", 0.0), ("tree", 1e-4))]
    [update] = runs[1]["updates"]
    assert update["different"] == PLAN.k and 0 <= update["estimate"] <= 1
    assert all(math.isfinite(value) for value in update.values())
    assert rollouts.pass_rates([4, 0, 2], 1) == [100, 0, 50] and rollouts.pass_rates([1, 0, 2], 4) == [100, 0, 100]
    results = [{"plan": vars(PLAN)}, *runs]
    assert "| 0.0001 | tree, left |" in rollouts.table(results)
    assert "| 0.0001 | tree, left | 0 |" in rollouts.table(results, by_seed=True)


@pytest.mark.full
def test_the_command_trains_with_every_sampler(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollouts, "SEEDS", (0,))
    out = tmp_path / "runs.jsonl.xz"
    rollouts.main(["--device", "cpu", "--small", "--out", str(out)])
    runs = [(run["sampler"], run["rate"]) for run in read(out)[1:]]
    assert runs == [("start", 0.0), *((name, rate) for rate in rollouts.RATES for name in rollouts.SAMPLERS)]
    assert "before training" in capsys.readouterr().out
