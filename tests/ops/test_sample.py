import torch
from scipy.stats import chisquare

from d5p4 import rng
from d5p4.ops.sample import draw, filter_logits, inverse_cdf
from d5p4.types import Head


def draws_of(probabilities, count=20_000, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Counts of `count` keyed draws through `draw` from one row with these probabilities."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    weight = torch.eye(len(p), dtype=torch.float64)
    u = rng.uniform(rng.mix(torch.tensor(7)), torch.arange(count))[None]
    banned = p == 0
    state = p.clamp_min(1e-300).log()[None]
    tokens, stats = draw(state, Head(weight, None, banned), u, (temperature, (top_k, top_p, min_p), ()))
    return torch.bincount(tokens[0], minlength=len(p)).double(), stats


P = [0.35, 0.0, 0.25, 0.2, 0.15, 0.05]


def test_draws_follow_the_filtered_tempered_distribution():
    for options, expected in (
        ({}, P),
        ({"temperature": 0.5}, [x**2 for x in P]),
        ({"temperature": 2.0}, [x**0.5 for x in P]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0, 0]),
        ({"top_k": 2}, [0.35, 0, 0.25, 0, 0, 0]),
        ({"top_p": 0.7}, [0.35, 0, 0.25, 0.2, 0, 0]),
        ({"top_p": 0.55}, [0.35, 0, 0.25, 0, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0, 0, 0]),
        ({"min_p": 0.5}, [0.35, 0, 0.25, 0.2, 0, 0]),
        ({"min_p": 0.5, "temperature": 0.5}, [0.35**2, 0, 0.25**2, 0, 0, 0]),  # after the temperature
        ({"min_p": 0.5, "temperature": 2.0}, [0.35**0.5, 0, 0.25**0.5, 0.2**0.5, 0.15**0.5, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0, 0]),
        ({"min_p": 0.0}, P),
        ({"top_k": 3, "min_p": 0.6}, [0.35, 0, 0.25, 0, 0, 0]),
        ({"top_k": 4, "top_p": 0.9, "temperature": 1.0}, [0.35, 0, 0.25, 0.2, 0.15, 0]),
    ):
        counts, _ = draws_of(P, **options)
        expected = torch.tensor(expected, dtype=torch.float64)
        expected = expected / expected.sum() * counts.sum()
        allowed = expected > 0
        assert counts[~allowed].sum() == 0, options
        if allowed.sum() > 1:
            assert chisquare(counts[allowed], expected[allowed]).pvalue > 1e-3, options


def test_logprob_is_of_the_plain_distribution():
    _, stats = draws_of(P, count=50, temperature=0.5, top_k=2)
    values = set(stats["token"][0].exp().round(decimals=9).tolist())
    assert values == {0.35, 0.25}


def test_inverse_cdf_is_exact_at_the_edges():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]], dtype=torch.float64)
    u = torch.tensor([[0.5 / 2**32, 0.5, 0.5 + 1e-12, 1 - 0.5 / 2**32]], dtype=torch.float64)
    assert inverse_cdf(logits, u).tolist() == [[1, 1, 3, 3]]


def test_tail_of_a_large_vocabulary_keeps_its_mass():
    """Half of the mass on one token, the rest spread over 126,463: float32 sums would drift."""
    size, count = 126_464, 4000
    logits = torch.zeros(1, size)
    logits[0, 0] = torch.tensor(float(size - 1)).log()
    u = rng.uniform(rng.mix(torch.tensor(1)), torch.arange(count))[None]
    tokens = inverse_cdf(logits, u)[0]
    reference = torch.where(u[0] <= 0.5, 0, ((u[0] - 0.5) * 2 * (size - 1)).ceil().long())
    assert (tokens - reference).abs().max() <= 1


def test_top_p_borders_enter_in_vocabulary_order():
    kept = filter_logits(torch.zeros(1, 4), None, 0.5)
    assert (kept > -torch.inf).tolist() == [[True, True, False, False]]
