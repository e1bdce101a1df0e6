"""The same answers, however the work is laid out. Float64, so that only our own doing could change a token."""

import itertools
from functools import partial

import pytest
import torch

import d5p4
from tests.checkpoints import WRITERS
from tests.fake import FakeModel, fitting
from tests.layouts import check_layouts

PROMPTS = ["abc", "ahead", "c", "bigfee", "jig"]
METHODS = list(d5p4.METHODS)
MODELS = {"orders": dict(carry_over=False), "ancestral": dict(carry_over=True)}
KINDS = ["orders", pytest.param("ancestral", marks=pytest.mark.full)]
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def run(model, prompts, method, *, w=3, **options):
    options = dict(k=3, gen_length=7, steps=5, seed=11) | options
    if method.endswith("smc"):
        options["interval"] = 2
    return d5p4.generate(model, prompts, **fitting(dict(method=method, w=w) | options))


SOME = dict(block_length=3, distinct=True, select_window=(1, 3), eos="never", features="masked", positions="masked")
SOME |= dict(quality="self-certainty")
OTHERS = dict(quality="logprob", normalise="zscore", similarity="rbf", feature_layer="head", top_p=0.8, top_k=5)
OTHERS |= dict(solver="exact", features="non-masked", guidance=2.0, guidance_window=(1, 3))
ONE_BY_ONE = [{name: value} for name, value in (*SOME.items(), *OTHERS.items()) if name != "guidance_window"]


@pytest.mark.parametrize(
    "method, kind, options",
    [
        *[(method, "orders", {"guidance": 2.0}) for method in METHODS],
        *[("d5p4", "ancestral", {}), ("d5p4", "orders", SOME), ("d5p4", "ancestral", OTHERS)],
        *[
            pytest.param(method, kind, {"guidance": guidance}, marks=full)
            for method, kind, guidance in itertools.product(METHODS, MODELS, (1.0, 2.0))
        ],
        *[pytest.param("d5p4", kind, one, marks=full) for kind, one in itertools.product(MODELS, ONE_BY_ONE)],
    ],
    ids=str,
)
def test_answers_do_not_depend_on_the_layout(method, kind, options):
    model = FakeModel(**MODELS[kind])
    saved, plain = check_layouts(partial(run, model, method=method, **options), PROMPTS[:3])
    assert torch.equal(plain.rows, plain.rows_nominal)
    assert (saved.rows < plain.rows).all() or d5p4.METHODS[method].tree  # a tree has no equal rows


@pytest.fixture(scope="module", params=["llada", "dream", "mdlm"])
def checkpoint(request, tmp_path_factory):
    return d5p4.load(WRITERS[request.param](tmp_path_factory.mktemp(request.param)), "cpu", "float64")


MORE = [{}, {"distinct": True}, {"block_length": 2}, {"k": 5, "w": 3}]


@pytest.mark.parametrize(
    "method, guidance, more",
    [
        *[("tree", 2.0, {}), ("d5p4", 2.0, {})],
        *[pytest.param(*case, marks=full) for case in itertools.product(METHODS, (1.0, 1.5), MORE)],
    ],
    ids=str,
)
def test_answers_of_a_checkpoint_do_not_depend_on_the_layout(checkpoint, method, guidance, more):
    options = dict(w=2, gen_length=6, steps=4, seed=2, temperature=1.2, guidance=guidance) | more
    prompts = ["the cat", "a", "two little words here"]
    check_layouts(partial(run, checkpoint, method=method, **options), prompts, tokens=30)


@pytest.mark.parametrize(
    "method", ["tree", "d5p4", *(pytest.param(m, marks=full) for m in ("independent", "best-of-n"))]
)
def test_equal_prompts_in_one_call_differ_and_can_be_named(method):
    model = FakeModel()
    twice = run(model, ["abc", "abc"], method, temperature=2.0)
    assert twice.answers[0] != twice.answers[1]
    named = run(model, ["abc", "abc"], method, temperature=2.0, keys=["x", "y"])
    swapped = run(model, ["abc", "abc"], method, temperature=2.0, keys=["y", "x"])
    assert named.answers == swapped.answers[::-1] and named.answers[0] != named.answers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_many_unconditional_sets_equal_fewer(kind):
    model = FakeModel(**MODELS[kind])
    for options in ({}, {"method": "d5p4", "w": 2}):
        many, few = (
            d5p4.generate(model, sets=n, k=2, gen_length=6, seed=3, temperature=2.0, **options) for n in (5, 2)
        )
        assert many.answers[:2] == few.answers
        assert len({str(a) for a in many.answers}) == 5


@pytest.mark.parametrize("method", ["tree", "d5p4"])
@pytest.mark.parametrize("kind", KINDS)
def test_infilling_prompts_of_different_schedules_share_a_call(kind, method):
    model = FakeModel(**MODELS[kind])
    mask = model.mask_id
    prompts = [[0, mask, 1, mask], [mask, mask, mask, 2, 3], [4, mask, 5, mask, 6], [mask]]
    together = run(model, prompts, method, gen_length=None, steps=None)
    alone = [run(model, [p], method, gen_length=None, steps=None) for p in prompts]
    assert together.answers == [r.answers[0] for r in alone]
    assert together.texts == [r.texts[0] for r in alone]
    for p, prompt in enumerate(prompts):
        for row in range(3):
            sequence = together.sequences[p, row][together.attention_mask[p]].tolist()
            assert len(sequence) == len(prompt)
            assert all(s == t for s, t in zip(sequence, prompt, strict=True) if t != mask)
            assert mask not in sequence


@pytest.mark.parametrize(
    "method, kind, count",
    [
        ("tree", "orders", 12),
        ("d5p4", "orders", 12),
        ("diverse-beam", "ancestral", 12),
        *[pytest.param(method, kind, 60, marks=full) for method, kind in itertools.product(METHODS, MODELS)],
    ],
)
def test_permuted_rows_tie_exactly_and_the_layout_still_does_not_matter(method, kind, count):
    """A model that cannot tell positions apart: scores, confidences and determinants tie up to the last bits."""
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 3, (1 + i % 5,), generator=g).tolist() for i in range(count)]
    keys = list(range(count))
    model = FakeModel(vocabulary=5, ordered=False, scale=1.0, seed=2, **MODELS[kind])
    order = "ancestral" if kind == "ancestral" else "random"
    options = dict(gen_length=5, steps=None, k=3, w=4, order=order, eos="free")
    one = run(model, prompts, method, keys=keys, **options)
    other = run(model, prompts[::-1], method, keys=keys[::-1], max_tokens_per_forward=25, **options)
    assert one.answers == other.answers[::-1]
    assert not (one.score.diff(dim=-1) > 0).any()  # places without an answer have NaN
    assert [x.tolist() for x in one.lineage] == [x.tolist() for x in other.lineage[::-1]]
    torch.testing.assert_close(one.logdet, other.logdet.flip(0), atol=1e-6, rtol=0)


PARTITION = ("d5p4", "d5p4x", "greedy-beam", "diverse-beam", "cat", "random", "partition-sample")


@pytest.mark.parametrize("kind", KINDS)
def test_one_child_a_beam_is_independent_sampling(kind):
    model, prompts = FakeModel(**MODELS[kind]), PROMPTS[:2]
    independent = run(model, prompts, "independent").answers
    for method in PARTITION:
        assert run(model, prompts, method, w=1).answers == independent, method


@pytest.mark.full
def test_one_answer():
    for method in METHODS:
        result = run(FakeModel(), PROMPTS[:1], method, k=1)
        assert len(result.answers[0]) == 1 and result.logdet.tolist() == [0], method
