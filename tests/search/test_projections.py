"""The projections by their distributions, one parent at a time, against enumerated probabilities."""

import itertools
import math

import pytest
import torch
from scipy.stats import chisquare

from d5p4.decode.schedule import Steps
from d5p4.rng import mix
from d5p4.search import Draw, Parents, distinct_children, drawn
from d5p4.search.children import ancestral
from d5p4.types import Head

SAMPLES = 6000
MASK = 3
PROBABILITIES = torch.tensor(
    [[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.4, 0.35, 0.25], [0.6, 0.3, 0.1]], dtype=torch.float64
)


def scene(tokens=(MASK, MASK, MASK, MASK), samples=SAMPLES, **options):
    """`samples` prompts with the same parent and different streams; logits are the table's logarithms."""
    length = len(tokens)
    head = Head(torch.eye(4, dtype=torch.float64), None, torch.arange(4) == MASK)
    table = torch.cat([PROBABILITIES.log(), torch.zeros(4, 1)], 1)
    row = torch.tensor(tokens).expand(samples, 1, length)

    slot = torch.zeros(samples, 1, dtype=torch.int64)
    positions = torch.arange(length).expand(samples, length)
    parents = Parents(row, table[None], slot, positions, mix(torch.arange(samples))[:, None], row == MASK)
    return parents, Draw(head, MASK, **options)


def step(reveal=1, move=1.0, start=0, stop=4, masked=4):
    return Steps((), (), start, stop, reveal, masked, True, move)


def agrees(counts, probabilities):
    expected = torch.tensor(probabilities, dtype=torch.float64)
    assert expected.sum().item() == pytest.approx(1, abs=1e-9)
    return chisquare(torch.tensor(counts, dtype=torch.float64), expected * sum(counts)).pvalue > 1e-3


def test_ancestral_unmasks_the_right_number_and_draws_the_right_tokens():
    parents, draw = scene()
    children = ancestral(parents, step(move=0.3), draw, 2)
    moved = children.tokens != MASK
    counts = moved[:, 0, 0].sum(-1)
    expected = [math.comb(4, n) * 0.3**n * 0.7 ** (4 - n) for n in range(5)]
    assert agrees([int((counts == n).sum()) for n in range(5)], expected)
    for place in range(4):
        tokens = children.tokens[..., place][moved[..., place]]
        assert agrees(torch.bincount(tokens, minlength=3).tolist(), PROBABILITIES[place].tolist())
        logprob = children.logprob[..., place][moved[..., place]]
        torch.testing.assert_close(logprob, PROBABILITIES[place].log()[tokens])
    both = (children.tokens[:, 0, 0] == children.tokens[:, 0, 1]).all(-1).double().mean()
    alike = math.prod(0.49 + 0.09 * (p**2).sum().item() for p in PROBABILITIES)  # siblings are independent
    assert both.item() == pytest.approx(alike, abs=0.03)


def test_confidence_reveals_the_most_probable_draw():
    parents, draw = scene(samples=400)
    children = drawn(parents, step(reveal=2), draw, 3)
    assert ((children.tokens != MASK).sum(-1) == 2).all()
    every = drawn(parents, step(reveal=4), draw, 3)  # the same keys: the same draws, all shown
    shown = children.tokens != MASK
    assert torch.equal(children.tokens[shown], every.tokens[shown])
    hidden_best = every.logprob.masked_fill(shown, -math.inf).amax(-1)
    assert (every.logprob.masked_fill(~shown, math.inf).amin(-1) >= hidden_best).all()


def test_confidence_comes_from_temperature_one():
    """At temperature 3 the drawn tokens change, their confidences do not."""
    parents, draw = scene(samples=300, temperature=3.0)
    children = drawn(parents, step(reveal=4), draw, 1)
    places = torch.arange(4).expand_as(children.tokens)
    torch.testing.assert_close(children.logprob, PROBABILITIES.log()[places, children.tokens])


@pytest.mark.parametrize(("order", "place"), [("margin", 1), ("entropy", 1)])
def test_margin_and_entropy_do_not_depend_on_the_draw(order, place):
    parents, draw = scene(samples=50, order=order)
    children = drawn(parents, step(), draw, 2)
    assert (children.tokens[..., place] != MASK).all()


def test_random_order_is_uniform_over_sets():
    parents, draw = scene(order="random")
    children = drawn(parents, step(reveal=2), draw, 1).tokens[:, 0, 0] != MASK
    sets = list(itertools.combinations(range(4), 2))
    counts = [int((children[:, list(s)].all(-1)).sum()) for s in sets]
    assert agrees(counts, [1 / 6] * 6)


@pytest.mark.parametrize("reveal", [1, 2])
def test_tempered_order_draws_without_replacement_among_the_surest(reveal):
    """Argmax tokens: confidences .5 .9 .4 .6; the 2m surest compete by softmax(c / T)."""
    parents, draw = scene(order="tempered", order_temperature=0.3, temperature=0.0)
    shown = drawn(parents, step(reveal=reveal), draw, 1).tokens[:, 0, 0] != MASK
    confidence = [0.5, 0.9, 0.4, 0.6]
    support = sorted(range(4), key=lambda i: -confidence[i])[: 2 * reveal]
    weight = {i: math.exp(confidence[i] / 0.3) for i in support}
    expected: dict[tuple[int, ...], float] = {}
    for path in itertools.permutations(support, reveal):
        chance, left = 1.0, dict(weight)
        for i in path:
            chance *= left[i] / sum(left.values())
            del left[i]
        key = tuple(sorted(path))
        expected[key] = expected.get(key, 0) + chance
    counts = [int(shown[:, list(s)].all(-1).sum()) for s in expected]
    assert sum(counts) == SAMPLES and agrees(counts, list(expected.values()))


def test_end_of_text_is_revealed_last():
    parents, draw = scene(samples=400, last_ids=torch.tensor([0]))
    every = drawn(parents, step(reveal=4), draw, 1).tokens
    shown = drawn(parents, step(reveal=2), draw, 1).tokens
    enough = (every != 0).sum(-1) >= 2
    assert enough.any() and (shown[enough] != 0).all()
    assert ((shown == 0) | (shown == MASK) | (shown == every)).all()


def test_children_do_not_depend_on_how_many_are_drawn():
    parents, draw = scene(samples=20)
    for order in ("ancestral", "confidence"):
        few = (ancestral if order == "ancestral" else drawn)(parents, step(move=0.5), draw, 2).tokens
        many = (ancestral if order == "ancestral" else drawn)(parents, step(move=0.5), draw, 8).tokens
        assert torch.equal(few, many[:, :, :2])


def test_keep_distinct_follows_its_rule():
    hashes = torch.tensor([[[1, 1, 2, 3], [2, 5, 5, 1], [1, 2, 1, 2]]])
    tie = torch.tensor([[20, 10, 30]])  # parent 1 chooses first, then 0, then 2
    kept = distinct_children(hashes, tie, 2)
    assert kept[0, 1].tolist() == [0, 1]  # takes 2 and 5
    assert kept[0, 0].tolist() == [0, 3]  # 1 is new, its repeat and 2 are not, 3 is
    assert kept[0, 2].tolist() == [0, 0]  # nothing new: its own first child, repeated
    assert distinct_children(torch.tensor([[[7, 7, 8, 7]]]), torch.tensor([[0]]), 3).tolist() == [[[0, 2, 0]]]
