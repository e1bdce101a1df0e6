"""The exact cache changes the cost and never the answers; the approximate ones are a function of the tokens."""

import itertools
import warnings
from pathlib import Path

import pytest
import torch

import d5p4
from tests import checkpoints
from tests.fake import fitting

PROMPTS = ["ab", "hello", "", "abcdefghi", "ab", "cdef"]
METHODS = list(d5p4.METHODS)
FAMILIES = {"sdar": checkpoints.write_sdar, "fast_dllm": checkpoints.write_fast_dllm}
REVEALS = {"threshold": {"tau": 0.05}, "factor": {"factor": 3.0}, "entropy-bound": {"entropy_bound": 6.0}}
full = pytest.mark.full


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, d5p4.Model]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {name: d5p4.load(write(folder / name), dtype="float64") for name, write in FAMILIES.items()}


def run(model, prompts, method="d5p4", **options):
    options = dict(k=2, w=2, gen_length=9, seed=3, logprobs=True) | options
    if method == "e-smc":
        options["interval"] = 2
    return d5p4.generate(model, prompts, **fitting(dict(method=method) | options))


def facts(result):
    """Everything that a cache must not change; numbers to the noise of float64 sums."""
    return [
        (
            result.answers[p],
            result.texts[p],
            [round(x, 9) for x in result.score[p].tolist()],
            [[round(x, 9) for x in row] for row in result.logprobs[p]],
            result.reveal_step[p],
            result.lineage[p].tolist(),
        )
        for p in range(len(result.answers))
    ]


def costs(result):
    return [x.tolist() for x in (result.rows, result.rows_nominal, result.tokens_run, result.nfe)]


@pytest.mark.parametrize(
    "family, method, options",
    [
        *[("sdar", method, {}) for method in METHODS],
        ("fast_dllm", "tree", {"reveal": "threshold", "tau": 0.05}),
        ("fast_dllm", "d5p4", {"guidance": 2.0, "stop": True}),
        ("sdar", "tree", {"spare": 2, "k": 4, "gen_length": 14, "temperature": 0.0}),
        *[
            pytest.param(family, method, {"guidance": guidance, "order": order, "reveal": reveal}, marks=full)
            for family, method, guidance, order, reveal in itertools.product(
                FAMILIES, METHODS, (1.0, 1.5), ("confidence", "margin", "ancestral"), ("schedule", *REVEALS)
            )
            if order != "ancestral" or reveal == "schedule"
        ],
    ],
)
def test_the_same_answers_with_and_without_the_exact_cache(models, family, method, options):
    model = models[family]
    options = REVEALS.get(options.get("reveal"), {}) | options
    cached, plain = run(model, PROMPTS, method, **options), run(model, PROMPTS, method, cache="none", **options)
    assert cached.settings.cache == "exact" and plain.settings.cache == "none"
    assert facts(cached) == facts(plain)
    assert (cached.tokens_run[1:] < plain.tokens_run[1:]).all()
    alone = [run(model, [prompt], method, keys=[7], **options) for prompt in PROMPTS]
    together = run(model, PROMPTS, method, keys=[7, *range(10, 15)], **options)
    assert facts(together)[0] == facts(alone[0])[0]
    assert [cost[0] for cost in costs(together)] == [cost[0] for cost in costs(alone[0])]
    small = run(model, PROMPTS, method, max_tokens_per_forward=8, **options)
    assert facts(small) == facts(cached) and costs(small) == costs(cached)
