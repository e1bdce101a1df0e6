"""Each metric by hand, and against another way to compute it."""

import itertools
import math
import random
from zlib import crc32

import numpy as np
import pytest

from d5p4.eval.lexical import (
    NEAR,
    distances,
    distinct,
    ead,
    empirical_entropy,
    f1,
    self_bleu,
    sentence_bleu,
    unit_counts,
    words,
)
from d5p4_lab.bench import RESULTS, read
from tests.refusals import refusal

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog", ".", "it", "ran", ",", "far"]


def texts(count, seed=0, longest=30):
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randrange(longest))) for _ in range(count)]


def test_f1_by_hand():
    for text, references, value in (
        ("The cat sat", ["a cat sat down"], 2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2)),  # precision 2/3, recall 1/2
        ("the cat", ["no", "the dog", "THE CAT"], 1),
        ("the the the", ["the the"], 2 * 2 / 5),  # a word counts as often as both have it
        ("cat.", ["cat"], 0),  # punctuation stays
        ("ÉTÉ", ["été"], 1),
        *(("", ["a"], 0), ("a", [""], 0), ("", [""], 0)),
    ):
        assert f1(text, references) == pytest.approx(value), text


def test_distinct_by_hand():
    group = ["the cat the cat", "The dog"]
    assert distinct(group, 1) == 3 / 6
    # <s> the, the cat, cat the, the cat | <s> the, the dog
    assert distinct(group, 2) == 4 / 6
    # <s> <s> the, <s> the cat, the cat the, cat the cat | <s> <s> the, <s> the dog
    assert distinct(group, 3) == 5 / 6
    assert distinct(["the"], 3) == 1
    assert distinct(["", " "], 1) == distinct([], 2) == 0


def test_ead_by_hand():
    assert ead(count=6, different=3, vocabulary=4) == pytest.approx(3 / (4 * (1 - (3 / 4) ** 6)))
    assert ead(2, 1, 1) == 1
    assert ead(0, 0, 5) == 0
    assert ead(2, 2, 30_000) == pytest.approx(1, abs=1e-4)


def test_words_and_other_units():
    assert words("The Cat's 3.5, été—ok_1") == ["the", "cat", "'", "s", "3", ".", "5", ",", "été", "—", "ok_1"]
    assert words("天气很好 café") == words("天气很好 cafe\u0301") == ["天", "气", "很", "好", "café"]
    assert distinct(["ab", "ac"], 1, units=list) == 3 / 4 and distinct(["ab", "ac"], 1) == 1
    assert unit_counts(["ab", "ac"], units=list) == (4, 3) and unit_counts(["The cat", "a cat.", ""]) == (5, 4)
    assert unit_counts([]) == (0, 0)
    assert empirical_entropy("ab", units=list) == pytest.approx(math.log(2))


def test_entropy_by_hand():
    assert empirical_entropy("the cat sat down") == pytest.approx(math.log(4))
    assert empirical_entropy("the the the cat") == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    for empty in ("the the", "", "  "):
        assert str(empirical_entropy(empty)) == "0.0"


def test_sentence_bleu_by_hand():
    # 1-grams 3/4, 2-grams 2/3, 3-grams 1/2, 4-grams none, smoothed to 1/(2·1).
    assert sentence_bleu("the cat sat up", ["the cat sat down"]) == pytest.approx(
        100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25
    )
    # Effective order: two words have 1- and 2-grams only. Shorter than the reference: exp(1 - 4/2).
    assert sentence_bleu("the cat", ["the cat sat down"]) == pytest.approx(100 * math.exp(-1))
    assert sentence_bleu("the cat sat down", ["no", "the cat sat down"]) == pytest.approx(100)
    assert sentence_bleu("", ["the cat"]) == sentence_bleu("dog", ["the cat"]) == 0


def test_self_bleu_is_each_against_the_others():
    for count, seed in itertools.product((2, 3, 8), range(4)):
        group = texts(count, seed=seed)
        group[-1] = group[0] if seed % 2 else group[-1]  # a repeated text, and texts without words
        direct = [sentence_bleu(text, group[:i] + group[i + 1 :]) for i, text in enumerate(group)]
        assert self_bleu(group) == pytest.approx(np.mean(direct), abs=1e-9), (count, seed)


def test_bad_arguments_are_named():
    for metric, arguments, expected in (
        (f1, ("the", "the"), "at least one reference is needed, got 'the'"),
        (sentence_bleu, ("the", []), "at least one reference"),
        (self_bleu, ([],), "at least one text"),
        (distinct, ("the", 1), "list of strings is needed, got 'the'"),
        (distinct, (["the"], 0), "n=0"),
        (ead, (1, 1, 0), "vocabulary=0"),
    ):
        assert expected in refusal(metric, *arguments), metric


def test_the_threshold_of_near_copies_fits_pairs_that_a_reader_has_labelled():
    """Of pairs in one half of the prompts, no other threshold has fewer errors. The other half was not used."""
    rows = read(RESULTS / "pairs.jsonl.xz")

    def errors(half, limit, *kinds):
        own = [row for row in rows if crc32(row["prompt"].encode()) % 2 == half and row["kind"] not in kinds]
        return [(distances([row["a"], row["b"]])[0][1] < limit) != row["same"] for row in own]

    least = sum(errors(0, NEAR))
    assert len(rows) == 363 and all(least <= sum(errors(0, limit / 50)) for limit in range(1, 50))
    assert (sum(errors(1, NEAR)), len(errors(1, NEAR))) == (33, 175)  # 19 %
    model = errors(1, NEAR, "written")
    assert 0.04 < sum(model) / len(model) < 0.06


def test_distances_against_the_table_of_common_subsequences():
    group = ["", "same, Same", *texts(8, seed=5, longest=90)]
    rows, result = [words(text) for text in group], distances(group)
    for (i, a), (j, b) in itertools.product(enumerate(rows), repeat=2):
        line = [0] * (len(b) + 1)
        for word in a:
            before = line[:]
            for n, other in enumerate(b):
                line[n + 1] = before[n] + 1 if word == other else max(line[n], before[n + 1])
        total = len(a) + len(b)
        assert result[i][j] == pytest.approx(1 - 2 * line[-1] / total if total else 0.0, abs=1e-12)
