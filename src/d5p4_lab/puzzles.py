"""Draws countdown puzzles, of which one in 64 is held out of training, and other generated data.

For each row, draw n numbers uniformly. Then draw n - 1 steps: two values on the table and an operation, uniformly.
The larger value is the first operand. Drop a row if a division is not exact, a result is 0 or too large, or the last
result is no target. So a problem's chance is proportional to the number of its solutions.
Letters in shapes: R is the number of rows, n the number of numbers of a problem.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import WINDOW, Problem

OPERATIONS = "+-*/"
LARGEST_NUMBER, LARGEST_VALUE, TARGETS = 99, 999, (10, 99)  # limits of the generated numbers, results and targets
_HELDOUT_SHARE = 64  # one problem in 64 is held out of training
_BARREN = 64  # after 64 batches in a row without a new item, `first_different` assumes that no more exist

Item = TypeVar("Item")


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


def is_heldout(problem: Problem) -> bool:
    return bool(heldout(np.array([problem.numbers]), np.array([problem.target]))[0])


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
