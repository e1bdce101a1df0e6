"""The Countdown puzzle: problems, the checker of answers, and the canonical form of an answer.

A player must reach the target with + - * / and must use every number exactly once. The prompt `86,28,13,31:96` has the
answer `86+28=114,31-13=18,114-18=96`. The values that can still be used are "on the table": each step takes two values
off the table and puts its result on the table, so n numbers need n - 1 steps. Text is matched, never evaluated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error, shown

OPERATIONS = "+-*/"
LARGEST_NUMBER, LARGEST_VALUE, TARGETS = 99, 999, (10, 99)  # limits of the generated numbers, results and targets
WINDOW = {3: 24, 4: 36, 5: 48}  # the tokens of the longest answer, end of text included, for 3, 4 or 5 numbers

_NUMBER = "[1-9][0-9]{0,17}"  # at most 18 digits, so that a long text cannot become a huge integer
_PROMPT = re.compile(f"{_NUMBER}(?:,{_NUMBER})+:{_NUMBER}")
_STEP = re.compile(f"({_NUMBER})([-+*/])({_NUMBER})=({_NUMBER}|0)")
_REORDERED = 6  # an answer with more than 6 steps is not put in canonical order; 6 steps have up to 720 orders
_HELDOUT_SHARE = 64  # one problem in 64 is held out of training
_BARREN = 64  # after 64 batches in a row without a new item, `first_different` assumes that no more exist

Item = TypeVar("Item")


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
    def parse(cls, text: str) -> Problem:
        """Return the problem that a prompt like `86,28,13,31:96` describes."""
        if not isinstance(text, str) or not _PROMPT.fullmatch(text):
            raise D5P4Error(f"a countdown problem is written like 86,28,13,31:96, got {shown(text)}")
        numbers, target = text.split(":")
        return cls(tuple(map(int, numbers.split(","))), int(target))

    @property
    def heldout(self) -> bool:
        """Whether this problem is kept out of training."""
        return bool(heldout(np.array([self.numbers], np.int64), np.array([self.target], np.int64))[0])


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


# ---- generated problems
#
# For each row, draw n numbers uniformly. Then draw n - 1 steps: two values on the table and an operation, uniformly.
# The larger value is the first operand. Drop a row if a division is not exact, a result is 0 or too large, or the last
# result is no target. So a problem's chance is proportional to the number of its solutions.
# Letters in shapes: R is the number of rows, n the number of numbers of a problem.


def problems(count: int, numbers: int = 4, seed: int = 0) -> list[Problem]:
    """Draw `count` different held-out problems. Problems that differ only in the order of their numbers count as equal.

    The same seed gives the same list on every machine. A smaller count gives the beginning of the same list.
    """
    if numbers not in WINDOW:
        raise D5P4Error(f"countdown problems have 3, 4 or 5 numbers, got numbers={numbers}")
    draws = Draws(0, seed, numbers)

    def batch() -> Iterator[tuple[tuple[int, ...], Problem]]:
        ways = attempt(draws, 1 << 16, numbers)
        kept = heldout(ways.numbers, ways.target)
        for row, target in zip(ways.numbers[kept].tolist(), ways.target[kept].tolist(), strict=True):
            yield (*sorted(row), target), Problem(tuple(row), target)

    return first_different(count, batch, f"held-out problems have {numbers} numbers")


def first_different(count: int, batch: Callable[[], Iterable[tuple[Hashable, Item]]], what: str) -> list[Item]:
    """Return the first `count` items with different keys of the batches of pairs (key, item) that `batch` draws."""
    if count < 0:
        raise D5P4Error(f"count={count} must be 0 or more")
    items: dict[Hashable, Item] = {}
    barren = 0
    while len(items) < count:
        before = len(items)
        for key, item in batch():
            items.setdefault(key, item)
        barren = barren + 1 if len(items) == before else 0
        if barren == _BARREN:
            raise D5P4Error(f"count={count} is too large: only {before} {what}")
    return list(items.values())[:count]


class Ways(NamedTuple):
    """R generated problems, each with the steps of one of its solutions."""

    numbers: NDArray[np.int32]  # [R, n], in the order of the prompt
    steps: NDArray[np.int32]  # [R, n - 1, 4]: first operand, index in OPERATIONS, second operand, result

    @property
    def target(self) -> NDArray[np.int32]:  # [R]
        return self.steps[:, -1, 3]


class Draws:
    """A stream of uniform integers, made from the raw output of PCG64. numpy promises never to change this output."""

    def __init__(self, *key: int) -> None:
        if min(key) < 0:
            raise D5P4Error(f"seeds and indices of generated data must be 0 or more, got {min(key)}")
        self._source = np.random.PCG64(np.random.SeedSequence(key))

    def below(self, bound: int, count: int) -> NDArray[np.int32]:
        """Return `count` int32 numbers in 0..bound-1. Each has the chance 1/bound, up to a factor 1 ± bound / 2^32."""
        words = self._source.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
        return ((words.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.int32)


def heldout(numbers: NDArray[np.integer], target: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return bool [R], True at held-out problems. A hash that ignores the order of numbers selects 1 in 64 problems."""
    state = np.full(len(numbers), numbers.shape[1], np.uint64)
    return hash_columns(state, (*np.sort(numbers, axis=1).T, target)) % np.uint64(_HELDOUT_SHARE) == 0


def hash_columns(state: NDArray[np.uint64], columns: Iterable[NDArray[np.integer]]) -> NDArray[np.uint64]:
    """Return a hash [R] of a first state [R] and of columns [R] of numbers that are 0 or more."""
    for value in columns:
        state = (state + value.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def attempt(draws: Draws, rows: int, count: int) -> Ways:
    """Draw `rows` random problems of `count` numbers with random steps, and return the valid ones with their steps."""
    numbers = draws.below(LARGEST_NUMBER, count * rows).reshape(count, rows) + 1
    table = numbers.copy()
    steps: list[NDArray[np.int32]] = []
    for size in range(count, 1, -1):
        pairs = np.array(list(combinations(range(size), 2)), np.int32).T
        choice = draws.below(4 * pairs.shape[1], table.shape[1])
        operation, (left, right) = choice & 3, pairs[:, choice >> 2]
        row = np.arange(table.shape[1])
        x, y = table[left, row], table[right, row]
        a, b = np.maximum(x, y), np.minimum(x, y)
        c = np.choose(operation, (a + b, a - b, a * b, a // b))
        low, high = TARGETS if size == 2 else (1, LARGEST_VALUE)
        valid = (c >= low) & (c <= high) & ((operation != 3) | (c * b == a))
        table[left, row] = c
        table[right, row] = table[size - 1]
        keep, steps = np.flatnonzero(valid), [*steps, np.stack([a, operation, b, c])]
        table, numbers, *steps = (array.take(keep, axis=1) for array in (table[:-1], numbers, *steps))
    return Ways(numbers.T, np.stack([step.T for step in steps], axis=1))
