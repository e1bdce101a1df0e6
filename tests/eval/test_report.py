"""The report against each metric taken by itself."""

import json
import sys

import numpy as np
import pytest

from d5p4.eval.graders import GRADERS
from d5p4.eval.lexical import (
    distances,
    distinct,
    ead,
    empirical_entropy,
    f1,
    near_copies,
    self_bleu,
    sentence_bleu,
    unit_counts,
)
from d5p4.eval.report import METRICS, Group, report, sentence_encoder
from d5p4.eval.stats import average_cosine, mean_figure
from tests.refusals import refusal

GROUPS = [
    Group("who sat?", ("the cat sat", "a cat sat", "the dog ran"), ("the cat sat", "the cat")),
    Group("when?", ("at night", "at night", "on a day"), ("by day and at night",)),
    Group("where?", ("in the old house", "", "été — here"), ("in the house",)),
]
MATHS = [
    Group("q", ("it is 4", "4", "#### 5", "so 5"), ("#### 5",)),  # 4 came first
    Group("q", ("#### 7", "7.0", "eight", "none"), ("7",)),
    Group("q", ("1", "2", "3", "no"), ("9",)),
]


def letters(texts):
    """Vectors of length 1: how often each letter occurs."""
    counts = np.array([[1, *(text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz")] for text in texts], float)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_words_and_references():
    result = report(GROUPS)
    flat = [(text, group.references) for group in GROUPS for text in group.answers]
    assert result.k == result.groups == 3
    assert result["answers"].value == 3 and result["different"].value == pytest.approx(8 / 3)
    assert result["entropy"].value == pytest.approx(np.mean([empirical_entropy(text) for text, _ in flat]))
    assert result["F1"].value == pytest.approx(100 * np.mean([f1(*pair) for pair in flat]))
    assert result["BLEU"].value == pytest.approx(np.mean([sentence_bleu(*pair) for pair in flat]))
    shares = [[100 * distinct(group.answers, n) for n in (1, 2, 3)] for group in GROUPS]
    assert [result[f"D{n}"].value for n in (1, 2, 3)] == pytest.approx(np.mean(shares, axis=0))
    _, size = unit_counts([text for group in GROUPS for text in group.references])
    for name, values in {
        "F1@3": [100 * max(f1(text, group.references) for text in group.answers) for group in GROUPS],
        "BLEU@3": [max(sentence_bleu(text, group.references) for text in group.answers) for group in GROUPS],
        "D1-3": np.mean(shares, axis=1),
        "distance": [100 * np.sum(distances(group.answers)) / 6 for group in GROUPS],
        "EAD": [100 * ead(*unit_counts(group.answers), size) for group in GROUPS],
        "S-BLEU": [self_bleu(group.answers) for group in GROUPS],
    }.items():
        assert result[name] == pytest.approx(mean_figure(values), nan_ok=True), name
    assert result["near copies"].value == np.mean([sum(near_copies(distances(group.answers))) for group in GROUPS])
    assert not {"S-COS", "R-COS", "pass@1"} & set(result.figures)


def test_intervals_stay_inside_the_range_of_their_figure():
    """Ten groups in which nearly all, or nearly none, is right: the worst case for a symmetric interval."""
    for odd in (("x", "x", "y"), ("z", "z", "z")):
        groups = [Group("p", ("x", "x", "x") if odd[0] == "z" else ("y", "z", "w"), ("x",))] * 9
        result = report([*groups, Group("p", odd, ("x",))], embed=letters, grader=GRADERS["exact"])
        for name, figure in result.figures.items():
            metric = METRICS[name.split("@")[0] + "@" * ("@" in name)]
            if name != "answers":
                assert metric.least <= figure.low <= figure.value + 1e-9, name
                assert figure.value - 1e-9 <= figure.high <= metric.most, name
        assert all(result[name].high <= 3 for name in ("different", "right", "right forms"))
        assert "fewer than 10 groups" not in " ".join(result.notes)


def test_without_references():
    result = report([Group(None, ("a b", "b c"))] * 2)
    names = ["answers", "different", "near copies", "distance", "entropy", "D1", "D2", "D3", "D1-3", "S-BLEU"]
    assert list(result.figures) == names


def test_one_answer_has_no_distance():
    result = report([Group("p", ("x",)), Group("p", ("a b", "a c")), Group("p", ("y",))])
    assert result["distance"].value == 50 and result["distance"].n == 1


def test_groups_of_different_sizes():
    """They have the same weight, but those that are too small for k are left out of the metrics at k."""
    result = report([Group("p", ("x",), ("x",)), Group("p", ("y", "z", "w"), ("x",))])
    assert result["F1"].value == 50 == result["F1@1"].value and result.k == 1
    assert "1 to 3 answers" in result.notes[0] and "1 of 2 groups have one answer" in result.notes[1]
    groups = [Group("p", ("x",), ("x",)), Group("p", ("x", "y"), ("x",)), Group("p", ("z", "y"))]
    result = report(groups, k=2)
    assert result["F1@2"][0] == 100 and result["F1@2"].n == 1
    assert result["F1"].n == 2 and result["S-BLEU"].n == 3
    assert "1 of 3 groups have no reference" in result.notes


def test_cosines():
    result = report(GROUPS, embed=letters)
    own = [100 * average_cosine(letters(group.answers)) for group in GROUPS]
    assert result["S-COS"].value == pytest.approx(np.mean(own))
    nearest = [(letters(group.answers) @ letters(group.references).T).max() for group in GROUPS]
    assert result["R-COS"].value == pytest.approx(100 * np.mean(nearest))
    without = report([Group("p", ("x", "y"))], embed=letters)
    assert "R-COS" not in without.figures and "S-COS" in without.figures


def test_right_answers():
    result = report(MATHS, grader=GRADERS["gsm8k"])
    assert result["pass@1"].value == pytest.approx(100 * (1 / 2 + 1 / 2 + 0) / 3)
    assert result["pass@2"].value == pytest.approx(100 * (5 / 6 + 5 / 6 + 0) / 3)
    assert result["pass@4"].value == pytest.approx(100 * 2 / 3)
    assert result["maj@4"].value == pytest.approx(100 / 3)  # 4 and 5 have two votes each, and 4 came first
    assert result["right"].value == pytest.approx(4 / 3)
    assert result["right forms"].value == pytest.approx(2 / 3)
    two = report(MATHS, grader=GRADERS["gsm8k"], k=2)
    assert [name for name in two.figures if "pass" in name] == ["pass@1", "pass@2"] and "maj@2" in two.figures
    answers = ("3+4=7,7+5=12", "4+3=7,5+7=12", "3+5=8,8+4=12", "3*4=12")
    result = report([Group("3,4,5:12", answers)], grader=GRADERS["countdown"])
    assert [result[name].value for name in ("pass@1", "right", "right forms", "maj@4")] == [75, 3, 2, 100]


def test_as_rows_and_as_json():
    result = report([GROUPS[0]], grader=GRADERS["exact"])
    rows = {row[0]: row for row in result.table()}
    assert all(len(row) == len(result.COLUMNS) for row in result.table())
    assert rows["different"][1:5] == ("3.00", "–", "–", "1")
    written = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert list(written["metrics"]) == list(result.figures)
    assert written["metrics"]["F1@3"]["value"] == 100 and written["metrics"]["F1@3"]["se"] is None
    assert written["metrics"]["F1@3"]["unit"] == "%" and written["metrics"]["entropy"]["unit"] == "nats"


REFUSED = [
    ([], {}, "at least one answer each, got none"),
    ([Group("p", ())], {}, "at least one answer each"),
    (GROUPS, {"k": 4}, "k=4 must be between 1 and 3"),
    (GROUPS, {"k": 0}, "k=0"),
    ([Group("p", ("x",))], {"grader": GRADERS["exact"]}, "'exact' can judge none of the 1 groups: it needs a ref"),
    ([Group(None, ("x",))], {"grader": GRADERS["countdown"]}, "it needs a prompt written like 86,28,13,31:96"),
]


def test_impossible_reports_are_refused():
    for groups, options, expected in REFUSED:
        assert expected in refusal(report, groups, **options), expected


def test_an_encoder_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    assert "cannot be read as a sentence encoder" in refusal(sentence_encoder, tmp_path, "cpu")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install 'd5p4[eval]'" in refusal(sentence_encoder, tmp_path)
