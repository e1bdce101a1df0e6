"""Makes millions of training examples of programs as token ids, with numpy alone.

`d5p4.eval.programs` draws the tasks and decides which functions are held out. Held-out functions are never trained on.

A number and the name of an operation are one token each, together with the space before it. A row is a prompt and its
answer up to the end of one block, because a block-causal model sees nothing after the block that it decodes. Blocks
count from the first token of the prompt, so the first block of an answer may begin with tokens of the prompt.
Letters in shapes: B rows of a batch, R drawn tasks, n operations of a program.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import Draws, hash_columns
from d5p4.eval.programs import LARGEST, NAMES, List, Lists, Task, apply, pack, reduced

from .countdown_data import align, mixed

VISIBLE, HIDDEN = 3, 5  # the examples of a generated task: in the prompt, and in the reference
LENGTHS, NUMBERS = (3, 6), (-9, 9)  # the limits of generated inputs
OPERATIONS = (2, 5)  # the fewest and most operations of the programs from which tasks are generated
HELDOUT_OPERATIONS = (3, 5)  # the same for held-out tasks: of two operations, only five functions are held out
_HELDOUT_SHARE = 64  # one function in 64 is held out of training
_BARREN = 64  # after 64 batches in a row without a new task, `tasks` assumes that no more exist

BLOCK = 8  # tokens per block of the model
MARKS = (">", "|", ":")
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

_ATTEMPTS = 1 << 14  # at most this many rows are drawn at once
_ACCEPTED = {2: 0.65, 3: 0.4, 4: 0.21, 5: 0.1}  # {operations per program: rough share of the drawn rows that are valid}
_BLANK = -1  # this id marks a place without a token; `align` removes such places
_LATE = 16  # one row in so many ends at any block of its window, the others at a block with a part of the program
_ID = {token: i for i, token in enumerate(VOCABULARY)}
_SPELLED = np.array([[_ID.get(f" {word}", _BLANK) for word in (*name.split(), "")[:2]] for name in NAMES], np.int16)
_FIRST = np.array([_ID[name.split()[0]] for name in NAMES], np.int16)


# ---- generated tasks
#
# For each row, draw a program and the inputs of its examples, uniformly. Drop the row if
# - a rule makes two neighbouring operations of the program shorter,
# - an example has no result or an empty output,
# - all visible outputs, or all hidden ones, are equal to each other or to their inputs,
# - the program without one of its operations also satisfies all visible examples.
# A function is known by its results for the lists `probes`. A hash of these results decides what is held out, so that
# no program of the training data computes a function of a held-out task.
# Letters in shapes: R is the number of rows, n the number of operations, E the number of examples.


class Drawn(NamedTuple):
    """R generated tasks, each with the program that it was made from."""

    programs: NDArray[np.int64]  # [R, n]
    inputs: Lists  # R * E lists; the E examples of a task follow each other
    outputs: Lists


def tasks(count: int, operations: int = 4, seed: int = 0) -> list[Task]:
    """Draw `count` different held-out tasks, made from programs of `operations` operations.

    The same seed gives the same list on every machine. A smaller count gives the beginning of the same list.
    """
    low, high = HELDOUT_OPERATIONS
    if not low <= operations <= high:
        raise D5P4Error(f"held-out tasks are made from {low} to {high} operations, got operations={operations}")
    if count < 0:
        raise D5P4Error(f"the count of tasks must be 0 or more, got count={count}")
    draws = Draws(2, seed, operations)
    drawn = dict[str, Task]()
    barren = 0
    while len(drawn) < count:
        before = len(drawn)
        batch = attempt(draws, 1 << 13, operations, VISIBLE + HIDDEN)
        for row in np.flatnonzero(heldout(batch.programs)).tolist():
            places = np.arange(row * (VISIBLE + HIDDEN), (row + 1) * (VISIBLE + HIDDEN))
            given, wanted = (unpack(lists.take(places)) for lists in (batch.inputs, batch.outputs))
            examples = tuple(zip(given, wanted, strict=True))
            task = Task(examples[:VISIBLE], examples[VISIBLE:])
            drawn.setdefault(task.prompt, task)
        barren = barren + 1 if len(drawn) == before else 0
        if barren == _BARREN:
            raise D5P4Error(f"count={count} is too large: only {before} held-out tasks have {operations} operations")
    return list(drawn.values())[:count]


def run(programs: NDArray[np.integer], lists: Lists) -> Lists:
    """Run the program in row i of `programs` [R, n] on list i. The entries are indices into NAMES."""
    values, lengths = lists.values.copy(), lists.lengths.copy()
    for column in programs.T:
        for index in np.unique(column).tolist():
            rows = np.flatnonzero(column == index)
            values[rows], lengths[rows] = apply(NAMES[index], Lists(values[rows], lengths[rows]))
    return Lists(values, lengths)


def unpack(lists: Lists) -> list[List]:
    return [tuple(row[:length]) for row, length in zip(lists.values.tolist(), lists.lengths, strict=True)]


def attempt(draws: Draws, rows: int, operations: int, examples: int = VISIBLE) -> Drawn:
    """Draw `rows` random programs with the inputs of their examples, and return the valid tasks."""
    programs = draws.below(len(NAMES), rows * operations).reshape(rows, operations).astype(np.int64)
    shrinks = shrinking()
    programs = programs[~shrinks[programs[:, :-1], programs[:, 1:]].any(axis=1)]
    (low, high), (least, most) = LENGTHS, NUMBERS
    count = len(programs) * examples
    lengths = draws.below(high - low + 1, count) + low
    values = (draws.below(most - least + 1, count * high) + least).reshape(count, high)
    inputs = Lists(np.where(np.arange(high) < lengths[:, None], values, 0), lengths)
    results = run(programs.repeat(examples, axis=0), inputs)
    valid = (results.lengths.reshape(-1, examples) > 0).all(axis=1)
    for part in (slice(VISIBLE), slice(VISIBLE, examples)):
        if part.start != part.stop:
            valid &= _varies(inputs, results, examples, part)
    drawn = _rows(Drawn(programs, inputs, results), np.flatnonzero(valid), examples)
    needed = np.ones(len(drawn.programs), bool)
    visible = _places(np.flatnonzero(needed), examples)[:, :VISIBLE].reshape(-1)
    given, wanted = drawn.inputs.take(visible), drawn.outputs.take(visible)
    for place in range(operations):
        shorter = run(np.delete(drawn.programs, place, axis=1).repeat(VISIBLE, axis=0), given)
        needed &= ~_equal(shorter, wanted).reshape(-1, VISIBLE).all(axis=1)
    return _rows(drawn, np.flatnonzero(needed), examples)


def _places(rows: NDArray[np.integer], examples: int) -> NDArray[np.int64]:
    return rows[:, None] * examples + np.arange(examples)


def _rows(drawn: Drawn, rows: NDArray[np.integer], examples: int) -> Drawn:
    places = _places(rows, examples).reshape(-1)
    return Drawn(drawn.programs[rows], drawn.inputs.take(places), drawn.outputs.take(places))


def _equal(one: Lists, other: Lists) -> NDArray[np.bool_]:
    """Return bool [R]. All numbers behind the ends of lists are 0, so that whole rows can be compared."""
    return (one.lengths == other.lengths) & (one.values == other.values).all(axis=1)


def _varies(inputs: Lists, results: Lists, examples: int, part: slice) -> NDArray[np.bool_]:
    """Return bool [R], True if these examples of a task have neither equal outputs nor the outputs of the identity."""
    same = _equal(inputs, results).reshape(-1, examples)[:, part].all(axis=1)
    keys = np.concatenate([results.values, results.lengths[:, None]], axis=1)
    keys = keys.reshape(-1, examples, keys.shape[1])[:, part]
    return ~same & ~(keys == keys[:, :1]).all(axis=(1, 2))


@cache
def shrinking() -> NDArray[np.bool_]:
    """Return bool [operations, operations], True at pairs of neighbours that a rule makes shorter."""
    return np.array([[len(reduced((a, b))) < 2 for b in NAMES] for a in NAMES])


@cache
def probes() -> Lists:
    """Return the lists whose results tell functions apart."""
    return pack(
        [
            (3, -7, 8, 0, -4, 5),
            (-2, 6, 6, 1, -9),
            (9, 4, -1, -6),
            (-5, -8, 2),
            (7, 7, -3, 8, 2, -2),
            (1, -4, -4, 9, 3),
            (0, 2, 5, -1, 6, -8),
            (4, 1, -3, 2),
        ]
    )


def heldout(programs: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return bool [R], True at programs [R, n] whose function is held out. This is one function in 64."""
    lists = probes()
    count = len(lists.lengths)
    tiled = Lists(np.tile(lists.values, (len(programs), 1)), np.tile(lists.lengths, len(programs)))
    results = run(programs.repeat(count, axis=0), tiled)
    values = np.where(results.inside, results.values, 0)
    columns = np.concatenate([results.lengths[:, None] + 1, values + LARGEST], axis=1).reshape(len(programs), -1)
    return hash_columns(np.full(len(programs), count, np.uint64), columns.T) % np.uint64(_HELDOUT_SHARE) == 0


# ---- training rows


class Batch(NamedTuple):
    """Training rows as token ids."""

    tokens: NDArray[np.int16]  # [B, ROW], right-aligned and filled up with END on the left
    lengths: NDArray[np.int64]  # [B], the number of tokens of each row
    prompts: NDArray[np.int64]  # [B], the number of tokens of each prompt
    opened: NDArray[np.int64]  # [B], how many tokens at the end of each row are answer tokens of its last block


def batch(size: int, seed: int, index: int, mix: Mapping[int, float] = MIX) -> Batch:
    """Return `size` training rows, none of a held-out function. `mix` is {operations per program: share of tasks}.

    The result depends on the arguments alone, so a continued run only needs to know the index of its next batch.
    """
    low, high = OPERATIONS
    if size < 1:
        raise D5P4Error(f"a batch has at least one row, got size {size}")
    if not all(low <= n <= high for n in mix) or min(mix.values(), default=0) < 0 or not 0 < sum(mix.values()) < np.inf:
        raise D5P4Error(
            f"mix={dict(mix)} must map {low} to {high} to finite shares that are not negative and not all 0"
        )
    draws = Draws(3, seed, index)
    counts = mixed(draws, size, mix)
    prompts = np.full((size, PROMPT), END, np.int16)
    lengths = np.zeros(size, np.int64)
    answers = np.full((size, LONGEST), END, np.int16)
    ends = np.zeros(size, np.int64)
    for count in sorted(mix):
        rows = np.flatnonzero(counts == count)
        if len(rows):
            drawn = _training(draws, len(rows), count)
            prompts[rows], lengths[rows] = align(spell_prompts(drawn), PROMPT, END, _BLANK, right=True)
            answers[rows], ends[rows] = align(spell_answers(drawn), LONGEST, END, _BLANK, right=False)
    return _cut(draws, prompts, lengths, answers, ends + 1)


def _cut(
    draws: Draws,
    prompts: NDArray[np.int16],
    lengths: NDArray[np.int64],
    answers: NDArray[np.int16],
    ends: NDArray[np.int64],
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


def _training(draws: Draws, rows: int, operations: int) -> Drawn:
    """Draw `rows` valid tasks whose functions are not held out."""
    parts, missing = [], rows
    while missing > 0:
        drawn = attempt(draws, min(_ATTEMPTS, int(missing / _ACCEPTED[operations] * 1.1) + 64), operations)
        fresh = np.flatnonzero(~heldout(drawn.programs))[:missing]
        places = (fresh[:, None] * VISIBLE + np.arange(VISIBLE)).reshape(-1)
        parts.append(Drawn(drawn.programs[fresh], drawn.inputs.take(places), drawn.outputs.take(places)))
        missing -= len(fresh)
    programs, inputs, outputs = zip(*parts, strict=True)
    joined = (Lists(*map(np.concatenate, zip(*lists, strict=True))) for lists in (inputs, outputs))
    return Drawn(np.concatenate(programs), *joined)


def spell_prompts(drawn: Drawn) -> NDArray[np.int16]:
    """Return the ids [R, PROMPT] of the prompts "1 2>2 3|...:", with `_BLANK` in unused places."""
    sides = []
    for lists, marks in ((drawn.inputs, ">>>"), (drawn.outputs, "||:")):
        ids = np.where(lists.inside, lists.values, 0) + _ID[" 0"]
        ids[:, 0] += _ID["0"] - _ID[" 0"]
        mark = np.tile(np.array([_ID[mark] for mark in marks]), len(drawn.programs))
        sides.append(np.concatenate([np.where(lists.inside, ids, _BLANK), mark[:, None]], axis=1))
    return np.concatenate(sides, axis=1).astype(np.int16).reshape(len(drawn.programs), PROMPT)


def spell_answers(drawn: Drawn) -> NDArray[np.int16]:
    """Return the ids [R, 2n] of the programs, with `_BLANK` in unused places."""
    ids = _SPELLED[drawn.programs]
    ids[:, 0, 0] = _FIRST[drawn.programs[:, 0]]
    return ids.reshape(len(ids), -1)
