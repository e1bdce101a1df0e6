import itertools

import pytest
import torch

import d5p4
from d5p4.ops.vocab import logits_of
from tests.checkpoints import write_fast_dllm, write_sdar
from tests.fake import FakeModel
from tests.refusals import refusal


def exact_bound(model, prompt, answer):
    """The expectation over every mask, by enumeration."""
    length, total = len(answer), 0.0
    for count in range(1, length + 1):
        subsets = list(itertools.combinations(range(length), count))
        for subset in subsets:
            row = torch.tensor(prompt + answer)
            index = torch.tensor(subset) + len(prompt)
            row[index] = model.mask_id
            states = model.body(row[None]).states[0, index]
            logits = logits_of(states, model.head.weight, model.head.bias, model.head.banned)
            truth = torch.tensor(answer)[list(subset)]
            logp = logits.log_softmax(-1).gather(1, truth[:, None]).sum().item()
            total += logp * (length / count) / len(subsets) / length
    return total


@pytest.mark.parametrize("carry_over", [False, True])
def test_estimates_the_enumerated_bound(carry_over):
    model = FakeModel(carry_over=carry_over)
    exact = exact_bound(model, [0, 1], [2, 6, 6, 3])
    values = torch.tensor([d5p4.loglikelihood(model, [2, 6, 6, 3], [0, 1], 64, seed=s) for s in range(60)])
    error = values.std() / 60**0.5
    assert abs(values.mean() - exact) < 4 * error
    assert error < 0.05 * abs(exact)


@pytest.mark.parametrize("write", [write_sdar, write_fast_dllm])
def test_a_block_causal_model_is_scored_block_by_block(tmp_path, write, monkeypatch):
    """The first block has three tokens of the prompt and one of the answer; the last block is partial."""
    model = d5p4.load(write(tmp_path, dtype=torch.float64), "cpu", "float64")
    prompt, answer = [3, 1, 4], [1, 5, 9, 2, 6, 5, 3]
    blocks = [(0, 1), (1, 5), (5, 7)]
    exact = sum(exact_bound(model, prompt + answer[:i], answer[i:j]) for i, j in blocks)
    values = [d5p4.loglikelihood(model, answer, prompt, 16, seed=s) for s in range(40)]
    values = torch.tensor(values, dtype=torch.float64)
    error = values.std() / 40**0.5
    assert abs(values.mean() - exact) < 4 * error
    assert error < 0.05 * abs(exact)
    assert abs(exact - exact_bound(model, prompt, answer)) > 4 * error, "blocks matter"
    monkeypatch.setattr(model, "cache_shape", None)
    assert d5p4.loglikelihood(model, answer, prompt, 16, seed=1) == pytest.approx(values[1].item(), abs=1e-10)


def test_one_token_is_exact():
    model = FakeModel()
    assert d5p4.loglikelihood(model, "c", "ab", samples=1) == pytest.approx(exact_bound(model, [0, 1], [2]), abs=1e-12)


def test_same_seed_same_value_whatever_the_batch():
    model = FakeModel()
    one = d5p4.loglikelihood(model, "cgg", "ab", 32, seed=3)
    assert one == pytest.approx(d5p4.loglikelihood(model, "cgg", "ab", 32, seed=3, max_tokens_per_forward=5), abs=1e-10)
    assert one != d5p4.loglikelihood(model, "cgg", "ab", 32, seed=4)


def test_nan_is_an_error():
    model = FakeModel()
    model.head.weight[3] = float("nan")
    with pytest.raises(d5p4.NonFiniteLogits):
        d5p4.loglikelihood(model, "abc")


def test_bad_input():
    for text, samples, message in (("", 4, "no tokens"), ("al", 4, "mask"), ("a", 0, "samples=0"), ("a" * 99, 4, "99")):
        assert message in refusal(d5p4.loglikelihood, FakeModel(), text, None, samples), (text, samples)
