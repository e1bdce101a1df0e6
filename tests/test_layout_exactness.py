"""The promises of test_exactness on the three real architectures, float64, through files and tokenizers."""

import warnings
from functools import partial

import pytest

import d5p4
from tests.checkpoints import write_dream, write_llada, write_mdlm
from tests.fake import fitting
from tests.layouts import check_layouts

WRITERS = {"llada": write_llada, "dream": write_dream, "mdlm": write_mdlm}
PROMPTS = ["the cat", "a", "two little words here"]


@pytest.fixture(scope="module", params=WRITERS)
def model(request, tmp_path_factory):
    return d5p4.load(WRITERS[request.param](tmp_path_factory.mktemp(request.param)), "cpu", "float64")


def run(model, prompts, method="d5p4", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        options = dict(k=3, w=2, gen_length=6, steps=4, seed=2, temperature=1.2, method=method) | options
        return d5p4.generate(model, prompts, **fitting(options))


def check(model, method, **options):
    check_layouts(partial(run, model, method=method, **options), PROMPTS, tokens=30)


@pytest.mark.parametrize("method", ["tree", "d5p4"])
def test_layouts_keep_the_promise(model, method):
    check(model, method, guidance=2.0)


@pytest.mark.full
@pytest.mark.parametrize("guidance", [1.0, 1.5])
@pytest.mark.parametrize("options", [{}, {"distinct": True}, {"block_length": 2}, {"k": 5, "w": 3}], ids=str)
@pytest.mark.parametrize("method", list(d5p4.METHODS))
def test_layouts_keep_the_promise_for_every_method(model, method, options, guidance):
    check(model, method, guidance=guidance, **options)
