"""Graders against answers judged by hand, a second extractor, and text made to hurt."""

import random
import re
from decimal import Decimal

import pytest

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import Problem, canonical
from d5p4.eval.graders import GRADERS, LONGEST, grader, gsm8k_number
from tests.refusals import refusal

GOLD = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


NUMBERS = [
    # the mark
    (GOLD, "18"),
    ("#### 1,450,000", "1450000"),
    ("#### -5", "-5"),
    ("####18", "18"),
    ("####\n 18 eggs, 3 of them blue", "18"),
    ("#### 7 no wait #### 8", "8"),
    ("#### The answer is $12.50.", "12.50"),
    ("it is 9 ####", "9"),
    ("it is 9 #### unknown", "9"),
    ("### 7 and 8", "8"),
    # the last number
    ("16 - 3 - 4 = 9 ... 9 * $2 = $18", "18"),
    ("20/4 = 5 boxes, leaving 12 boxes. So the answer is 12.", "12"),
    ("She makes $18 every day.", "18"),
    ("\\boxed{18}", "18"),
    ("**18**", "18"),
    ("_18_", "18"),
    ("That is 50%.", "50"),
    ("3 x 4=12", "12"),
    # commas, dots, currency
    ("1,000", "1000"),
    ("$1,234.50.", "1234.5"),
    ("12,345,678", "12345678"),
    ("1,2,3", "3"),
    ("the numbers 10, 20", "20"),
    ("1,0000", "0"),
    ("18.", "18"),
    ("18.00", "18"),
    ("0.5", "0.5"),
    ("costs $.50", "0.5"),
    ("so...5", "5"),
    ("version 1.2.3", "3"),
    # signs
    ("-5", "-5"),
    ("x = -5", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("(-5)", "-5"),
    ("\u22125", "-5"),
    ("10-5", "5"),
    ("10 - 5", "5"),
    ("(2+3)-4", "4"),
    ("50%-20", "20"),
    ("a-1", "1"),
    ("-0", "0"),
    # the rule and no more
    ("1/2", "2"),
    ("at 3:30", "30"),
    # nothing
    ("", None),
    ("none", None),
    ("####", None),
    ("\u0661\u0668", None),
    (".", None),
    ("-", None),
    ("$", None),
]


def test_the_number_of_an_answer():
    for text, number in NUMBERS:
        assert gsm8k_number(text) == (None if number is None else Decimal(number)), text


def test_ways_to_write_a_number_are_one_answer():
    judge = GRADERS["gsm8k"]
    for text in ("18", "18.0", "18.00", "$18", "18%", "018", "is 18.", "#### 18\n", "3 then #### 18"):
        assert judge.right(text, GOLD), text
        assert judge.right(text, ["#### 17", "18"]), text
        assert judge.key(text) == judge.key("18"), text
        assert hash(judge.key(text)) == hash(judge.key("18")), text
    for text in ("", "19", "-18", "18.000000000000000000001", "1.8", "180", "18 or 19", "#### 19 18"):
        assert not judge.right(text, GOLD), text
        assert judge.key(text) != judge.key("18"), text


def test_numbers_are_compared_exactly_however_many_digits_they_have():
    long = "123456789" * 8
    assert GRADERS["gsm8k"].right(f"{long}.0", long)
    assert not GRADERS["gsm8k"].right(f"{long[:-1]}8", long)
    assert not GRADERS["gsm8k"].right("0.1000000000000000055511151231257827", "0.1")


def test_a_reference_may_be_a_number():
    for reference, text in ((18, "18.0"), (0.5, ".5"), (-3, "-3"), (1e20, "100,000,000,000,000,000,000")):
        assert GRADERS["gsm8k"].right(text, reference), text


def test_random_numbers_in_random_dress_are_found_again():
    rng = random.Random(0)
    for _ in range(500):
        value = Decimal(rng.randrange(-(10**7), 10**7)).scaleb(-rng.randrange(3))
        sign, size = ("-" if value < 0 else ""), abs(value)
        dressed = rng.choice([f"{size:f}", f"{size:,f}", f"${size:,f}", f"{size:f}%"])
        before = rng.choice(["", "12 apples, then ", "it is 3-2=", "A: "])
        after = rng.choice(["", ".", " dollars.", "\n", ")"])
        assert gsm8k_number(f"{before}{sign}{dressed}{after}") == value, (before, sign, dressed, after)


def plain_last_number(text):
    """The usual rule in other words: whatever looks like digits, commas gone."""
    found = re.findall(r"[0-9][0-9,]*\.?[0-9]*", text)
    return found and Decimal(found[-1].replace(",", "").rstrip("."))


def test_agrees_with_a_plainer_extractor_on_ordinary_sentences():
    rng = random.Random(1)
    for _ in range(300):
        words = [rng.choice(["eggs", "cost", "$", "is", f"{rng.randrange(9999):,}", f"{rng.random():.2f}"])
                 for _ in range(8)]  # fmt: skip
        text = " ".join([*words, str(rng.randrange(99)), "."])
        assert gsm8k_number(text) == plain_last_number(text)


HOSTILE = [
    "9" * 10**6,
    "#### " + "9" * 10**6,
    "1" + ",000" * 40_000,
    "1," * 80_000,
    "1,22" * 40_000,
    "-" * 160_000,
    "$" * 160_000,
    "-$" * 80_000 + "x",
    "." * 160_000,
    "1." * 80_000,
    ".1" * 80_000,
    "#" * 160_000,
    "####" * 40_000 + "x",
    "0." + "0" * 10**6 + "1",
    "1e" + "9" * 10**6,
    "\ud800\0" * 80_000,
]


def test_hostile_text_is_read_once_and_gives_short_numbers():
    """Matching that goes back over its text takes minutes here, and runs into the limit of a test."""
    for text in HOSTILE:
        number = gsm8k_number(text)
        assert not GRADERS["gsm8k"].right(text, "18.5"), text[:8]
        assert GRADERS["exact"].right(text, text), text[:8]
        GRADERS["countdown"].key(text)
        assert number is None or len(str(number)) <= LONGEST, text[:8]


def test_text_is_never_evaluated(tmp_path):
    target = tmp_path / "made"
    attack = f"__import__('pathlib').Path({str(target)!r}).touch() or 9**9**9"
    for judge in GRADERS.values():
        judge.key(attack)
        assert not judge.right(attack, "2,3:6")
    assert not target.exists()
    assert gsm8k_number("9**9**9") == 9


def test_what_cannot_be_compared_is_an_error():
    for reference in ("no number", "", [], ["18", "none"], None, True, {"a": 1}):
        assert re.search("reference|text", refusal(GRADERS["gsm8k"].right, "18", reference)), reference
    for reference in ([], None, 3, ["mall", 3]):
        assert re.search("text|empty", refusal(GRADERS["exact"].right, "bank", reference)), reference
    for name in ("gsm8k", "exact"):
        assert "18" in refusal(GRADERS[name].right, 18, "18") and "18" in refusal(GRADERS[name].key, 18), name


# ---- exact match


def test_exact_match_strips_and_folds_case():
    judge = GRADERS["exact"]
    assert judge.right("  Department Store\n", "department store")
    assert judge.right("STRASSE", "Straße")
    assert judge.right("mall", ["bank", "Mall"])
    assert not judge.right("malls", ["bank", "Mall"])
    assert not judge.right("mall.", "mall")
    assert not judge.right("", "mall")
    assert judge.key(" Mall ") == judge.key("mall") != judge.key("malls")


# ---- countdown


def test_countdown_is_judged_by_its_checker_and_counted_by_canonical_form():
    judge, prompt = GRADERS["countdown"], "86,28,13,31:96"
    answer, other = "86+28=114,31-13=18,114-18=96", "31-13=18,28+86=114,114-18=96"
    for reference in (prompt, Problem.parse(prompt), [prompt], [Problem((1, 2), 3), prompt]):
        assert judge.right(answer, reference)
        assert judge.right(other, reference)
        assert not judge.right("86+28=114,31-13=18,114-18=97", reference)
    assert judge.key(answer) == judge.key(other) == canonical(answer)
    assert judge.key(answer) != judge.key("86-18=68,68+28=96")
    with pytest.raises(D5P4Error, match="86:96"):
        judge.right(answer, "86:96")


# ---- by name


def test_graders_have_their_names_and_others_are_refused():
    assert list(GRADERS) == ["gsm8k", "exact", "countdown"]
    assert all(grader(name).name == name for name in GRADERS)
    with pytest.raises(D5P4Error, match="'math'.*gsm8k, exact, countdown"):
        grader("math")
