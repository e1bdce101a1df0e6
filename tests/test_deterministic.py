"""`deterministic=True`: every forward and every product of the head has one shape, and answers stay what they are.

That equal shapes give equal bits is the matrix library's part: tests/gpu/test_deterministic.py demands it on CUDA.
"""

import itertools
import math
import warnings

import pytest
import torch

import d5p4
from d5p4.ops.precision import steady_mean, steady_sum
from tests.checkpoints import WRITERS
from tests.fake import FakeModel, fitting
from tests.layouts import facts

PROMPTS = ["abc", "ahead" * 12, "c", "bigfee" * 22, "jig" * 30, "add"]
KEYS = [f"prompt-{i}" for i in range(len(PROMPTS))]
ALL = tuple(range(len(PROMPTS)))
ORDER = [3, 0, 5, 4, 2, 1]
KINDS = {"orders": dict(carry_over=False), "ancestral": dict(carry_over=True)}
LONGEST, TOKENS = 150, 300
full = pytest.mark.full


class Watched(FakeModel):
    """Remembers what its body was given."""

    def __init__(self, **options):
        super().__init__(max_length=LONGEST, **options)
        self.given = []

    def body(self, tokens, attention_mask=None):
        self.given.append((tokens, attention_mask))
        return super().body(tokens, attention_mask)


def run(model, which=ALL, **options):
    options = fitting(dict(method="d5p4", k=3, w=3, gen_length=7, steps=4, seed=11, temperature=1.5) | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        return d5p4.generate(model, [PROMPTS[i] for i in which], keys=[KEYS[i] for i in which], **options)


def fixed(model, which=ALL, **options):
    return run(model, which, **(dict(deterministic=True, max_tokens_per_forward=TOKENS) | options))


def known(result):
    return facts(result, "similarity", "tokens_run")  # rows are filled up to their promised length


def cases(quick, *axes):
    """All combinations; those other than `quick` run with the full tests only."""
    return [pytest.param(*case, marks=[full] * (case != quick)) for case in itertools.product(*axes)]


@pytest.mark.parametrize("kind, guidance", cases(("orders", 1.5), KINDS, (1.0, 1.5)))
def test_every_forward_has_the_promised_shape(kind, guidance):
    model = Watched(**KINDS[kind])
    fixed(model, guidance=guidance)
    shapes = {tuple(tokens.shape) for tokens, _ in model.given}
    assert shapes == {(TOKENS // 64, 64), (TOKENS // 128, 128), (TOKENS // LONGEST, LONGEST)}
    for tokens, mask in model.given:
        assert mask is not None and mask.shape == tokens.shape
        assert mask.any(-1).all()  # no row of padding alone: softmax over nothing is NaN


@pytest.mark.parametrize(
    "method, kind, order",
    [
        ("tree", "orders", [1, 0, 5]),  # two lengths of rows
        ("d5p4", "orders", [1, 0, 5]),
        ("independent", "ancestral", [1, 0, 5]),
        *[pytest.param(*case, ORDER, marks=full) for case in itertools.product(d5p4.METHODS, KINDS)],
    ],
)
def test_in_float64_nothing_changes(method, kind, order):
    model = FakeModel(max_length=LONGEST, **KINDS[kind])
    places = sorted(order)
    plain = dict(zip(places, known(run(model, places, method=method)), strict=True))
    assert known(fixed(model, order, method=method)) == [plain[i] for i in order]


TOGETHER = dict(guidance=2.0, distinct=True, block_length=3, top_p=0.8, top_k=3, features="mean", quality="logprob")
TOGETHER |= dict(positions="masked", normalise="zscore", logprobs=True)
ONE_BY_ONE = [{name: value} for name, value in TOGETHER.items()] + [dict(savings=False)]


@pytest.mark.parametrize(
    "options, which", [(TOGETHER, [0, 1]), *[pytest.param(one, ALL, marks=full) for one in ONE_BY_ONE]], ids=str
)
def test_in_float64_nothing_changes_under_options(options, which):
    model = FakeModel(max_length=LONGEST)
    assert known(fixed(model, which, **options)) == known(run(model, which, **options))


@pytest.mark.parametrize(
    "kind, dtype", cases(("llada", "bfloat16"), ("llada", "dream", "mdlm"), ("float32", "bfloat16"))
)
def test_half_precision_gives_the_same_answers_and_scores_in_any_batch(kind, dtype, tmp_path):
    """On the CPU too. Similarities are promised on CUDA alone, where kernels make them."""
    model = d5p4.load(WRITERS[kind](tmp_path), "cpu", dtype)
    prompts = ["the cat", "a", "two little words", "far away from all of it"]
    options = dict(k=3, gen_length=4, seed=2, temperature=1.2, deterministic=True, max_tokens_per_forward=256)

    def decode(which, **more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
            return d5p4.generate(model, [prompts[i] for i in which], keys=list(which), **options, **more)

    methods = [{"spare": 1, "diversity": 1.0}, {"method": "d5p4", "w": 2}]
    for more in methods:
        together = decode(range(4), **more)
        for which in ([0], [3, 2, 1]):
            other = decode(which, **more)
            assert other.answers == [together.answers[i] for i in which]
            assert other.score.tolist() == together.score[which].tolist()
            torch.testing.assert_close(other.similarity, together.similarity[which], atol=1e-6, rtol=0)


def test_steady_sums_are_sums_and_do_not_look_at_other_rows():
    for size in (1, 2, 7, 64, 129):
        x = torch.randn(33, size, 5, generator=torch.Generator().manual_seed(size)) * 100
        exact = [[math.fsum(x[i, :, j].tolist()) for j in range(5)] for i in range(33)]
        exact = torch.tensor(exact, dtype=torch.float64)
        torch.testing.assert_close(steady_sum(x, 1).double(), exact, atol=1e-2, rtol=1e-5)
        torch.testing.assert_close(steady_mean(x.transpose(1, 2)), exact / size, atol=1e-10, rtol=0)
        for i in (0, 5, 32):
            assert torch.equal(steady_sum(x[i : i + 1], 1), steady_sum(x, 1)[i : i + 1]), size
            assert torch.equal(steady_mean(x[i : i + 1]), steady_mean(x)[i : i + 1]), size
