import math

import pytest
import torch

from d5p4.ops import vocab
from d5p4.ops.sample import draw
from d5p4.ops.vocab import plain_stats, vocab_stats
from d5p4.types import Head


@pytest.fixture
def head():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 6, generator=g, dtype=torch.float64)
    bias = torch.randn(40, generator=g, dtype=torch.float64)
    banned = torch.zeros(40, dtype=torch.bool)
    banned[[3, 39]] = True
    return Head(weight, bias, banned)


WANT = ("entropy", "best", "margin", "certainty")


def test_statistics_match_the_distribution(head):
    states = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    tokens = torch.randint(0, 3, (50, 2), generator=torch.Generator().manual_seed(2))
    stats = vocab_stats(states, head, WANT, tokens)
    logits = (states @ head.weight.T + head.bias)[:, ~head.banned]
    p = torch.softmax(logits, -1)
    entropy = torch.distributions.Categorical(probs=p).entropy()
    ordered = p.sort(-1, descending=True).values
    torch.testing.assert_close(stats["entropy"], entropy, atol=1e-12, rtol=0)
    torch.testing.assert_close(stats["best"], ordered[:, 0].log(), atol=1e-12, rtol=0)
    torch.testing.assert_close(stats["margin"], ordered[:, 0] - ordered[:, 1], atol=1e-12, rtol=0)
    torch.testing.assert_close(stats["certainty"], -p.log().mean(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(stats["token"], p.log().gather(1, tokens), atol=1e-12, rtol=0)


def test_chunks_do_not_change_statistics_or_draws(head, monkeypatch):
    states = torch.randn(33, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = torch.zeros(33, 1, dtype=torch.int64)
    whole = vocab_stats(states, head, WANT, tokens)
    u = torch.rand(33, 3, generator=torch.Generator().manual_seed(2))
    drawn, _ = draw(states, head, u)
    monkeypatch.setattr(vocab, "CHUNK", 200)  # five rows at a time
    assert torch.equal(draw(states, head, u)[0], drawn)
    parts = vocab_stats(states, head, WANT, tokens)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], atol=1e-13, rtol=0)


def test_extreme_rows():
    allowed = torch.zeros(5, dtype=torch.bool)
    two = [0.0, -math.inf, 0.0, -math.inf, -math.inf]
    for row, entropy in (([0.0] * 5, math.log(5)), (two, math.log(2)), ([1e4, 0, 0, 0, 0], 0.0)):
        stats = plain_stats(torch.tensor([row], dtype=torch.float64), allowed, ("entropy", "margin"))
        assert stats["entropy"].item() == pytest.approx(entropy, abs=1e-12), row


def test_nan_and_infinite_logits_show_in_the_logsumexp():
    logits = torch.tensor([[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], [0.0, 1.0]])
    finite = plain_stats(logits, torch.zeros(2, dtype=torch.bool), ())["logsumexp"].isfinite()
    assert finite.tolist() == [False, False, False, True]


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_half_precision_weights_add_no_rounding_of_ours(dtype, guided, monkeypatch):
    """Against float64 from the same half-precision numbers; float32 states are what guidance gives."""
    monkeypatch.setattr(vocab, "CHUNK", 128)  # several vocabulary tiles
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 64, generator=g).to(dtype)
    states = torch.randn(20, 64, generator=g)
    states = states if guided else states.to(dtype)
    banned = torch.zeros(300, dtype=torch.bool)
    logits = vocab.logits_of(states, weight, None, banned)
    torch.testing.assert_close(logits.double(), states.double() @ weight.double().T, atol=2e-5, rtol=0)
