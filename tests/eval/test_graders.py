"""Graders against answers judged by hand, a second extractor, and text made to hurt."""

import re
from decimal import Decimal

import pytest

from d5p4.eval import graders
from d5p4.eval.countdown import canonical
from d5p4.eval.graders import GRADERS, LONGEST, grader, grader_of, gsm8k_number, register_grader
from tests.refusals import refusal

GOLD = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


def is_right(name, text, reference):
    (mark,) = grader(name).grade(None, [text], reference)
    return mark


NUMBERS = {  # number: texts
    # fmt: off
    # after the mark
    "18": [GOLD, "####18", "####\n 18 eggs, 3 of them blue"],
    "1450000": ["#### 1,450,000"],
    "8": ["#### 7 no wait #### 8", "### 7 and 8"],
    "12.50": ["#### The answer is $12.50."],
    "9": ["it is 9 ####"],
    # the last number
    "18.0": ["16 - 3 - 4 = 9 ... 9 * $2 = $18", "\\boxed{18}", "_18_"],
    "12": ["20/4 = 5 boxes, leaving 12 boxes. So the answer is 12.", "3 x 4=12"],
    "50": ["That is 50%."],
    # commas, dots, currency
    "1000": ["1,000"],
    "1234.5": ["$1,234.50."],
    "3": ["1,2,3", "version 1.2.3"],
    "0": ["1,0000", "-0"],
    "0.5": ["costs $.50"],
    "5": ["so...5", "10-5"],
    # signs
    "-5": ["-5", "-$5", "$-5", "(-5)", "\u22125"],
    "4": ["(2+3)-4"],
    "20": ["50%-20"],
    "1": ["a-1"],
    # the rule and no more
    "2": ["1/2"],
    "30": ["at 3:30"],
    None: ["", "####", "\u0661\u0668", "."],
    # fmt: on
}


def test_the_number_of_an_answer():
    for number, texts in NUMBERS.items():
        for text in texts:
            assert gsm8k_number(text) == (None if number is None else Decimal(number)), text


def test_ways_to_write_a_number_are_one_answer():
    judge = grader("gsm8k")
    for text in ("18", "18.0", "18.00", "$18", "18%", "018", "is 18.", "#### 18\n", "3 then #### 18"):
        assert is_right("gsm8k", text, GOLD), text
        assert is_right("gsm8k", text, ["#### 17", "18"]), text
        assert len({judge.key(text), judge.key("18")}) == 1, text
    for text in ("", "19", "-18", "18.000000000000000000001", "1.8", "180", "18 or 19", "#### 19 18"):
        assert not is_right("gsm8k", text, GOLD), text
        assert judge.key(text) != judge.key("18"), text


def test_numbers_are_compared_exactly():
    """With any number of digits. A reference may be a number."""
    long = "123456789" * 8
    assert is_right("gsm8k", f"{long}.0", long)
    assert not is_right("gsm8k", f"{long[:-1]}8", long)
    assert not is_right("gsm8k", "0.1000000000000000055511151231257827", "0.1")
    for reference, text in ((18, "18.0"), (0.5, ".5"), (-3, "-3"), (1e20, "100,000,000,000,000,000,000")):
        assert is_right("gsm8k", text, reference), text


HOSTILE = [
    *("9" * 10**6, "#### " + "9" * 10**6, "0." + "0" * 10**6 + "1", "1e" + "9" * 10**6),
    *("1" + ",000" * 40_000, "1," * 80_000, "1,22" * 40_000, "1." * 80_000, ".1" * 80_000, "." * 160_000),
    *("-" * 160_000, "$" * 160_000, "-$" * 80_000 + "x"),
    *("#" * 160_000, "####" * 40_000 + "x", "\ud800\0" * 80_000),
]


def test_hostile_text_is_read_once_and_gives_short_numbers():
    """Matching that goes back over its text takes minutes here, and runs into the limit of a test."""
    for text in HOSTILE:
        number = gsm8k_number(text)
        assert not is_right("gsm8k", text, "18.5"), text[:8]
        assert is_right("exact", text, text), text[:8]
        GRADERS["countdown"].key(text)
        assert GRADERS["programs"].key(text) == text, text[:8]
        assert GRADERS["programs"].grade("1>1:", [text], None) == [False], text[:8]
        assert number is None or len(str(number)) <= LONGEST, text[:8]


def test_text_is_never_evaluated(tmp_path):
    target = tmp_path / "made"
    attack = f"__import__('pathlib').Path({str(target)!r}).touch() or 9**9**9"
    for name, judge in GRADERS.items():
        judge.key(attack)
        prompt, reference = ("1 2>2:", "3>3") if name == "programs" else ("2,3:6", "6")
        assert judge.grade(prompt, [attack], reference) == [False]
    assert not target.exists()
    assert gsm8k_number("9**9**9") == 9


def test_what_cannot_be_compared_is_an_error():
    for reference in ("no number", "", [], ["18", "none"], True, {"a": 1}):
        assert re.search("reference|text", refusal(is_right, "gsm8k", "18", reference)), reference
    for reference in ([], 3, ["mall", 3]):
        assert re.search("text|empty", refusal(is_right, "exact", "bank", reference)), reference
    for name in ("gsm8k", "exact"):
        assert "18" in refusal(is_right, name, 18, "18") and "18" in refusal(grader(name).key, 18), name
        assert grader(name).grade("a prompt", ["18"], None) is None, name


def test_exact_match_strips_and_folds_case():
    assert is_right("exact", "  Department Store\n", "department store")
    assert is_right("exact", "STRASSE", "Straße")
    assert grader("exact").grade(None, ["mall", "malls", "mall.", ""], ["bank", "Mall"]) == [True, False, False, False]
    key = grader("exact").key
    assert key(" Mall ") == key("mall") != key("malls")


def test_countdown_is_judged_by_its_checker_and_counted_by_canonical_form():
    judge, prompt = grader("countdown"), "86,28,13,31:96"
    texts = ["86+28=114,31-13=18,114-18=96", "31-13=18,28+86=114,114-18=96", "86+28=114,31-13=18,114-18=97", ""]
    right = judge.grade(prompt, texts, None)
    assert right == [True, True, False, False] == judge.grade(prompt, texts, ["1+1=2"])
    assert judge.count_right(texts, right) == 1 and judge.count_right(texts[3:], right[3:]) == 0
    assert judge.key(texts[0]) == judge.key(texts[1]) == canonical(texts[0]) != judge.key("86-18=68,68+28=96")
    for other in ("86:96", "86,28", None, [1, 2], [{"role": "user", "content": prompt}]):
        assert judge.grade(other, texts, None) is None, other
    assert judge.about and all(judge.grade(example, [""], None) == [False] for _, example in judge.examples)


def test_programs_are_judged_by_the_examples_of_the_prompt_and_of_the_references():
    judge, prompt = grader("programs"), "3 1 2>2 3|5 4 9>5 6|1 1 0>1 2:"
    texts = ["sort take 2 map +1", "map +1 sort take 2", "sort reverse drop 1 sort map +1", "sort", ""]
    right = judge.grade(prompt, texts, None)
    assert right == [True, True, True, False, False] and judge.count_right(texts, right) == 2
    hidden = "9 8 7 1>2 8"
    assert judge.grade(prompt, texts, hidden) == [True, True, False, False, False]
    assert judge.grade(prompt, texts, [hidden, "5>5"]) == [False] * 5
    for other in (prompt[:-1], "86,28:96", None, [1, 2], [{"role": "user", "content": prompt}]):
        assert judge.grade(other, texts, hidden) is None, other
    assert "written like" in refusal(judge.grade, prompt, texts, "42")
    assert judge.about and all(judge.grade(example, [""], None) == [False] for _, example in judge.examples)


def test_graders_have_their_names_and_others_are_refused():
    assert list(GRADERS) == ["gsm8k", "exact", "countdown", "programs"]
    assert all(grader(name).name == name for name in GRADERS)
    assert refusal(grader, "math") == "there is no grader 'math'; the graders are gsm8k, exact, countdown, programs"
    assert "did you mean countdown?" in refusal(grader, "countdwn")


class Carded:
    name = "mine"

    def __init__(self, **defaults):
        self.generation_defaults = defaults


def test_a_task_of_a_stranger_is_marked_where_the_card_names_it(monkeypatch):
    monkeypatch.setattr(graders, "GRADERS", dict(GRADERS))
    longest = register_grader("longest", lambda prompt, texts, reference: [len(text) > len(prompt) for text in texts])
    assert grader_of(Carded(grader="longest")) is longest is grader("longest")
    right = longest.grade("ab", ["abc", "abc ", "a"], None)
    assert right == [True, True, False] and longest.count_right(["abc", "abc ", "a"], right) == 1
    assert "already a grader 'longest'" in refusal(register_grader, "longest", print)
    assert "a name and two functions" in refusal(register_grader, "none", None)
    assert grader_of(Carded(order="confidence")) is None
    for wrong in ("countdwn", {"name": "countdown"}, 3):  # a config may hold anything
        with pytest.warns(UserWarning, match="model mine are not marked right or wrong: there is no grader"):
            assert grader_of(Carded(grader=wrong)) is None
