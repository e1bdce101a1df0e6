"""Countdown: the checker by what it must refuse, the canonical form by what it must merge."""

import itertools
import re

import pytest

from d5p4.eval.countdown import Problem, canonical, fault, is_right
from tests.refusals import refusal

PUZZLE = Problem((86, 28, 13, 31), 96)
ANSWER = "86+28=114,31-13=18,114-18=96"


def test_prompts_round_trip_and_bad_arguments_are_refused_by_name():
    assert "0" in refusal(Problem, (3, 0, 5), 8)
    assert PUZZLE.prompt == "86,28,13,31:96" and Problem.parse(PUZZLE.prompt) == PUZZLE
    for text in (
        *("", "86", "86:96", "86,28", "86,28:", "86,,28:96", "086,28:96", "86, 28:96", "86,28:96\n", "86,28:-9"),
        *("86,0:86", "\uff18,2:16", "86,28:96:1", "1" * 50 + ",2:3", "a,b:c"),
    ):
        assert repr(text)[:20] in refusal(Problem.parse, text)


# ---- the checker


RIGHT = [
    ("86,28,13,31:96", ANSWER),
    ("86,28,13,31:96", "31-13=18,28+86=114,114-18=96"),
    ("2,3:6", "2*3=6"),
    ("7,7,7:56", "7*7=49,7+49=56"),
    ("99,99,99:99", "99*99=9801,9801/99=99"),  # larger than anything generated, and right
    ("4,2,2,1:9", "2+2=4,4+4=8,8+1=9"),  # an original and a result of the same value
]


WRONG = [
    ("86,28,13,31:96", "", "0 steps where 3 are needed"),
    ("86,28,13,31:96", "86+28=114", "1 step where 3 are needed"),
    ("86,28,13,31:96", "86+28=114,114-18=96", "2 steps where 3 are needed"),  # numbers left unused
    ("86,28,13,31:96", ANSWER + ",96*1=96", "4 steps where 3 are needed"),
    ("86,28,13,31:96", "86+28=114,31-13=19,114-18=96", "step 2: 31-13 is 18, not 19"),
    ("86,28,13,31:96", "86+28=114,31-7=24,114-18=96", "7 is not on the table"),
    ("86,28,13,31:96", "86+28=114,86-31=55,114-18=96", "86 is not on the table"),  # used twice
    ("86,28,13,31:96", "86+86=172,31-13=18,172-18=154", "86 is not on the table"),  # twice in one step
    ("86,28,13,31:96", "86+28=114,31-13=18,114+18=132", "ends at 132, not 96"),
    ("86,28,13,31:95", ANSWER, "ends at 96, not 95"),
    ("86,28,13,31:114", "31-13=18,86+28=114,114-18=96", "ends at 96, not 114"),  # passed on the way
    ("86,28,13,31:96", "86+28=114,31-13=18,114-18=96=96", "cannot read step '114-18=96=96'"),
    ("86,28,13,31:96", "86+28=114,3+", "cannot read step '3+'"),
    ("86,28,13,31:96", "__import__('os')", "cannot read step"),
    ("2,3:6", "2*3=6 ", "cannot read step '2*3=6 '"),
    ("2,3:6", "02*3=6", "cannot read step"),
    ("2,3:6", "2**3=8", "cannot read step"),
    ("2,3:6", "\uff12*3=6", "cannot read step"),
    ("2,3:1", "2-3=1", "step 1: 2-3 is -1, not 1"),
    ("2,3:1", "2-3=-1", "cannot read step"),
    ("7,2:3", "7/2=3", "step 1: 7/2 is not whole"),
    ("3,3,5:5", "3-3=0,5-0=5", "cannot read step '5-0=5'"),
    ("3,3,5:5", "3-3=0,5+3=8", "step 1: 0 is not allowed"),
    ("3,5:5", "5/0=5", "cannot read step '5/0=5'"),
]


def test_right_answers_and_why_others_are_wrong():
    for problem, answer in RIGHT:
        assert fault(problem, answer) is None and is_right(Problem.parse(problem), answer), answer
    for problem, answer, reason in WRONG:
        assert fault(problem, answer).startswith(reason) and not is_right(Problem.parse(problem), answer), answer


# ---- the canonical form


def flipped(step):
    left, operation, rest = re.split(r"([-+*/])", step)
    right, result = rest.split("=")
    return f"{right}{operation}{left}={result}" if operation in "+*" else step


def neighbours(answer):
    """What one flip of + or *, or one swap of neighbouring steps, makes of an answer."""
    steps = answer.split(",")
    flips = [[*steps[:i], flipped(steps[i]), *steps[i + 1 :]] for i in range(len(steps))]
    swaps = [[*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]] for i in range(len(steps) - 1)]
    return [",".join(changed) for changed in flips + swaps]


def every_answer(problem):
    def walk(table, steps):
        if len(table) == 1:
            if table[0] == problem.target:
                answers.add(",".join(steps))
            return
        for i, j in itertools.permutations(range(len(table)), 2):
            a, b = table[i], table[j]
            rest = [v for place, v in enumerate(table) if place not in (i, j)]
            for operation, c in (("+", a + b), ("-", a - b), ("*", a * b), ("/", a / b)):
                if c > 0 and c == int(c):
                    walk([*rest, int(c)], [*steps, f"{a}{operation}{b}={int(c)}"])

    answers: set[str] = set()
    walk(list(problem.numbers), [])
    return answers


SLOW = [pytest.param(prompt, marks=pytest.mark.full) for prompt in ("7,7,1,14:14", "86,28,13,31:96", "6,3,9,12:18")]


@pytest.mark.parametrize("prompt", ["1,2,3,4:24", "4,2,2,1:9", *SLOW])
def test_canonical_classes_are_exactly_what_flips_and_swaps_connect(prompt):
    """All right answers of a problem, joined where a flip of + or * or a swap of neighbouring steps links two. A text
    that cannot be read is its own form."""
    for text in ("", "1+", "1+2=3,", ",".join(["1+2=3"] * 7)):
        assert canonical(text) == text
    problem = Problem.parse(prompt)
    answers = every_answer(problem)
    assert all(is_right(problem, answer) for answer in answers)
    classes, left = [], set(answers)
    while left:
        reached, edge = set(), [left.pop()]
        while edge:
            answer = edge.pop()
            reached.add(answer)
            new = set(neighbours(answer)) & left
            left -= new
            edge += new
        classes.append(reached)
    forms = [{canonical(answer) for answer in group} for group in classes]
    assert all(len(form) == 1 for form in forms)
    assert len(set.union(*forms)) == len(classes) > 1
