"""Countdown: reach the target with + - * / and every number exactly once. Problem, checker and canonical form.

The prompt `86,28,13,31:96` has the answer `86+28=114,31-13=18,114-18=96`: one step fewer than numbers, each taking two
values off the table and putting its result there. Text is only ever matched against a pattern, never evaluated.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import D5P4Error
from .countdown_data import (
    CHARACTERS,
    END,
    LARGEST_NUMBER,
    LARGEST_VALUE,
    MASK,
    MIX,
    PROMPT,
    TARGETS,
    WINDOW,
    Batch,
    Draws,
    attempt,
    batch,
    heldout,
)

__all__ = [
    "CHARACTERS",
    "END",
    "LARGEST_NUMBER",
    "LARGEST_VALUE",
    "MASK",
    "MIX",
    "PROMPT",
    "TARGETS",
    "WINDOW",
    "Batch",
    "Problem",
    "batch",
    "canonical",
    "decode",
    "fault",
    "is_right",
    "problems",
]

_NUMBER = "[1-9][0-9]{0,17}"  # bounded, so that a long text cannot become a huge integer
_PROMPT = re.compile(f"{_NUMBER}(?:,{_NUMBER})+:{_NUMBER}")
_STEP = re.compile(f"({_NUMBER})([-+*/])({_NUMBER})=({_NUMBER}|0)")
_REORDERED = 6  # most steps whose orders are gone through: 6! at worst
_BARREN = 64  # draws in a row without a new held-out problem after which there is taken to be no other


@dataclass(frozen=True)
class Problem:
    """Numbers to be used exactly once each, and the target to be reached."""

    numbers: tuple[int, ...]
    target: int

    def __post_init__(self) -> None:
        values = (*self.numbers, self.target)
        if len(values) < 3 or not all(0 < value < 10**18 for value in values):
            raise D5P4Error(f"a countdown problem has two or more positive numbers and a positive target, got {values}")

    @property
    def prompt(self) -> str:
        return f"{','.join(map(str, self.numbers))}:{self.target}"

    @classmethod
    def parse(cls, text: str) -> "Problem":
        """The problem of a prompt like `86,28,13,31:96`."""
        if not isinstance(text, str) or not _PROMPT.fullmatch(text):
            raise D5P4Error(f"a countdown problem is written like 86,28,13,31:96, got {_shown(text)}")
        numbers, target = text.split(":")
        return cls(tuple(map(int, numbers.split(","))), int(target))

    @property
    def heldout(self) -> bool:
        """Whether training never sees this problem, in whatever order its numbers come."""
        return bool(heldout(np.array([self.numbers], np.int64), np.array([self.target], np.int64))[0])


def is_right(problem: Problem | str, answer: str) -> bool:
    return fault(problem, answer) is None


def fault(problem: Problem | str, answer: str) -> str | None:
    """The first thing wrong with an answer to a problem (or its prompt), in a few words; None when it is right.

    Operands may come in any order and results may be larger than the generator's; zero, fractions and negative values
    are not allowed.
    """
    if not isinstance(problem, Problem):
        problem = Problem.parse(problem)
    needed = len(problem.numbers) - 1
    texts = answer.split(",", needed) if answer else []  # what lies beyond the needed steps stays one text
    matches = []
    for text in texts[:needed]:
        match = _STEP.fullmatch(text)
        if match is None:
            return f"cannot read step {_shown(text)}"
        matches.append(match)
    if len(texts) != needed:
        found = answer.count(",") + 1 if answer else 0
        return f"{found} step{'' if found == 1 else 's'} where {needed} are needed"
    table = Counter(problem.numbers)
    result = 0
    for number, match in enumerate(matches, 1):
        left, operation, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
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
    return None if result == problem.target else f"ends at {result}, not {problem.target}"


def canonical(answer: str) -> str:
    """One text for all answers that differ only in the operand order of + and * and in the order of independent steps.

    The larger operand of + and * comes first; of all orders that swaps of neighbouring steps lead to, the first in
    alphabetical order is taken. A swap is allowed when the steps still need the same numbers to start from, which is so
    when the second does not use the result of the first. Text that cannot be read is left alone.
    """
    texts = answer.split(",", _REORDERED)
    matches = [match for match in map(_STEP.fullmatch, texts) if match]
    if len(matches) < len(texts) or len(texts) > _REORDERED:
        return answer
    steps = tuple(map(_larger_first, matches))
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


def _larger_first(step: re.Match[str]) -> tuple[str, str, str, str]:
    a, operation, b, c = step.groups()
    return (b, operation, a, c) if operation in "+*" and int(a) < int(b) else (a, operation, b, c)


def _numbers_needed(steps: tuple[tuple[str, str, str, str], ...]) -> Counter[str]:
    """The operands that are no unused result of an earlier step; of a right answer these are the problem's numbers."""
    table: Counter[str] = Counter()
    needed: Counter[str] = Counter()
    for a, _, b, c in steps:
        for value in (a, b):
            if table[value]:
                table[value] -= 1
            else:
                needed[value] += 1
        table[c] += 1
    return needed


def problems(count: int, numbers: int = 4, seed: int = 0) -> list[Problem]:
    """`count` held-out problems, no two of the same numbers and target, each as likely as the generator makes it.

    The same on every machine; a smaller count gives the beginning of the same list.
    """
    if numbers not in WINDOW:
        raise D5P4Error(f"countdown problems have 3, 4 or 5 numbers, got {numbers}")
    if count < 0:
        raise D5P4Error(f"the count of countdown problems is not negative, got {count}")
    draws = Draws(0, seed, numbers)
    found: dict[tuple[int, ...], Problem] = {}
    barren = 0
    while len(found) < count:
        before = len(found)
        ways = attempt(draws, 1 << 16, numbers)
        kept = heldout(ways.numbers, ways.target)
        for row, target in zip(ways.numbers[kept].tolist(), ways.target[kept].tolist(), strict=True):
            found.setdefault((*sorted(row), target), Problem(tuple(row), target))
        barren = barren + 1 if len(found) == before else 0
        if barren == _BARREN:
            raise D5P4Error(f"{count} held-out problems of {numbers} numbers were asked for, only {before} were found")
    return list(found.values())[:count]


def decode(ids: Iterable[int]) -> str:
    """The characters up to the first end-of-text; a mask still there reads `_`."""
    text = []
    for token in ids:
        token = int(token)
        if token == END:
            break
        if not 0 <= token <= MASK:
            raise D5P4Error(f"countdown ids are 0..{MASK}, got {token}")
        text.append("_" if token == MASK else CHARACTERS[token])
    return "".join(text)


def _shown(text: object) -> str:
    return repr(text[:39] + "…" if isinstance(text, str) and len(text) > 40 else text)
