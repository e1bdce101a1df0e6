"""Countdown examples by the million: drawn, kept apart from held-out problems, spelled as token ids; all in numpy.

The law. Draw n numbers uniformly, then n - 1 times a uniformly random pair of the values on the table and a uniformly
random operation, the larger operand first. Throw the whole row away when a division is not exact, a result is 0 or too
large, or the last result is no target. What is left is uniform over the valid ways, so a problem's chance is
proportional to the number of ways to solve it.

Letters in shapes: B rows of a batch, R rows drawn, n numbers of a problem.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error

CHARACTERS = "0123456789+-*/=,:"  # ids 0..16
END, MASK = 17, 18
LARGEST_NUMBER, LARGEST_VALUE, TARGETS = 99, 999, (10, 99)
WINDOW = {3: 24, 4: 36, 5: 48}  # of n numbers: n - 1 steps like "999-888=111", their commas, one end-of-text
PROMPT = 17  # "99,99,99,99,99:99"
MIX = {3: 0.1, 4: 0.5, 5: 0.4}  # share of each count of numbers in training

_OPERATIONS = "+-*/"
_HELDOUT_SHARE = 64
_ATTEMPTS = 1 << 16  # most rows drawn at once: tables that stay in the cache
_ACCEPTED = {3: 0.17, 4: 0.086, 5: 0.044}  # about; only how many rows are drawn at once depends on it
_BLANK = 255  # a place without a character, squeezed out when rows are aligned


@dataclass(frozen=True)
class Ranges:
    """Numbers are 1..number, results 1..value, targets lie between the two (inclusive)."""

    number: int = LARGEST_NUMBER
    value: int = LARGEST_VALUE
    targets: tuple[int, int] = TARGETS


RANGES = Ranges()


class Ways(NamedTuple):
    """Solved problems."""

    numbers: NDArray[np.int32]  # [R, n], in the order of the prompt
    steps: NDArray[np.int32]  # [R, n - 1, 4]: a, operation (0..3 of _OPERATIONS), b, result

    @property
    def target(self) -> NDArray[np.int32]:
        """int32 [R]"""
        return self.steps[:, -1, 3]


class Batch(NamedTuple):
    """Training examples as token ids."""

    prompts: NDArray[np.uint8]  # [B, PROMPT], right-aligned, END before
    lengths: NDArray[np.int64]  # [B], characters of each prompt
    answers: NDArray[np.uint8]  # [B, 48], left-aligned, END after
    counts: NDArray[np.int64]  # [B], how many numbers


class Draws:
    """A stream of uniform integers. Built on raw words of PCG64, which numpy promises never to change."""

    def __init__(self, *key: int) -> None:
        if min(key) < 0:
            raise D5P4Error(f"seeds and indices of countdown data are not negative, got {min(key)}")
        self._source = np.random.PCG64(np.random.SeedSequence(key))

    def below(self, bound: int, count: int) -> NDArray[np.int32]:
        """int32 [count], uniform on 0..bound-1 up to bound / 2^32."""
        words = self._source.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
        return ((words.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.int32)


def heldout(numbers: NDArray[np.integer], target: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which problems ([R, n], [R]) are never trained on: one in 64, by a hash blind to the order of the numbers."""
    state = np.full(len(numbers), numbers.shape[1], np.uint64)
    for value in (*np.sort(numbers, axis=1).T, target):
        state = (state + value.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state % np.uint64(_HELDOUT_SHARE) == 0


def attempt(draws: Draws, rows: int, count: int, ranges: Ranges = RANGES) -> Ways:
    """The valid ones of `rows` random ways through `count` numbers. A row that fails a step is dropped there."""
    numbers = draws.below(ranges.number, count * rows).reshape(count, rows) + 1
    table = numbers.copy()
    passed: list[NDArray[np.intp]] = []
    taken: list[NDArray[np.int32]] = []
    for size in range(count, 1, -1):
        pairs = np.array(list(combinations(range(size), 2)), np.int32).T
        choice = draws.below(4 * pairs.shape[1], table.shape[1])
        operation, (left, right) = choice & 3, pairs[:, choice >> 2]
        row = np.arange(table.shape[1])
        x, y = table[left, row], table[right, row]
        a, b = np.maximum(x, y), np.minimum(x, y)
        c = np.choose(operation, (a + b, a - b, a * b, a // b))
        low, high = ranges.targets if size == 2 else (1, ranges.value)
        valid = (c >= low) & (c <= high) & ((operation != 3) | (c * b == a))
        table[left, row] = c
        table[right, row] = table[size - 1]
        keep = np.flatnonzero(valid)
        table = table[:-1].take(keep, axis=1)
        passed.append(keep)
        taken.append(np.stack([a, operation, b, c]).take(keep, axis=1))
    return _trace(numbers, passed, taken)


def _trace(numbers: NDArray[np.int32], passed: list[NDArray[np.intp]], taken: list[NDArray[np.int32]]) -> Ways:
    """Follow the rows that passed every step back to their first step and their numbers."""
    row = np.arange(len(passed[-1]))
    steps = []
    for keep, step in zip(reversed(passed), reversed(taken), strict=True):
        steps.append(step[:, row].T)
        row = keep[row]
    return Ways(numbers[:, row].T, np.stack(steps[::-1], axis=1))


def _training(draws: Draws, rows: int, count: int) -> Ways:
    """`rows` valid ways through problems that are not held out."""
    numbers, steps, missing = [], [], rows
    while missing > 0:
        ways = attempt(draws, min(_ATTEMPTS, int(missing / _ACCEPTED[count] * 1.1) + 64), count)
        fresh = np.flatnonzero(~heldout(ways.numbers, ways.target))[:missing]
        numbers.append(ways.numbers[fresh])
        steps.append(ways.steps[fresh])
        missing -= len(fresh)
    return Ways(np.concatenate(numbers), np.concatenate(steps))


def batch(size: int, seed: int, index: int, mix: Mapping[int, float] = MIX) -> Batch:
    """`size` training examples, none of a held-out problem; `mix` is the share of each count of numbers.

    A pure function of its arguments: whoever resumes needs to remember only the index.
    """
    if size < 1:
        raise D5P4Error(f"a batch has at least one example, got size {size}")
    if not set(mix) <= set(WINDOW) or min(mix.values(), default=0) < 0 or not 0 < sum(mix.values()) < np.inf:
        raise D5P4Error(f"a mix gives 3, 4 or 5 numbers a finite share, none negative and not all 0, got {dict(mix)}")
    draws = Draws(1, seed, index)
    kinds = np.array(sorted(mix))
    edges = np.cumsum([mix[int(kind)] for kind in kinds])
    uniform = draws.below(1 << 31, size) / (1 << 31)
    counts = kinds[np.searchsorted(edges, uniform * edges[-1], side="right")].astype(np.int64)
    prompts = np.full((size, PROMPT), END, np.uint8)
    lengths = np.zeros(size, np.int64)
    answers = np.full((size, max(WINDOW.values())), END, np.uint8)
    for count in kinds.tolist():
        rows = np.flatnonzero(counts == count)
        if len(rows):
            ways = _training(draws, len(rows), count)
            prompts[rows], lengths[rows] = _align(_spell_prompts(ways), PROMPT, right=True)
            answers[rows], _ = _align(_spell_answers(ways), answers.shape[1], right=False)
    return Batch(prompts, lengths, answers, counts)


def _digits(values: NDArray[np.int32]) -> NDArray[np.uint8]:
    """[...] values of at most three digits -> [..., 3] ids, blank where a leading zero would stand."""
    ids = np.stack([values // 100, values // 10 % 10, values % 10], axis=-1).astype(np.uint8)
    ids[..., 0][values < 100] = _BLANK
    ids[..., 1][values < 10] = _BLANK
    return ids


def _spell_prompts(ways: Ways) -> NDArray[np.uint8]:
    """Ids [R, 4(n + 1)] of "a,b,c:target" with blanks."""
    rows, count = ways.numbers.shape
    text = np.full((rows, count + 1, 4), CHARACTERS.index(","), np.uint8)
    text[:, :-1, :3] = _digits(ways.numbers)
    text[:, -1, :3] = _digits(ways.target)
    text[:, -2, 3] = CHARACTERS.index(":")
    text[:, -1, 3] = _BLANK
    return text.reshape(rows, -1)


def _spell_answers(ways: Ways) -> NDArray[np.uint8]:
    """Ids [R, 12(n - 1)] of the steps "a+b=c" joined by commas, with blanks."""
    rows, count, _ = ways.steps.shape
    text = np.full((rows, count, 12), CHARACTERS.index(","), np.uint8)
    text[..., 0:3] = _digits(ways.steps[..., 0])
    text[..., 3] = CHARACTERS.index(_OPERATIONS[0]) + ways.steps[..., 1]
    text[..., 4:7] = _digits(ways.steps[..., 2])
    text[..., 7] = CHARACTERS.index("=")
    text[..., 8:11] = _digits(ways.steps[..., 3])
    text[:, -1, 11] = _BLANK
    return text.reshape(rows, -1)


def _align(text: NDArray[np.uint8], width: int, *, right: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Squeeze the blanks out of [R, *] ids: [R, width] filled with END, and the characters of each row [R]."""
    written = text != _BLANK
    lengths = written.sum(axis=1, dtype=np.int64)
    place = np.arange(width)
    where = place >= width - lengths[:, None] if right else place < lengths[:, None]
    aligned = np.full((len(text), width), END, np.uint8)
    aligned[where] = text[written]  # both masks are read row by row, so each row keeps its characters in order
    return aligned, lengths
