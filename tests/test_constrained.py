"""Decodes under a constraint: their laws against enumeration, and the promises that hold for every decode."""

import itertools
import json
import math
import re
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

import d5p4
from tests.fake import FakeModel, block_model

pytest.importorskip("llguidance")
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.errors.DuplicateAnswers")

FORM = "(a|b){1,3}c|d(ef|g)d?"  # four letters at most, so that all answers have room
LENGTH = 4


def language(form=FORM, length=LENGTH, letters="abcdefg"):
    texts = ("".join(text) for n in range(length + 1) for text in itertools.product(letters, repeat=n))
    return [text for text in texts if re.fullmatch(form, text)]


def law(model, prompt, texts, length=LENGTH, temperature=1.0):
    """Return, by text, its probability and the sum of log Z: each position in turn is masked, tempered and normalised.
    A position with one possible token is not asked of the model."""
    result = {}

    def grow(row, probability, log_z):
        if row[-1:] == [10] or len(row) == length:
            result["".join(chr(97 + i) for i in row if i != 10)] = probability, log_z
            return
        text = "".join(chr(97 + i) for i in row)
        following = sorted({ord(x[len(row)]) - 97 if len(x) > len(row) else 10 for x in texts if x.startswith(text)})
        if len(following) == 1:
            return grow(row + following, probability, log_z)
        whole = [*prompt, *row, *[model.mask_id] * (length - len(row))]
        state = model.body(torch.tensor([whole])).states[0, len(prompt) + len(row)]
        logits = (model.head.weight @ state + model.head.bias).masked_fill(model.head.banned, -torch.inf)
        own = (logits[following] / temperature).softmax(-1).tolist()
        mass = float(logits[following].logsumexp(0) - logits.logsumexp(0))
        for token, share in zip(following, own, strict=True):
            grow([*row, token], probability * share, log_z + mass)

    grow([], 1.0, 0.0)
    assert math.isclose(sum(p for p, _ in result.values()), 1) and set(result) == set(texts)
    return result


def law_of_runs(model, prompt, texts, sure, tree, length=LENGTH):
    """Return, by text, its probability and the sum of log Z if a forward reveals a run of sure positions. `sure` says
    whether the last of some distributions, one per position of the run, is sure. A tree takes the most probable token
    there and branches at the next position; a sample draws all tokens, and its first position need not be sure."""
    result = {}

    def following(row):
        text = "".join(chr(97 + i) for i in row)
        return sorted({ord(x[len(row)]) - 97 if len(x) > len(row) else 10 for x in texts if x.startswith(text)})

    def grow(row, probability, log_z):
        while not (done := row[-1:] == [10] or len(row) == length) and len(following(row)) == 1:
            row = row + following(row)
        if done:
            result["".join(chr(97 + i) for i in row if i != 10)] = probability, log_z
            return
        whole = [*prompt, *row, *[model.mask_id] * (length - len(row))]
        states = model.body(torch.tensor([whole])).states[0, len(prompt) :]
        logits = (states @ model.head.weight.T + model.head.bias).masked_fill(model.head.banned, -torch.inf)

        def go_on(row, probability, log_z, run):
            if row[-1:] == [10] or len(row) == length:
                return grow(row, probability, log_z)
            here, tokens = logits[len(row)], following(row)
            shares, more = here[tokens].softmax(-1), [*run, here[tokens].softmax(-1)]
            mass = log_z + (float(here[tokens].logsumexp(0) - here.logsumexp(0)) if len(tokens) > 1 else 0)
            accepted = sure(more)
            if tree and accepted:
                return go_on([*row, tokens[int(shares.argmax())]], probability, mass, more)
            if not tree and not accepted and run:
                return grow(row, probability, log_z)
            for token, share in zip(tokens, shares.tolist(), strict=True):
                (go_on if accepted else grow)([*row, token], probability * share, mass, *[more] * accepted)

        go_on(row, probability, log_z, [])

    grow([], 1.0, 0.0)
    assert math.isclose(sum(p for p, _ in result.values()), 1) and set(result) <= set(texts)
    return result


def bounded(run, bound):
    entropies = [float(torch.special.entr(p).sum()) for p in run]
    return all(sum(entropies[: i + 1]) - max(entropies[: i + 1]) <= bound for i in range(len(run)))


RUNS = "[a-d][b-e]{1,2}f?"
RULES = [
    ({"reveal": "threshold", "tau": 0.7}, lambda run: float(run[-1].max()) > 0.7),
    (
        {"reveal": "factor", "factor": 1.0},
        lambda run: all((i + 2) * (1 - float(p.max())) < 1 for i, p in enumerate(run)),
    ),
    ({"reveal": "entropy-bound", "entropy_bound": 0.3}, lambda run: bounded(run, 0.3)),
]


def check_counts(counts, expected, total):
    """Chi-square of counts against probabilities. What is expected less than five times is one class."""
    assert set(counts) <= set(expected)
    rare = [x for x, p in expected.items() if p * total < 5]
    seen = [counts[x] for x in expected if x not in rare] + [sum(counts[x] for x in rare)]
    wanted = [p * total for x, p in expected.items() if x not in rare] + [sum(expected[x] for x in rare) * total]
    if wanted[-1] < 1:
        assert seen[-1] <= 5
        seen, wanted = seen[:-1], wanted[:-1]
    factor = sum(seen) / sum(wanted)
    assert len(seen) > 2 and chisquare(seen, [x * factor for x in wanted]).pvalue > 1e-4


@pytest.fixture(scope="module")
def model():
    return FakeModel(scale=0.5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_independent_answers_follow_the_locally_renormalised_law(model, temperature):
    exact, total = law(model, [1, 2], language(), temperature=temperature), 3000
    options = dict(method="independent", gen_length=LENGTH, temperature=temperature, seed=5, regex=FORM)
    result = d5p4.generate(model, [1, 2], k=total, **options)
    check_counts(Counter(result.texts[0]), {text: p for text, (p, _) in exact.items()}, total)
    assert not any(result.unfinished[0])
    for text, log_z in zip(result.texts[0], result.log_z[0].tolist(), strict=True):
        assert math.isclose(log_z, exact[text][1], abs_tol=1e-9)


@pytest.mark.parametrize(("rule", "sure"), RULES, ids=[rule["reveal"] for rule, _ in RULES])
def test_samples_follow_the_law_of_runs(model, rule, sure):
    exact, total = law_of_runs(model, [1, 2], language(RUNS), sure, tree=False), 1000
    options = dict(method="independent", gen_length=LENGTH, seed=5, regex=RUNS)
    result = d5p4.generate(model, [1, 2], k=total, **rule, **options)
    check_counts(Counter(result.texts[0]), {text: p for text, (p, _) in exact.items()}, total)
    for text, log_z in zip(result.texts[0], result.log_z[0].tolist(), strict=True):
        assert math.isclose(log_z, exact[text][1], abs_tol=1e-9)
    few, slow = (d5p4.generate(model, [1, 2], k=20, **more, **options) for more in (rule, {}))
    assert int(few.rows[0]) < int(slow.rows[0])


@pytest.mark.parametrize(("rule", "sure"), RULES, ids=[rule["reveal"] for rule, _ in RULES])
def test_a_tree_draws_without_replacement_from_the_law_of_runs(model, rule, sure):
    exact, total = law_of_runs(model, [1, 2], language(RUNS), sure, tree=True), 1000
    p = {text: own for text, (own, _) in exact.items()}
    expected = {
        frozenset((a, b)): p[a] * p[b] * (1 / (1 - p[a]) + 1 / (1 - p[b])) for a, b in itertools.combinations(p, 2)
    }
    options = dict(k=2, method="tree", gen_length=LENGTH, seed=1, regex=RUNS)
    result = d5p4.generate(model, [[1, 2]] * total, **rule, **options)
    check_counts(Counter(map(frozenset, result.texts)), expected, total)
    for texts, log_z in zip(result.texts[:99], result.log_z.tolist(), strict=False):
        assert all(math.isclose(own, exact[text][1], abs_tol=1e-9) for text, own in zip(texts, log_z, strict=True))
    cold = d5p4.generate(model, [1, 2], **(options | rule | {"k": 8, "temperature": 0, "w": 8}))
    assert len(cold.texts[0]) == 8 and set(cold.texts[0]) <= set(language(RUNS))


def test_filters_act_on_the_allowed_tokens(model):
    """With top_k = 1 the most probable allowed token is taken, although others are more probable without a mask."""
    result = d5p4.generate(model, [1, 2], k=1, method="independent", gen_length=LENGTH, top_k=1, regex=FORM, seed=1)
    greedy, rest = "", language()
    while greedy not in rest or len(rest) > 1:
        options = {text[len(greedy)] if len(text) > len(greedy) else "k" for text in rest}
        shares = law(model, [1, 2], rest) if len(rest) > 1 else {}
        best = max(options, key=lambda x: sum(p for t, (p, _) in shares.items() if (t + "k").startswith(greedy + x)))
        rest = [text for text in rest if (text + "k").startswith(greedy + best)]
        if best == "k":
            break
        greedy += best
    assert result.texts[0] == [greedy]


def test_log_probabilities_are_those_of_the_law(model):
    exact = law(model, [1, 2], language())
    for method in ("independent", "tree"):
        result = d5p4.generate(model, [1, 2], k=6, method=method, gen_length=LENGTH, seed=3, logprobs=True, regex=FORM)
        for text, logprobs in zip(result.texts[0], result.logprob_at[0].sum(-1).tolist(), strict=True):
            assert math.isclose(logprobs, math.log(exact[text][0]), abs_tol=1e-9)


def test_a_tree_draws_without_replacement_from_the_law(model):
    """P{a, b} = p_a p_b / (1 - p_a) + p_b p_a / (1 - p_b). Many equal prompts differ in their keys."""
    p = {text: own for text, (own, _) in law(model, [1, 2], language()).items()}
    expected = {
        frozenset((a, b)): p[a] * p[b] * (1 / (1 - p[a]) + 1 / (1 - p[b])) for a, b in itertools.combinations(p, 2)
    }
    total, counts = 1500, Counter()
    result = d5p4.generate(model, [[1, 2]] * total, k=2, method="tree", gen_length=LENGTH, seed=1, regex=FORM)
    for texts in result.texts:
        counts[frozenset(texts)] += 1
    check_counts(counts, expected, total)


@pytest.mark.parametrize("reveal", [{}, {"reveal": "threshold", "tau": 1.0}])
def test_a_cold_tree_that_covers_the_language_returns_the_most_probable_answers(model, reveal):
    exact = law(model, [1, 2], language())
    best = sorted(exact, key=lambda text: -exact[text][0])
    options = dict(method="tree", gen_length=LENGTH, temperature=0, w=8, regex=FORM, **reveal)
    result = d5p4.generate(model, [1, 2], k=len(best), **options)
    assert set(result.texts[0]) == set(best)
    few = d5p4.generate(model, [1, 2], k=3, spare=len(best) - 3, **options)
    assert set(few.texts[0]) <= set(best) and len(few.texts[0]) == 3
    one = d5p4.generate(model, [1, 2], k=1, spare=0, diversity=0, **(options | {"w": 8}))
    assert one.texts[0][0] in best


@pytest.mark.parametrize("reveal", [{}, {"reveal": "threshold", "tau": 1.0}])
@pytest.mark.parametrize("form", ["(a|b)[a-e]{1,2}", "(abc|d)[a-e](e?|abc)"])
def test_a_cold_tree_returns_the_k_most_probable_answers(model, form, reveal):
    """No level of prefixes but the last is wider than ten beams, so nothing is lost before the last cut."""
    for prompt in ([1, 2], [3], [4, 5, 6]):
        exact = law(model, prompt, language(form, 7, "abcde"), 7)
        best = sorted(exact, key=lambda text: -exact[text][0])
        options = dict(method="tree", gen_length=7, temperature=0, w=6, diversity=0, spare=0, regex=form, **reveal)
        for k in (10, 13):
            result = d5p4.generate(model, prompt, k=k, **options)
            assert len(best) > k and set(result.texts[0]) == set(best[:k])
            for text, log_z in zip(result.texts[0], result.log_z[0].tolist(), strict=True):
                assert math.isclose(log_z, exact[text][1], abs_tol=1e-9)


METHODS = ["independent", "best-of-n", "d5p4", "d5p4x", "diverse-beam", "e-smc", "k-dpp", "tree"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "form", [{"regex": FORM}, {"choices": ["abc", "ddd", "e", "ff"]}, {"grammar": 'start: "a" start "b" | "c"'}]
)
def test_finished_answers_have_the_form_in_any_batch(model, method, form):
    """Prompts of different lengths, alone and together: the same answers, all of the form or marked as unfinished."""
    prompts, options = [[1, 2], [3, 4, 5, 6], [7]], dict(k=3, method=method, gen_length=7, seed=2, **form)
    together = d5p4.generate(model, prompts, keys=["x", "y", "z"], **options)
    check = {
        "regex": lambda text: re.fullmatch(FORM, text),
        "choices": lambda text: text in ("abc", "ddd", "e", "ff"),
        "grammar": lambda text: re.fullmatch("c|acb|aacbb|aaacbbb", text),
    }[next(iter(form))]
    for place, (prompt, key) in enumerate(zip(prompts, "xyz", strict=True)):
        alone = d5p4.generate(model, [prompt], keys=[key], **options)
        assert alone.texts[0] == together.texts[place]
        assert torch.allclose(alone.log_z[0], together.log_z[place], atol=1e-9, equal_nan=True)
        for text, unfinished in zip(alone.texts[0], alone.unfinished[0], strict=True):
            assert bool(check(text)) == (not unfinished)
    if method == "tree":
        assert all(len(texts) == len(set(texts)) for texts in together.texts) and not any(map(any, together.unfinished))


@pytest.mark.parametrize("rule", [{}, {"reveal": "threshold", "tau": 0.4}])
@pytest.mark.parametrize("method", ["independent", "tree", "d5p4"])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_exact_cache_and_forced_runs_over_blocks(method, shifted, rule):
    """Forced runs of eleven letters cross two edges of blocks of four. Without a cache, answers and log Z are equal."""
    model, form = block_model(shifted), "(a|b)cdefghijcde(a|b)(c|d)*"
    options = dict(k=3, method=method, gen_length=18, seed=4, regex=form) | rule
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [4, 5, 6, 7, 8, 9]]):
        cached, plain = (d5p4.generate(model, prompts, cache=cache, **options) for cache in ("exact", "none"))
        assert cached.texts == plain.texts
        assert torch.allclose(cached.log_z, plain.log_z, atol=1e-9, equal_nan=True)
        assert all(re.fullmatch(form, text) for texts in cached.texts for text in texts)
        assert int(cached.nfe.max()) <= 8  # forced letters take no step


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", [FORM, "(a|b|c)(d|e)(f|g)h?(ij|ji)*", "az|[b-e]{3}"])
def test_runs_keep_to_the_form_in_any_batch(model, method, rule, form):
    """`az` has no token for z, so a run stops at the a, which is unfinished or dropped."""
    prompts, options = [[1, 2], [3, 4, 5, 6], [7]], dict(k=3, method=method, gen_length=9, seed=2, regex=form) | rule
    together = d5p4.generate(model, prompts, keys=["x", "y", "z"], **options)
    for place, (prompt, key) in enumerate(zip(prompts, "xyz", strict=True)):
        alone = d5p4.generate(model, [prompt], keys=[key], **options)
        assert alone.texts[0] == together.texts[place]
        assert torch.allclose(alone.log_z[0], together.log_z[place], atol=1e-9, equal_nan=True)
        for text, unfinished in zip(alone.texts[0], alone.unfinished[0], strict=True):
            assert bool(re.fullmatch(form, text)) == (not unfinished)


def test_a_forced_answer_takes_one_forward(model):
    result = d5p4.generate(model, [1, 2], k=2, method="independent", gen_length=8, choices=["abcdef"])
    assert result.texts[0] == ["abcdef"] * 2 and result.nfe.tolist() == [1] and result.log_z.isfinite().all()


def test_unfinished_answers_are_marked_or_dropped(model):
    """`az|c` has no token for z, and a{9} has no room. Drawn answers are marked; a tree drops them."""
    drawn = d5p4.generate(
        model, [1, 2], k=40, method="independent", gen_length=5, seed=1, temperature=3.0, regex="az|c"
    )
    assert set(drawn.texts[0]) == {"a", "c"}
    assert [text == "a" for text in drawn.texts[0]] == drawn.unfinished[0]
    tree = d5p4.generate(model, [1, 2], k=4, method="tree", gen_length=5, regex="az|c")
    assert tree.texts[0] == ["c"] and tree.unfinished[0] == [False]
    drawn = d5p4.generate(model, [1, 2], k=2, method="independent", gen_length=5, regex="a{9}|(b|c){9}")
    assert drawn.unfinished[0] == [True, True] and all(len(text) == 5 for text in drawn.texts[0])
    assert d5p4.generate(model, [1, 2], k=2, method="tree", gen_length=5, regex="a{9}|(b|c){9}").texts == [[]]


def test_a_cold_tree_merges_spellings():
    """A vocabulary in which "ab" is also one token: a beam is not spent on both spellings."""

    class Codec:
        words = ["a", "b", "ab", "c", "ac", "bc", "abc", "d"]

        def encode(self, text):
            return [self.words.index(letter) for letter in text]

        def decode(self, ids):
            return "".join(self.words[i] if i < len(self.words) else "" for i in ids)

    model = FakeModel(vocabulary=10, scale=0.3)
    model.tokenizer = Codec()
    options = dict(method="tree", gen_length=5, temperature=0, w=8, choices=["abc", "abd", "acc", "bcd"])
    result = d5p4.generate(model, [1, 2], k=4, **options)
    assert sorted(result.texts[0]) == ["abc", "abd", "acc", "bcd"]


def test_equal_values_count_once(model):
    class Codec:
        def decode(self, ids):
            return "".join("1.0e true,[]"[i] if i < 12 else "" for i in ids)

    model = FakeModel(vocabulary=14, scale=0.2)
    model.tokenizer = Codec()
    result = d5p4.generate(
        model, [1, 2], k=20, method="independent", gen_length=6, json_schema={"enum": [1, True]}, seed=1
    )
    assert set(result.texts[0]) <= {"1", "1.0", "true"} and "true" in result.texts[0]
    assert int(result.distinct[0]) == len({str(json.loads(text)).removesuffix(".0") for text in result.texts[0]})


REFUSED = [
    ({"order": "confidence"}, "order"),
    ({"steps": 3}, "steps"),
    ({"start": "entropy"}, "start"),
    ({"eos": "never"}, "eos"),
    ({"stop": False, "method": "independent"}, "stop"),
    ({"stop_strings": "a"}, "stop_strings"),
    ({"choices": ["a"]}, "choices"),
    ({"regex": None, "choices": []}, "choices"),
    ({"method": "odd"}, "regex"),
    ({"method": "soar", "reveal": "threshold", "temperature": 0}, "regex"),
    ({"regex": "(a"}, "regex"),
]


@pytest.mark.parametrize(("options", "option"), REFUSED)
def test_what_does_not_fit_a_constraint_is_refused_by_name(model, options, option):
    with pytest.raises(d5p4.D5P4Error) as raised:
        d5p4.generate(model, [1, 2], **({"regex": FORM, "gen_length": 6} | options))
    assert raised.value.option == option


def test_prompts_with_holes_are_refused(model):
    with pytest.raises(d5p4.D5P4Error, match="holes"):
        d5p4.generate(model, [1, model.mask_id, 2], regex=FORM, gen_length=4)
