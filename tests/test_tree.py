"""The tree: the best rows at temperature 0, draws without replacement above, and texts that always differ."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

import d5p4
from d5p4.models.tokenizer import Tokenizer
from d5p4.ops.gram import token_kernel
from d5p4.ops.sample import filter_logits
from d5p4.search import Tree
from d5p4.search.enumerated import conditional_maximum
from tests.fake import FakeModel, block_model
from tests.history import History
from tests.search.cases import chi_square

full = pytest.mark.full
LENGTH = 3


def tiny(**given):
    """A model with three letters, end-of-text and a mask. Its positions depend on each other."""
    return FakeModel(**dict(vocabulary=5, scale=1.2, seed=4) | given)


def grow(model, prompts=("ab",), **options):
    return d5p4.generate(model, list(prompts), **dict(method="tree", gen_length=LENGTH, seed=0) | options)


def conditionals(model, row):
    """log p [L, V] of the window positions of a row of tokens (mask: not revealed)."""
    states = model.body(torch.tensor([[0, 1, *row]])).states[0, 2:]
    logits = (states @ model.head.weight.T + model.head.bias).masked_fill(model.head.banned, -torch.inf)
    return torch.log_softmax(logits, -1)


def leaves(model, order, temperature=1.0, eos="last", tau=None, top_k=None, top_p=None, min_p=None):
    """The law of one draw by enumeration: {finished row: probability}. Sure positions take their top token, and the
    next position of the order is drawn."""
    mask, end = model.mask_id, model.eos_ids[0]
    result: Counter[tuple[int, ...]] = Counter()

    def walk(row, chance):
        masked = [i for i in range(row.index(end) if end in row else LENGTH) if row[i] == mask]
        if not masked:
            result[tuple(row)] += chance
            return
        plain = conditionals(model, row)
        top, token = plain.max(-1)

        def worth(i):
            value = {"top": float(top[i].exp()), "left": -i, "entropy": float((plain[i].exp() * plain[i])[:-1].sum())}
            last = eos == "last" and int(token[i]) == end
            return last, not last and -round(value[order], 9), i

        sequence = sorted(masked, key=worth)
        sure = [i for i in sequence if tau is not None and float(top[i].exp()) > tau]
        waiting = [i for i in masked if i not in sure]
        sure = [i for i in sure if eos == "free" or int(token[i]) != end or not any(j < i for j in waiting)]
        row = [int(token[i]) if i in sure else row[i] for i in range(LENGTH)]
        closed = row.index(end) if end in row else LENGTH
        place = next((i for i in sequence if i not in sure and i < closed), None)
        if place is None:
            walk(row, chance)
            return
        drawn = filter_logits(plain[None, place] / temperature, top_k, top_p, min_p).softmax(-1)[0]
        for v in drawn.nonzero()[:, 0].tolist():
            walk([v if i == place else row[i] for i in range(LENGTH)], chance * float(drawn[v]))

    walk([mask] * LENGTH, 1.0)
    return result


def law_of_texts(model, *args, **options):
    law: Counter[tuple[int, ...]] = Counter()
    for row, chance in leaves(model, *args, **options).items():
        law[text_of(model, row)] += chance
    return law


def text_of(model, row):
    end = model.eos_ids[0]
    return tuple(row[: row.index(end)] if end in row else row)


def p_value(counts, law):
    """Of counts against a law."""
    assert set(counts) <= set(law)
    numbers = [counts.get(outcome, 0) for outcome in law]
    return chi_square(torch.tensor(numbers), torch.tensor(list(law.values()), dtype=torch.float64))


@pytest.mark.parametrize(
    "order, temperature, eos, options, draws",
    [
        ("top", 1.0, "last", {}, 3000),
        ("left", 0.7, "free", {"top_k": 3}, 3000),
        ("entropy", 1.0, "last", {"tau": 0.7, "top_p": 0.95}, 3000),
        ("left", 0.8, "free", {"min_p": 0.2}, 3000),
        *(
            pytest.param(order, temperature, eos, options, 20000, marks=full)
            for order in ("top", "left", "entropy")
            for temperature, eos in ((1.0, "last"), (0.6, "free"))
            for options in ({}, {"tau": 0.7})
        ),
    ],
)
def test_answers_are_draws_without_replacement(order, temperature, eos, options, draws):
    """The ordered pair of texts with the largest perturbed values has the law of two draws without replacement. Rows of
    equal text (cut by an end-of-text token) are merged. Without a reveal rule and with eos="free", the law is that of
    `independent`."""
    model = tiny()
    law = law_of_texts(model, order, temperature, eos, **options)
    assert abs(sum(law.values()) - 1) < 1e-9 and len(law) > 4
    rule = {"reveal": "threshold"} if "tau" in options else {}
    common = dict(order=order, temperature=temperature, eos=eos, **rule, **options)
    result = grow(model, ["ab"] * draws, k=2, **common)
    pairs = []
    for answers, values in zip(result.answers, result.perturbed.tolist(), strict=True):
        pairs.append(tuple(tuple(a) for _, a in sorted(zip(values, answers, strict=True), reverse=True)))
    assert all(first != second for first, second in pairs)
    assert p_value(Counter(first for first, _ in pairs), law) > 1e-3
    both = {(a, b): law[a] * law[b] / (1 - law[a]) for a, b in itertools.permutations(law, 2)}
    assert p_value(Counter(pairs), both) > 1e-3
    if eos == "free" and not rule:
        plain = grow(model, ["ab"] * draws, method="independent", k=1, **common)
        assert p_value(Counter(tuple(answers[0]) for answers in plain.answers), law) > 1e-3


@pytest.mark.parametrize("shifted", [False, True])
def test_answers_that_are_shorter_than_a_block(shifted):
    """All texts of one and of two tokens are found, though the block has up to three more open positions."""
    model = block_model(shifted)
    tokens = int((~model.head.banned).sum())
    for prompt in ([1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8, 9]):
        for length in (1, 2, 3):
            result = d5p4.generate(model, [prompt], method="tree", k=tokens, gen_length=length, eos="free", seed=1)
            assert len({*map(tuple, result.answers[0])}) == tokens, (prompt, length)


def test_more_answers_than_children_of_one_row():
    """With k above the vocabulary, all texts of a short window come out, and no more."""
    model = tiny()
    law = leaves(model, "top")
    texts = {text_of(model, row) for row in law}
    result = grow(model, k=len(texts) + 3)
    assert {tuple(a) for a in result.answers[0]} == texts and int(result.distinct[0]) == len(texts)
    assert result.score.shape == (1, len(texts) + 3) and result.score[0, len(texts) :].isnan().all()
    assert not result.score[0, : len(texts)].isnan().any() and math.isfinite(float(result.logdet[0]))
    assert len(result[0].score) == len(result[0].distance) == len(texts) and None not in result[0].distance
    assert result.to_dict()["prompts"][0]["distinct"] == len(texts)


@pytest.mark.parametrize("draws", [4000, pytest.param(20000, marks=full)])
def test_importance_weights_are_unbiased(draws):
    """The sum of p f / P(G > kappa) over the answers estimates the mean of f (Horvitz and Thompson)."""
    model = tiny()
    law = leaves(model, "left", eos="free")
    truth = sum(chance * (row[0] == 0) for row, chance in law.items())
    result = grow(model, ["ab"] * draws, k=3, order="left", eos="free")
    kept = ~result.kappa.isnan()  # rows of equal text cannot occur from left to right
    assert bool(kept.all())
    inclusion = -torch.expm1(-torch.exp(result.logp - result.kappa[:, None]))
    weight = result.logp.exp() / inclusion
    first = torch.tensor([[a[:1] == [0] for a in answers] for answers in result.answers]).to(weight.dtype)
    estimate = (weight * first).sum(-1)
    assert abs(float(estimate.mean()) - truth) < 4 * float(estimate.std()) / draws**0.5
    assert float(estimate.std()) < (truth * (1 - truth)) ** 0.5  # three answers tell more than one draw
    for answers, values in zip(result.answers[:5], result.logp[:5].exp().tolist(), strict=True):
        for answer, chance in zip(answers, values, strict=True):
            mass = sum(p for row, p in law.items() if list(text_of(model, row)) == answer)
            assert mass == pytest.approx(chance)


def test_the_conditional_maximum_is_stable():
    value = torch.tensor([[0.3], [50.0], [-40.0]], dtype=torch.float64)
    perturbed = torch.tensor([[2.0, 2.0 - 1e-13, 1.0, -30.0, -torch.inf]], dtype=torch.float64).expand(3, 5)
    result = conditional_maximum(value, perturbed)
    assert (result[:, 0] == value[:, 0]).all() and (result[:, 4] == -torch.inf).all()
    assert not result.isnan().any() and (result.diff(dim=-1) <= 0).all()
    exact = -torch.log(torch.exp(-value[0]) - math.exp(-2.0) + torch.exp(-perturbed[0, 2]))
    assert float(result[0, 2]) == pytest.approx(float(exact))


def test_a_beam_keeps_the_k_best_children():
    """Two positions from left to right: the k best pairs of tokens among the children of the k best first tokens."""
    model = FakeModel(scale=1.5)
    k = 5

    def chances(row, place):
        states = model.body(torch.tensor([row])).states[0, place]
        logits = (states @ model.head.weight.T + model.head.bias).masked_fill(model.head.banned, -torch.inf)
        return logits.log_softmax(-1)

    first = chances([0, 1, 2, 11, 11], 3)
    pairs = {}
    for token in first.topk(k).indices.tolist():
        for other, chance in enumerate((first[token] + chances([0, 1, 2, token, 11], 4)).tolist()):
            pairs[token, other] = chance
    best = sorted((p for p in pairs if 10 not in p), key=pairs.__getitem__, reverse=True)[:k]
    result = d5p4.generate(
        model, "abc", method="tree", temperature=0, order="left", eos="never", gen_length=2, k=k, w=11
    )
    assert sorted(map(tuple, result.answers[0])) == sorted(best)
    assert int(result.rows[0]) == 1 + k and int(result.nfe[0]) == 2  # only kept rows are run


def test_diversity_maximises_values_and_determinant():
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 3, (2, 10, 6), generator=g)
    value = torch.randn(2, 10, generator=g, dtype=torch.float64)
    value[1, 8:] = -torch.inf
    leaf = SimpleNamespace(mask_id=9, value=value, tie=torch.arange(10).expand(2, 10))
    leaf.rows = lambda index: tokens[torch.arange(2)[:, None], index]
    kept = Tree(diversity=2.0).prune(leaf, 3, None)
    kernel = token_kernel(tokens, 9)

    def worth(p, items):
        items = list(items)
        return float(value[p, items].sum() + 2 * kernel[p][items][:, items].logdet())

    for p in range(2):
        best = max(worth(p, items) for items in itertools.combinations(range(10), 3))
        assert worth(p, kept[p].tolist()) >= best - 0.3  # greedy from three starts
    assert Tree().prune(leaf, 3, None)[0].tolist() == value[0].topk(3).indices.tolist()
    leaf.value = value.clone()
    leaf.value[0, 2:] = -torch.inf
    assert {0, 1} <= set(Tree(diversity=2.0).prune(leaf, 3, None)[0].tolist())


def test_the_kernel_of_tokens():
    rows = torch.tensor([[[1, 2, 9], [1, 3, 9], [1, 9, 9], [4, 4, 4], [1, 2, 9]]])
    kernel = token_kernel(rows, 9)[0]
    assert kernel[0].tolist() == pytest.approx([1, 0.8, 0.8**0.5, 0.8**2.5, 1])
    distinct = token_kernel(torch.cartesian_prod(*[torch.tensor([0, 1, 9])] * 3)[None], 9)
    assert float(torch.linalg.eigvalsh(distinct).min()) > 1e-4


def byte_pairs():
    """A byte-pair tokenizer in which different tokens give the same text, such as a, b and ab."""
    backend = tokenizers.Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "ba": 3}, [("a", "b"), ("b", "a")]))
    backend.decoder = Fuse()
    backend.add_special_tokens(["<end>", "<mask>"])
    return Tokenizer(backend, mask_id=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_differ_though_different_tokens_decode_to_the_same_text(temperature):
    model = tiny(vocabulary=6, scale=0.5)
    model.tokenizer = byte_pairs()
    k = 12
    result = grow(model, ["ab", "ba", "b"], k=k, temperature=temperature, gen_length=4)
    for texts in result.texts:
        assert len(set(texts)) == len(texts) == k
    everything = grow(model, ["ab"], k=200, temperature=temperature, gen_length=2)  # with w = 4 of 5 tokens at 0
    assert sorted(everything.texts[0]) == sorted(
        {"".join(x) for n in (0, 1, 2) for x in itertools.product(("a", "b", "ab", "ba"), repeat=n)}
    )
    if temperature:
        assert bool(everything.kappa.isnan().all())  # the weights of merged rows are unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sure_model_still_gives_k_texts(dtype):
    """Everything is accepted at once, so that the tree has one row. The second tokens give the other texts, also if
    their probabilities vanish beside 1."""
    model = tiny(scale=60.0, dtype=dtype)
    for temperature in (0.0, 1.0):
        options = dict(temperature=temperature, reveal="threshold", tau=0.2, gen_length=6)
        one, result = grow(model, k=1, **options), grow(model, k=5, **options)
        assert int(result.distinct[0]) == len(result.texts[0]) == 5
        assert one.texts[0][0] in result.texts[0]
    assert result.kappa.tolist() == [-math.inf] and (result.logp[0] == 0).sum() == 1  # the law has only one text
    assert (result.logp[0] == -math.inf).sum() == 4


def random_case(seed):
    """A random tiny model, and options of a tree."""
    draw = random.Random(seed)
    letters, length = draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 3, 4, 6])
    model = tiny(vocabulary=letters + 2, scale=draw.choice([0.2, 1, 3, 8, 30]), seed=seed)
    model.head.bias[model.eos_ids[0]] += draw.choice([-4, 0, 0, 2, 4])
    choices = dict(k=[1, 2, 3, 5, 8, 17, 40], eos=["last", "free", "never"], temperature=[0, 0.3, 1])
    choices |= dict(diversity=[0.0, 1.0], spare=[0, 0, 5], order=["top", "left", "entropy", "random"])
    options = {name: draw.choice(values) for name, values in choices.items()} | dict(gen_length=length, seed=seed)
    options |= draw.choice([{}, {}, dict(block_length=max(1, length // 2))])
    rules = [{}, dict(reveal="entropy-bound"), *(dict(reveal="threshold", tau=tau) for tau in (0.2, 0.5, 0.9))]
    options |= draw.choice(rules)
    options |= dict(w=draw.choice([1, 2, 7])) if options["temperature"] == 0 else {}
    every = letters**length if options["eos"] == "never" else sum(letters**n for n in range(length + 1))
    return model, options, every


@pytest.mark.parametrize("cases", [range(40), pytest.param(range(40, 600), marks=full)])
def test_there_are_k_texts_whenever_the_model_has_them(cases):
    for seed in cases:
        model, options, every = random_case(seed)
        result = grow(model, ["ab", "b"], **options)
        assert int(result.rows.sum()) == model.rows_seen and (result.nfe <= result.rows).all()
        for p, texts in enumerate(result.texts):
            count, score = len(texts), result.score[p].tolist()
            assert len(set(texts)) == count == int(result.distinct[p]) == min(options["k"], every), (seed, options)
            assert model.mask_id not in result.sequences[p].flatten()
            assert score[:count] == sorted(score[:count], reverse=True)


def test_history_lineage_and_reveal_steps_follow_the_tree():
    model = tiny(vocabulary=8)
    kept = History()
    result = grow(model, k=3, gen_length=5, temperature=1.0, callback=kept, logprobs=True)
    lineage, steps = result.lineage[0], kept[0]
    assert lineage.shape == (3, len(steps)) and bool(torch.stack([s.awake for s in steps]).any())
    for row, answer, reveals in zip(lineage.tolist(), result.answers[0], result.reveal_step[0], strict=True):
        for step, slot in zip(steps, row, strict=True):
            tokens = step.tokens[slot].tolist()
            assert step.awake[slot] or step.step > max(reveals)
            known = [t for t, r in zip(answer, reveals, strict=True) if r < step.step]
            assert [t for t, r in zip(tokens, reveals, strict=False) if r < step.step] == known
