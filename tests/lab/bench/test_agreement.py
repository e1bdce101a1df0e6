"""The agreement benchmark draws in float64 what `generate` draws, and distinguishes near-ties from real differences."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from d5p4 import D5P4Error, Head
from d5p4_lab.bench import agreement
from d5p4_lab.bench.agreement import Arbiter, Case, Family, Noisy, Variant, carry_out, compare
from tests.fake import FakeModel

CPU = Variant("cpu")
METHODS = {
    "independent": dict(method="independent"),
    "d5p4": dict(method="d5p4"),
    "distinct": dict(method="d5p4", distinct=True, block_length=5),
    "diverse-beam": dict(method="diverse-beam", steps=5),
    "ancestral": dict(method="d5p4", order="ancestral"),
}


def quick(*names):
    """Run the test for these methods always, and for the others in the full suite."""
    return pytest.mark.parametrize(
        "name", [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in METHODS]
    )


def fake(**options):
    """A float32 model and the same in float64."""
    exact = FakeModel(**options)
    model = copy.copy(exact)
    for name in ("embedding", "place", "mixer"):
        setattr(model, name, getattr(exact, name).float())
    model.head = Head(exact.head.weight.float(), exact.head.bias.float(), exact.head.banned)
    return model, exact


def case(name, prompts):
    ids = [[i % 9, 3, *[i // 9] * (i % 2)] for i in range(prompts)]  # of two lengths, so some are padded
    return Case(name, "", ids, dict(gen_length=8) | METHODS[name])


@quick("distinct", "ancestral")
def test_a_run_in_float64_is_what_the_arbiter_draws(name):
    _, exact = fake(carry_over=name == "ancestral")
    task = case(name, 2)
    run = carry_out(task, exact, CPU, seed=5)
    arbiter = Arbiter.make(exact, task, run.settings, 5)
    for prompt, records in enumerate(run.records):
        for index, record in enumerate(records):
            families = arbiter.families(prompt, index, record)
            if run.settings.distinct:
                assert agreement.distinct_margin(families, record)[0] < 1e-12
            nothing = replace(record, following=torch.full_like(record.following, -1))
            if not run.settings.distinct:
                assert agreement.children_margin(families, record, nothing)[0] < 1e-12
            if record.quality is not None:
                key, last = arbiter.select_key(prompt, index), arbiter.step(prompt, index).last
                assert agreement.replay(run.settings, record, last, key) == record.parents.tolist()


@quick("d5p4")
def test_noise_is_traced_to_ties_of_its_size(name):
    noise = 3e-2
    model, exact = fake(carry_over=name == "ancestral")
    task = case(name, 16)
    runs = [carry_out(task, variant, CPU, seed=0) for variant in (model, Noisy(model, noise))]
    outcome = compare(task, *runs, exact, 0, bound=noise, gap=10 * noise)
    assert outcome.equal_sets < 16 and outcome.differences and not outcome.unexplained
    lost = [difference for difference in outcome.differences if not difference.healed]
    assert len(lost) == 16 - outcome.equal_sets
    assert {difference.kind for difference in outcome.differences} <= set(agreement.KINDS)
    assert all(difference.margin > 0 for difference in outcome.differences)
    strict = compare(task, *runs, exact, 0, bound=1e-9, gap=1e-9)
    assert len(strict.unexplained) == len(outcome.differences)
    (reported,) = json.loads(json.dumps(agreement.report([outcome], {})))["cases"]
    assert reported["unexplained"] == 0 and f"| {name} | 16 |" in agreement.table([reported])


@quick("d5p4")
def test_equal_runs_agree_and_another_seed_is_unexplained(name):
    model, exact = fake(carry_over=name == "ancestral")
    task = case(name, 6)
    run, again, wrong = (carry_out(task, model, CPU, seed) for seed in (0, 0, 1))
    equal = compare(task, run, again, exact, 0)
    assert (equal.equal_sets, equal.equal_answers, equal.differences) == (6, 24, [])
    wrong.answers[1:], wrong.records[1:] = run.answers[1:], run.records[1:]
    outcome = compare(task, run, wrong, exact, 0)
    assert outcome.equal_sets == 5 and len(outcome.differences) == 1
    (difference,) = outcome.unexplained
    assert difference.prompt == 0 and not difference.healed and difference.margin > 1e-3


@pytest.mark.parametrize("name", ["d5p4", "diverse-beam"])
def test_a_wrong_choice_is_unexplained(name):
    model, exact = fake()
    task = case(name, 1)
    run = carry_out(task, model, CPU, seed=0)
    arbiter = Arbiter.make(exact, task, run.settings, 0)
    records = run.records[0]
    assert not agreement.parting(records, records)
    sets = torch.cartesian_prod(*torch.arange(16).view(4, 4))[::5]
    worst = min(sets, key=lambda chosen: agreement.objective(run.settings, records[3], chosen))
    wrong = replace(run, records=[[*records[:3], replace(records[3], parents=worst), *records[4:]]])
    difference = agreement.trace(arbiter, 0, run, wrong, agreement.BOUND, agreement.GAP)
    assert (difference.step, difference.kind, difference.near_tie) == (3, "selection", False)
    assert not difference.details["replayed"] and difference.margin > agreement.GAP


def test_the_first_of_equal_ends_comes_first():
    mask, end = 2, 1
    p = torch.tensor([0.1, 0.9, 0.0]).double().expand(3, 3)
    high = p.cumsum(-1)
    low = (high - p).masked_fill(p == 0, torch.inf)
    worth = p * torch.tensor([1.0, 0.0, 1.0])
    u = torch.full((1, 3), 0.5).double()
    family = Family(torch.full((3,), mask), torch.ones(3).bool(), low, high, worth, (end,), u, None, 1)
    first, second = torch.tensor([end, mask, mask]), torch.tensor([mask, end, mask])
    assert family.margins(first)[0][0] == 0
    assert family.margins(second)[0] == (pytest.approx(0.4), "order")  # u would have to draw token 0 at position 0
    assert family.margins(torch.tensor([mask, mask, mask]))[0][0] == torch.inf


def test_variants():
    assert Variant.parse("cuda:plain") == Variant("cuda", plain=True)
    assert Variant.parse("cuda:1:small") == Variant("cuda:1", small=True)
    assert Variant.parse("cpu:noise") == Variant("cpu", noise=3e-7)
    assert Variant.parse("cpu:noise=1e-4").noise == 1e-4
    with pytest.raises(D5P4Error, match="loud"):
        Variant.parse("cpu:loud")
