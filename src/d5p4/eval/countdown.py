"""The Countdown puzzle: problems, the checker of answers, and the canonical form of an answer.

A player must reach the target with + - * / and must use every number exactly once. The prompt `86,28,13,31:96` has the
answer `86+28=114,31-13=18,114-18=96`. The values that can still be used are "on the table": each step takes two values
off the table and puts its result on the table, so n numbers need n - 1 steps. Text is matched, never evaluated.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..errors import D5P4Error, shown

WINDOW = {3: 24, 4: 36, 5: 48}  # the tokens of the longest answer, end of text included, for 3, 4 or 5 numbers

_NUMBER = "[1-9][0-9]{0,17}"  # at most 18 digits, so that a long text cannot become a huge integer
_PROMPT = re.compile(f"{_NUMBER}(?:,{_NUMBER})+:{_NUMBER}")
_STEP = re.compile(f"({_NUMBER})([-+*/])({_NUMBER})=({_NUMBER}|0)")
_REORDERED = 6  # an answer with more than 6 steps is not put in canonical order; 6 steps have up to 720 orders


@dataclass(frozen=True)
class Problem:
    """A puzzle: the numbers, each to be used exactly once, and the target to be reached."""

    numbers: tuple[int, ...]
    target: int

    def __post_init__(self) -> None:
        values = (*self.numbers, self.target)
        if len(values) < 3 or not all(0 < value < 10**18 for value in values):
            raise D5P4Error(f"a countdown problem needs at least two numbers and a target, all positive, got {values}")

    @property
    def prompt(self) -> str:
        return f"{','.join(map(str, self.numbers))}:{self.target}"

    @classmethod
    def parse(cls, text: str, reference: Any = None) -> Problem:
        """Return the problem of a prompt like `86,28,13,31:96`. A reference is ignored: puzzles have many solutions."""
        if not isinstance(text, str) or not _PROMPT.fullmatch(text):
            raise D5P4Error(f"a countdown problem is written like 86,28,13,31:96, got {shown(text)}")
        numbers, target = text.split(":")
        return cls(tuple(map(int, numbers.split(","))), int(target))


def is_right(problem: Problem | str, answer: str) -> bool:
    return fault(problem, answer) is None


def fault(problem: Problem | str, answer: str) -> str | None:
    """Return the first fault of an answer to a problem (or its prompt) in a few words, or None if the answer is right.

    Operands may come in any order, and results may be larger than in generated problems. Zero, fractions and negative
    values are not allowed.
    """
    problem = problem if isinstance(problem, Problem) else Problem.parse(problem)
    needed = len(problem.numbers) - 1
    texts = answer.split(",", needed) if answer else []  # any text after the needed steps becomes one more piece
    steps = []
    for text in texts[:needed]:
        if (match := _STEP.fullmatch(text)) is None:
            return f"cannot read step {shown(text)}"
        steps.append((int(match[1]), match[2], int(match[3]), int(match[4])))
    if len(texts) != needed:
        count = answer.count(",") + 1 if answer else 0
        return f"{count} step{'' if count == 1 else 's'} where {needed} are needed"
    table = Counter(problem.numbers)
    for number, (left, operation, right, result) in enumerate(steps, 1):
        for value in (left, right):
            if table[value] == 0:
                return f"{value} is not on the table"
            table[value] -= 1
        if operation == "/" and left % right:
            return f"step {number}: {left}/{right} is not whole"
        true = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operation]
        if result != true:
            return f"step {number}: {left}{operation}{right} is {true}, not {result}"
        if result == 0:
            return f"step {number}: 0 is not allowed"
        table[result] += 1
    result = steps[-1][-1]
    return None if result == problem.target else f"ends at {result}, not {problem.target}"


def canonical(answer: str) -> str:
    """Return the canonical form of an answer. A text that cannot be read, or of more than six steps, is unchanged.

    The larger operand of + and * comes first, and the order of the steps is the alphabetically first of all orders that
    are reached by swapping neighbouring steps of which the second does not use the result of the first.
    """
    texts = answer.split(",", _REORDERED)
    matches = [match.groups() for match in map(_STEP.fullmatch, texts) if match]
    if len(matches) < len(texts) or len(texts) > _REORDERED:
        return answer
    steps = tuple((b, o, a, c) if o in "+*" and int(a) < int(b) else (a, o, b, c) for a, o, b, c in matches)
    numbers = _numbers_needed(steps)
    orders, edge = {steps}, [steps]
    while edge:
        order = edge.pop()
        for i in range(len(order) - 1):
            swapped = (*order[:i], order[i + 1], order[i], *order[i + 2 :])
            if swapped not in orders and _numbers_needed(swapped) == numbers:
                orders.add(swapped)
                edge.append(swapped)
    return ",".join(f"{a}{operation}{b}={c}" for a, operation, b, c in min(orders))


def _numbers_needed(steps: tuple[tuple[str, str, str, str], ...]) -> Counter[str]:
    """Return the operands that are not results of earlier steps. In a right answer, these are the problem's numbers."""
    table, needed = Counter[str](), Counter[str]()
    for a, _, b, c in steps:
        for value in (a, b):
            (table if table[value] else needed)[value] += -1 if table[value] else 1
        table[c] += 1
    return needed
