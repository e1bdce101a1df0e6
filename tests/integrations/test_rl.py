"""Rollouts: their log-probabilities and steps, what is on-policy, and importance weights."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import d5p4
from d5p4.errors import D5P4Error
from d5p4.integrations import rl
from d5p4.types import block_of
from tests.checkpoints import write_llada
from tests.fake import FakeModel, block_model
from tests.test_tree import leaves, p_value, text_of, tiny

full = pytest.mark.full
TOP = {**rl.ON_POLICY, "order": "top"}


@pytest.mark.parametrize(
    "model, options",
    [
        (FakeModel(), rl.ON_POLICY),
        (FakeModel(), TOP | {"stop": None}),
        (FakeModel(), TOP | {"order": "random", "steps": 3}),
        (FakeModel(), rl.ON_POLICY | {"eos": "never"}),
        (FakeModel(), rl.WITHOUT_REPLACEMENT),
        (FakeModel(), {"method": "d5p4", "w": 2}),
        (FakeModel(carry_over=True), {"method": "independent", "steps": 4}),
        (block_model(), rl.ON_POLICY),
        (block_model(shifted=True), TOP),
    ],
)
def test_log_probabilities_of_the_same_weights_are_those_of_the_rollouts(model, options):
    """In float64, for prompts of different lengths. Steps count from 1, and every answer ends where it should."""
    rollouts = rl.rollout(model, ["abc", "ba"], 5, seed=3, gen_length=6, **options)
    assert len(rollouts) == 10 and rollouts.prompt.tolist() == [0] * 5 + [1] * 5
    logp, entropy = rl.log_probabilities(model, rollouts)
    torch.testing.assert_close(logp, rollouts.logprobs, atol=1e-9, rtol=0)
    revealed = rollouts.steps > 0
    assert (entropy[revealed] > 0).all() and (entropy[~revealed] == 0).all() and (logp[~revealed] == 0).all()
    assert rollouts.steps.amin(1).tolist() == [0] * 10 and (rollouts.steps.where(rollouts.window, 0).amax(1) >= 1).all()
    whole = 6 - (2 + 6) % -4 if block_of(model) else 6  # the window is extended to the end of the last block
    assert rollouts.window.sum(1)[5:].tolist() == [whole] * 5 and rollouts.completion_mask.sum(1).max() == 6
    assert not (rollouts.completion_mask & ~rollouts.window).any()
    for i, text in enumerate(rollouts.texts):
        answer = rollouts.sequences[i][rollouts.completion_mask[i]].tolist()
        assert model.tokenizer.decode([t for t in answer if t not in model.eos_ids]) == text
        assert sum(t in model.eos_ids for t in answer[:-1]) == 0


def test_forwards_of_the_likelihood_are_made_again_for_gradients():
    """Memory is needed for one forward at a time, and the gradients are those of a single forward. Equal states run
    once."""
    model = FakeModel()
    rollouts = rl.rollout(model, ["abc", "ba"], 4, seed=0, gen_length=4, **rl.ON_POLICY)
    states, gradients = set(), []
    for row, steps in zip(rollouts.sequences.tolist(), rollouts.steps.tolist(), strict=True):
        states |= {tuple(t for t, s in zip(row, steps, strict=True) if s < now) for now in range(1, max(steps) + 1)}
    for tokens, times in ((10**6, 1), (30, 2)):
        model.embedding = model.embedding.detach().requires_grad_(True)
        model.rows_seen = 0
        logp, entropy = rl.log_probabilities(model, rollouts, max_tokens_per_forward=tokens)
        rows = model.rows_seen
        assert rows <= len(states)
        (logp.sum() + entropy.sum()).backward()
        assert model.rows_seen == times * rows
        gradients.append(model.embedding.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("order, draws", [("left", 3000), ("top", 3000), pytest.param("entropy", 20000, marks=full)])
def test_on_policy_rollouts_have_the_law_that_their_log_probabilities_say(order, draws):
    """Rollouts in the order `confidence` have another law, and are not called on-policy."""
    model = tiny()
    law = leaves(model, order, eos="free")

    def drawn(order):
        options = rl.ON_POLICY | {"order": order, "gen_length": 3}
        rollouts = rl.rollout(model, ["ab"] * draws, 1, seed=1, **options)
        rows = torch.where(rollouts.steps > 0, rollouts.sequences, model.mask_id)[:, -3:].tolist()
        return rollouts, list(map(tuple, rows)), rollouts.logprobs.sum(1).exp().tolist()

    rollouts, rows, chances = drawn(order)
    assert rollouts.policy == "on-policy" and (rollouts.weights == 1).all()
    for row, chance in zip(rows, chances, strict=True):
        assert law[row] == pytest.approx(chance)
    assert p_value(Counter(rows), law) > 1e-3
    other, rows, chances = drawn("confidence")
    assert other.policy == "off-policy" and "drawn tokens" in other.reason and other.weights.isnan().all()
    chance, row = max(zip(chances, rows, strict=True))
    assert abs(Counter(rows)[row] - draws * chance) > 8 * (draws * chance) ** 0.5


@pytest.mark.parametrize(
    "options, policy, reason",
    [
        ({}, "on-policy", "independent"),
        ({"order": "top", "reveal": "threshold", "tau": 0.5}, "on-policy", "independent"),
        ({"order": "confidence"}, "off-policy", "drawn tokens"),
        ({"eos": "last"}, "off-policy", "eos"),
        ({"temperature": 0.9}, "off-policy", "temperature"),
        ({"top_p": 0.9}, "off-policy", "top_p"),
        ({"min_p": 0.1}, "off-policy", "min_p"),
        ({"top_k": 3}, "off-policy", "top_k"),
        ({"guidance": 2.0}, "off-policy", "guidance"),
        ({"method": "best-of-n"}, "off-policy", "selects"),
        ({"spare": 1}, "off-policy", "selects"),
        ({"distinct": True}, "off-policy", "distinct"),
        (dict(rl.WITHOUT_REPLACEMENT, stop=None), "without replacement", "weights"),
        (dict(rl.WITHOUT_REPLACEMENT, stop=None, diversity=1.0), "off-policy", "selects"),
        (dict(rl.WITHOUT_REPLACEMENT, stop=None, spare=1), "off-policy", "selects"),
        (dict(rl.WITHOUT_REPLACEMENT, stop=None, reveal="threshold"), "off-policy", "sure"),
        (dict(rl.WITHOUT_REPLACEMENT, stop=None, steps=2), "off-policy", "sure"),
    ],
)
def test_the_policy_is_named(options, policy, reason):
    rollouts = rl.rollout(FakeModel(), ["abc"], 2, seed=0, gen_length=4, **rl.ON_POLICY | options)
    assert rollouts.policy == policy and reason in rollouts.reason
    assert bool(rollouts.weights.isnan().all()) == (policy == "off-policy")


@pytest.mark.parametrize("draws", [1500, pytest.param(12000, marks=full)])
def test_weighted_rollouts_of_a_tree_give_the_policy_gradient(draws):
    """The weighted sum of f * grad log p over different rollouts is an unbiased estimate of the gradient of the mean of
    f, which is computed here by enumeration."""
    model = tiny(scale=4.0)  # a peaked law, so that draws without replacement differ from independent ones
    weight = model.head.weight.requires_grad_(True)

    def worth(row):
        return float(row[0] == 0) + 0.5 * float(len(row) > 1 and row[1] == 1)

    everything = rl.rollout(model, ["ab"], 60, seed=0, gen_length=3, **rl.WITHOUT_REPLACEMENT)
    texts = ~everything.plain
    logp = rl.log_probabilities(model, everything)[0].sum(1)
    values = torch.tensor([worth(row[-3:]) for row in everything.sequences.tolist()], dtype=weight.dtype)
    mean = (logp.exp() * values)[texts].sum()
    assert float(logp.exp()[texts].sum().detach()) == pytest.approx(1)
    [gradient] = torch.autograd.grad(mean, weight)
    exact = float(gradient.norm())
    direction = gradient / exact

    rollouts = rl.rollout(model, ["ab"] * draws, 3, seed=4, gen_length=3, **rl.WITHOUT_REPLACEMENT)
    assert rollouts.policy == "without replacement" and not rollouts.weights.isnan().any()
    with torch.no_grad():  # the derivative along a direction, by a small step to both sides
        sides = []
        for sign in (1, -1):
            weight += sign * 1e-5 * direction
            sides.append(rl.log_probabilities(model, rollouts, max_tokens_per_forward=1 << 20)[0].sum(1))
            weight -= sign * 1e-5 * direction
    slope = (sides[0] - sides[1]) / 2e-5
    values = torch.tensor([worth(row[-3:]) for row in rollouts.sequences.tolist()], dtype=weight.dtype)
    estimate = (rollouts.weights * values * slope).view(draws, 3).sum(1)
    error = float(estimate.std()) / draws**0.5
    assert abs(float(estimate.mean()) - exact) < 4 * error
    unweighted = (values * slope).view(draws, 3).mean(1)
    assert abs(float(unweighted.mean()) - exact) > 6 * float(unweighted.std()) / draws**0.5


def test_a_prompt_with_few_texts_is_filled_with_plain_samples():
    model = tiny()
    texts = {text_of(model, row) for row in leaves(model, "left", eos="free")}
    k = len(texts) + 4
    rollouts = rl.rollout(model, ["ab", "ba"], k, seed=2, gen_length=3, **rl.WITHOUT_REPLACEMENT)
    assert len(rollouts) == 2 * k and rollouts.plain.view(2, k).sum(1).tolist() == [4, 4]
    assert rollouts.prompt.tolist() == [0] * k + [1] * k
    assert (rollouts.weights[rollouts.plain] == 0).all()
    torch.testing.assert_close(rollouts.weights.view(2, k).sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(rl.log_probabilities(model, rollouts)[0], rollouts.logprobs, atol=1e-9, rtol=0)
    starts = rollouts.sequences[:, :2].tolist()
    assert starts == [[0, 1]] * k + [[1, 0]] * k and (rollouts.steps[:, 2] == 1).all()
    # A search without random numbers is filled with samples at temperature 1. Names of other libraries are allowed.
    rollouts = rl.rollout(
        model, ["ab"], 40, seed=0, **{**rl.WITHOUT_REPLACEMENT, "temperature": 0.0, "max_new_tokens": 2}
    )
    assert len(rollouts) == 40 and (rollouts.window.sum(1) == 2).all()
    assert 0 < rollouts.plain.sum() < 40 and len(set(map(tuple, rollouts.sequences[rollouts.plain].tolist()))) > 1


def test_weighted_advantages():
    model = tiny()
    rollouts = rl.rollout(model, ["ab", "ba"], 3, seed=2, gen_length=3, **rl.WITHOUT_REPLACEMENT)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    advantages = rl.weighted_advantages(rewards, rollouts)
    weights = rollouts.weights[:3] / rollouts.weights[:3].mean()
    torch.testing.assert_close(advantages[:3], weights * (rewards[:3] - (weights * rewards[:3]).mean()))
    assert advantages.view(2, 3).sum(1).abs().max() < 1e-12 and advantages[3:].abs().max() < 1e-12
    unknown = rollouts.take(torch.arange(3))
    unknown.weights[:] = torch.nan
    plain = rewards[:3] - rewards[:3].mean()
    torch.testing.assert_close(rl.weighted_advantages(rewards[:3], unknown), plain)
    right = rewards == 1  # rewards may be truth values
    torch.testing.assert_close(rl.weighted_advantages(right, rollouts), rl.weighted_advantages(right.float(), rollouts))
    with pytest.raises(D5P4Error, match="3 rewards for 6 rollouts"):
        rl.weighted_advantages(rewards[:3], rollouts)


def test_rollouts_use_the_current_weights_and_restore_the_training_mode(tmp_path):
    """The weights are not copied: after an update, rollouts equal those of a copy of the updated model."""
    model = d5p4.load(write_llada(tmp_path), dtype="float64")
    model.train().requires_grad_(True)
    before = rl.rollout(model, ["a cat"], 4, seed=1, gen_length=8, **rl.ON_POLICY)
    logp, _ = rl.log_probabilities(model, before)
    (-logp.sum()).backward()
    assert model.training and all(p.grad is not None for p in model.parameters())
    torch.optim.SGD(model.parameters(), 1e-4).step()
    after = rl.rollout(model, ["a cat"], 4, seed=1, gen_length=8, **rl.ON_POLICY)
    assert rl.log_probabilities(model, before)[0].sum() > logp.sum()
    fresh = rl.rollout(copy.deepcopy(model), ["a cat"], 4, seed=1, gen_length=8, **rl.ON_POLICY)
    assert after.texts == fresh.texts and torch.equal(after.logprobs, fresh.logprobs)
    assert not torch.equal(after.logprobs, before.logprobs)


def test_weights_of_very_unlikely_texts_are_known():
    """e^φ is 0 in float64 at φ = -800, but the weight is not: it is e^κ, because e^φ / q has this limit."""
    logp, kappa = torch.tensor([[-800.0, -2.0, -torch.inf, torch.nan]]).double(), torch.tensor([-1.5]).double()
    weights = rl.importance_weights(SimpleNamespace(logp=logp, kappa=kappa))
    usual = torch.tensor(-2.0).double().exp() / -torch.expm1(-torch.tensor(-0.5).double().exp())
    torch.testing.assert_close(weights, torch.stack([kappa[0].exp(), usual, usual * 0, usual * 0])[None])
    result = d5p4.generate(FakeModel(), "abc", k=2, gen_length=3, method="independent", temperature=1.0)
    with pytest.raises(D5P4Error, match="method='tree'"):
        rl.importance_weights(result)


def test_rollouts_are_taken_and_joined():
    model = FakeModel()
    rollouts = rl.rollout(model, ["abc", "ba"], 2, seed=0, gen_length=3, **rl.ON_POLICY)
    odd = rollouts.take(torch.tensor([False, True, False, True]))
    assert odd.texts == rollouts.texts[1::2] and torch.equal(odd.steps, rollouts.steps[1::2])
    nothing = rollouts.take(torch.tensor([], dtype=torch.int64))  # no rollout has an advantage
    assert [value.shape for value in rl.log_probabilities(model, nothing)] == [rollouts.steps[:0].shape] * 2
    other = rl.rollout(model, ["abc"], 2, seed=0, gen_length=3, temperature=0.5, method="independent")
    with pytest.raises(D5P4Error, match="different policies"):
        rl.Rollouts.join([rollouts, other])


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_rounds_the_likelihood_no_more_than_the_sampler(tmp_path, autocast):
    """The sampler keeps logits in float32, even if the model has half precision. The likelihood must do so, too."""
    model = d5p4.load(write_llada(tmp_path), dtype="bfloat16")
    model.head.weight.mul_(4)  # large logits have large rounding errors
    rollouts = rl.rollout(model, ["a cat"], 4, seed=1, gen_length=8, **rl.ON_POLICY)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, _ = rl.log_probabilities(model, rollouts)
    torch.testing.assert_close(logp.double(), rollouts.logprobs, atol=1e-4, rtol=0)


def test_holes_are_rolled_out_too():
    model = FakeModel()
    model.head.bias[10] += 9
    rollouts = rl.rollout(model, [[0, 11, 2, 11, 11]], 20, seed=0, **rl.ON_POLICY)
    assert (rollouts.sequences[:, 3] == 10).any()  # end-of-text in a hole does not end the text
    assert torch.equal(rollouts.completion_mask, rollouts.window)
    rollouts = rl.rollout(model, [[0, 11, 2, 11, 3]], 3, seed=0, **TOP)
    assert rollouts.window.tolist() == [[False, True, False, True, False]] * 3
    torch.testing.assert_close(rl.log_probabilities(model, rollouts)[0], rollouts.logprobs, atol=1e-9, rtol=0)
