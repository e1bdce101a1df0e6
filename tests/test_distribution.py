"""The whole loop by its distribution: answers of a tiny model against the law that enumeration gives."""

import itertools
import warnings
from collections import Counter

import pytest
import torch

import d5p4
from d5p4.ops.vocab import logits_of
from tests.fake import FakeModel
from tests.search.cases import chi_square

LENGTH = 3


def token_laws(model, state):
    """[L, V] distributions of the positions of a window."""
    states = model.body(torch.tensor([[0, *state]])).states[0, 1:]
    return logits_of(states, model.head.weight, model.head.bias, model.head.banned).softmax(-1)


def law(model, state, step, steps, order):
    """Probability of every final answer from a partly masked window, by summing over all paths."""
    masked = [i for i, token in enumerate(state) if token == model.mask_id]
    if step == steps or not masked:
        return {state: 1.0}
    laws = token_laws(model, state)
    result: dict[tuple[int, ...], float] = {}
    if order == "ancestral":
        chance = 1 / (steps - step)
        subsets = [
            (s, chance ** len(s) * (1 - chance) ** (len(masked) - len(s)))
            for n in range(len(masked) + 1)
            for s in itertools.combinations(masked, n)
        ]
    else:  # random order, one position per step
        subsets = [((i,), 1 / len(masked)) for i in masked]
    allowed = [v for v in range(len(model.head.banned)) if not model.head.banned[v]]
    for subset, weight in subsets:
        if weight == 0:
            continue
        for tokens in itertools.product(allowed, repeat=len(subset)):
            child, p = list(state), weight
            for place, token in zip(subset, tokens, strict=True):
                child[place] = token
                p *= float(laws[place, token])
            for answer, q in law(model, tuple(child), step + 1, steps, order).items():
                result[answer] = result.get(answer, 0) + p * q
    return result


FULL = [
    pytest.param(order, steps, method, 6000, marks=pytest.mark.full)
    for order, steps in (("random", 3), ("ancestral", 2), ("ancestral", 4))
    for method in ("independent", "random")
]


@pytest.mark.parametrize(
    "order, steps, method, prompts",
    [("random", 3, "independent", 2000), ("ancestral", 2, "random", 2000), *FULL],
)
def test_answers_follow_the_law_of_the_model(order, steps, method, prompts):
    """Selection at random must leave the law of one beam as it is."""
    model = FakeModel(vocabulary=4, carry_over=order == "ancestral", seed=3, scale=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        options = dict(method=method, steps=steps, order=order, eos="free", max_tokens_per_forward=10**6)
        result = d5p4.generate(model, [[0]] * prompts, k=1, w=3, gen_length=LENGTH, seed=1, **options)
    expected = law(model, (model.mask_id,) * LENGTH, 0, steps, order)
    assert sum(expected.values()) == pytest.approx(1)
    counts = Counter(map(tuple, result.sequences[:, 0, -LENGTH:].tolist()))
    assert set(counts) <= set(expected)
    numbers, chances = torch.tensor([counts[a] for a in expected]), torch.tensor(list(expected.values()))
    assert chi_square(numbers, chances.double()) > 1e-3
