"""The distance of answers and the threshold of near copies, against the pairs that a reader has labelled."""

import random

import pytest

from d5p4.eval.lexical import NEAR
from d5p4_lab.bench import pairs, read

DISTANCE = next(iter(pairs.MEASURES))


def test_the_threshold_of_the_library_is_the_one_that_fits_the_labels():
    rows = read(pairs.RESULT)
    first, second = pairs.halves(rows)
    assert len(rows) == len(first) + len(second) > 300 and min(len(first), len(second)) > 150
    assert not {row["prompt"] for row in first} & {row["prompt"] for row in second}
    values = pairs.values_of(DISTANCE, first)
    assert pairs.fitted(first, values) == pytest.approx(NEAR, abs=0.005)
    least = sum(pairs.errors(first, values, NEAR))
    assert all(least <= sum(pairs.errors(first, values, limit / 100)) for limit in range(1, 100))


def test_every_measure_is_bounded_symmetric_and_zero_for_equal_texts():
    source, words = random.Random(0), ["the", "old", "door", "is", "a", "table,", "Door", "12", "+", "3"]
    texts = [" ".join(source.choices(words, k=n)) for n in (1, 4, 9, 30)]
    for measure in pairs.MEASURES.values():
        for one in texts:
            assert measure(one, one) == 0
            for other in texts:
                assert 0 <= measure(one, other) <= 1 and measure(other, one) == pytest.approx(measure(one, other))


def test_word_edits_by_hand():
    assert pairs.edits("a b c", "a x c d") == 2 / 4 and pairs.edits("a b", "b a") == 1 and pairs.edits("", "a") == 1
