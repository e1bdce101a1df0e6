"""Draws the tasks of the model `programs`: held-out tasks for tests, and training rows as token ids.

A number and the name of an operation are one token each, together with the space before it. A row is a prompt and its
answer up to the end of one block, because a block-causal model sees nothing after the block that it decodes. Blocks
count from the first token of the prompt, so the first block of an answer may begin with tokens of the prompt.
Letters in shapes: B is the number of rows of a batch, R the number of drawn programs, n their number of operations.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.programs import FOLDS, LARGEST, NAMES, PROBES, Example, List, Task, output

from ..puzzles import Draws, first_different, hash_columns
from .countdown_data import mixed

VISIBLE, HIDDEN = 3, 5  # the examples of a task: in the prompt, and in the reference
LENGTHS, NUMBERS = (3, 6), (-9, 9)  # the limits of inputs
OPERATIONS = (2, 5)  # the fewest and most operations of the programs from which tasks are made
HELDOUT_OPERATIONS = (3, 5)  # the same for held-out tasks: of two operations, only five functions are held out
SHRINKING = {  # operations, and those that may not follow them directly, because a shorter program does the same
    "sort": "sort, sum, max, min, take 1, scan max",
    "reverse": "sort, reverse, sum, max, min",
    "dedup": "dedup, max, min",
    **dict.fromkeys(FOLDS, "sort, reverse, dedup, sum, max, min, take 1, take 2, take 3, scan +, scan max, scan min"),
    "take 1": "sort, reverse, dedup, sum, max, min, take 2, take 3, scan +, scan max, scan min",
    "take 2": "take 1, take 2, take 3",
    "take 3": "take 1, take 2, take 3",
    "drop 1": "drop 1",
    "map +1": "diff, map -1",
    "map -1": "diff, map +1",
    "map *2": "map /2, keep even",
    "map neg": "map neg, map abs, map sq",
    "map abs": "map abs, map sq",
    "map sq": "map abs",
    "map %3": "map abs, map %3",
    "keep even": "keep even",
    "keep odd": "keep odd",
    "keep pos": "map abs, keep pos",
    "keep neg": "keep neg",
    "scan +": "take 1",
    "scan max": "sort, max, take 1, scan max",
    "scan min": "min, take 1, scan min",
}

BLOCK = 8  # tokens per block of the model
MARKS = (">", "|", ":")
TOKEN = r" ?[^ >|:]+|[>|:]"
_HEADS = tuple(dict.fromkeys(name.split()[0] for name in NAMES))
_NUMBERS = tuple(map(str, range(-LARGEST, LARGEST + 1)))
_AFTER = tuple(dict.fromkeys([*_NUMBERS, *_HEADS, *(name.split()[-1] for name in NAMES)]))  # words after a space
VOCABULARY = (*MARKS, *_HEADS, *_NUMBERS, *(f" {word}" for word in _AFTER))
END, MASK = len(VOCABULARY), len(VOCABULARY) + 1

PROMPT = VISIBLE * 2 * (LENGTHS[1] + 1)  # tokens of the longest prompt: every list is as long as it can be
ANSWER = 2 * OPERATIONS[1] + 1  # tokens of the longest answer, end of text included
WINDOW = 16  # tokens of an answer by default
LONGEST = 24  # tokens of the longest window in the training data
ROW = 64  # positions of a row
MIX = {2: 0.15, 3: 0.25, 4: 0.3, 5: 0.3}  # {operations per program: share of the training tasks}
TOY_MIX = {2: 0.6, 3: 0.4}

_HELDOUT_SHARE = 64  # one function in 64 is held out of training
_ATTEMPTS = 1 << 14  # at most this many rows are drawn at once
_ACCEPTED = {2: 0.65, 3: 0.4, 4: 0.21, 5: 0.1}  # {operations per program: rough share of the drawn rows that are valid}
_LATE = 16  # one row in so many ends at any block of its window, the others at a block with a part of the program
_ID = {token: i for i, token in enumerate(VOCABULARY)}


class Drawn(NamedTuple):
    """A task and the program from which it was made, as indices into NAMES."""

    program: list[int]
    examples: tuple[Example, ...]


def tasks(count: int, operations: int = 4, seed: int = 0) -> list[Task]:
    """Draw `count` different held-out tasks from programs of `operations` operations: a function of the seed.

    A smaller count gives the beginning of the same list.
    """
    low, high = HELDOUT_OPERATIONS
    if not low <= operations <= high:
        raise D5P4Error(f"held-out tasks are made from {low} to {high} operations, got operations={operations}")
    draws = Draws(2, seed, operations)

    def batch() -> Iterator[tuple[str, Task]]:
        for _, examples in attempt(draws, 1 << 13, operations, VISIBLE + HIDDEN, held_out=True):
            task = Task(examples[:VISIBLE], examples[VISIBLE:])
            yield task.prompt, task

    return first_different(count, batch, f"held-out tasks have {operations} operations")


def attempt(draws: Draws, rows: int, operations: int, examples: int, held_out: bool) -> list[Drawn]:
    """Draw `rows` programs and the inputs of their examples, uniformly, and return those that make a task.

    A row is dropped if
    - two neighbouring operations of the program are in SHRINKING,
    - its function is in the other part of all functions: held out, or not,
    - an example has no result or an empty output,
    - all visible outputs, or all hidden ones, are equal to each other or to their inputs,
    - the program without one of its operations also satisfies all visible examples.
    """
    drawn = draws.below(len(NAMES), rows * operations).reshape(rows, operations)
    drawn = drawn[~shrinking()[drawn[:, :-1], drawn[:, 1:]].any(axis=1)]
    (low, high), (least, most) = LENGTHS, NUMBERS
    count = len(drawn) * examples
    lengths = (draws.below(high - low + 1, count) + low).reshape(-1, examples).tolist()
    values = (draws.below(most - least + 1, count * high) + least).reshape(-1, examples, high).tolist()
    made = list[Drawn]()
    for program, own_lengths, own_values in zip(drawn.tolist(), lengths, values, strict=True):
        inputs = [tuple(numbers[:length]) for numbers, length in zip(own_values, own_lengths, strict=True)]
        if (pairs := _examples([NAMES[i] for i in program], inputs)) is not None:
            made.append(Drawn(program, pairs))
    kept = heldout([task.program for task in made]) == held_out
    return [task for task, keep in zip(made, kept, strict=True) if keep]


def _examples(names: Sequence[str], inputs: Sequence[List]) -> tuple[Example, ...] | None:
    """Return the examples of a program for these inputs, or None if they do not make a task."""
    pairs = []
    for given in inputs:
        result = output(names, given)
        if not result:
            return None
        pairs.append((given, result))
    for part in filter(None, (pairs[:VISIBLE], pairs[VISIBLE:])):
        if len({result for _, result in part}) == 1 or all(given == result for given, result in part):
            return None
    for place in range(len(names)):
        shorter = (*names[:place], *names[place + 1 :])
        if all(output(shorter, given) == result for given, result in pairs[:VISIBLE]):
            return None
    return tuple(pairs)


@cache
def shrinking() -> NDArray[np.bool_]:
    """Return bool [operations, operations], True at pairs of neighbours in SHRINKING."""
    return np.array([[b in SHRINKING.get(a, "").split(", ") for b in NAMES] for a in NAMES])


def heldout(programs: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    """Return bool [R], True at programs whose function is held out. This is one function in 64.

    A function is known by its results for PROBES. Their hash decides, so that no program of the training data computes
    a function of a held-out task.
    """
    results = np.array([_fingerprint(tuple(row)) for row in programs], np.int64).reshape(len(programs), -1)
    state = np.full(len(programs), len(PROBES), np.uint64)
    return hash_columns(state, results.T) % np.uint64(_HELDOUT_SHARE) == 0


@lru_cache(maxsize=1 << 16)
def _fingerprint(program: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers that are equal for programs with equal results for PROBES: the lengths + 1, and the numbers."""
    names, numbers = [NAMES[i] for i in program], list[int]()
    for probe in PROBES:
        result = output(names, probe)
        numbers.append(0 if result is None else len(result) + 1)
        numbers += [LARGEST + value for value in (*(result or ()), *(0,) * LENGTHS[1])[: LENGTHS[1]]]
    return tuple(numbers)


# ---- training rows


class Batch(NamedTuple):
    """Training rows as token ids."""

    tokens: NDArray[np.int16]  # [B, ROW], right-aligned and filled up with END on the left
    lengths: NDArray[np.int64]  # [B], the number of tokens of each row
    prompts: NDArray[np.int64]  # [B], the number of tokens of each prompt
    opened: NDArray[np.int64]  # [B], how many tokens at the end of each row are answer tokens of its last block


def batch(size: int, seed: int, index: int, mix: Mapping[int, float] = MIX) -> Batch:
    """Return `size` training rows, none of a held-out function: a function of the arguments alone."""
    draws = Draws(3, seed, index)
    counts = mixed(draws, size, mix, range(OPERATIONS[0], OPERATIONS[1] + 1))
    prompts = np.full((size, PROMPT), END, np.int16)
    lengths = np.zeros(size, np.int64)
    answers = np.full((size, LONGEST), END, np.int16)
    ends = np.zeros(size, np.int64)
    for count in sorted(mix):
        rows = np.flatnonzero(counts == count).tolist()
        for row, (program, examples) in zip(rows, _training(draws, len(rows), count), strict=True):
            prompt, answer = spell(Task(examples).prompt), spell(" ".join(NAMES[i] for i in program))
            prompts[row, PROMPT - len(prompt) :], lengths[row] = prompt, len(prompt)
            answers[row, : len(answer)], ends[row] = answer, len(answer)
    return _cut(draws, prompts, lengths, answers, ends + 1)


def _training(draws: Draws, rows: int, operations: int) -> list[Drawn]:
    """Draw `rows` tasks whose functions are not held out."""
    drawn = list[Drawn]()
    while (missing := rows - len(drawn)) > 0:
        attempts = min(_ATTEMPTS, int(missing / _ACCEPTED[operations] * 1.1) + 64)
        drawn += attempt(draws, attempts, operations, VISIBLE, held_out=False)[:missing]
    return drawn


def spell(text: str) -> list[int]:
    """Return the ids of the tokens of a prompt or a program."""
    return [_ID[token] for token in re.findall(TOKEN, text)]


def _cut(
    draws: Draws, prompts: NDArray[np.int16], lengths: NDArray[np.int64], answers: NDArray[np.int16], ends: np.ndarray
) -> Batch:
    """End each row at the last token of a random block, or at the end of the window if that comes first.

    A block is chosen by one of its tokens: a token of the program or its end, or sometimes any token of the window.
    """
    size = len(lengths)
    any_window = ANSWER + draws.below(LONGEST - ANSWER + 1, size)
    window = np.minimum(np.where(draws.below(2, size) == 0, WINDOW, any_window), ROW - lengths)
    span = np.where(draws.below(_LATE, size) == 0, window, ends)
    token = lengths + draws.below(1 << 30, size) * span // (1 << 30)
    stop = np.minimum((token // BLOCK + 1) * BLOCK, lengths + window)
    start = np.maximum(lengths, token // BLOCK * BLOCK)
    place = np.arange(ROW) - (ROW - stop[:, None])  # of each column, counted from the first token of the row
    joined = np.concatenate([prompts, answers], axis=1)
    column = (place + PROMPT - lengths[:, None]).clip(0, joined.shape[1] - 1)
    tokens = np.where(place >= 0, np.take_along_axis(joined, column, axis=1), np.int16(END))
    return Batch(tokens, stop, lengths, stop - start)
