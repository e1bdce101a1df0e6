"""Makes millions of training examples of programs as token ids, with numpy alone.

`d5p4.eval.programs` draws the tasks and decides which functions are held out. Held-out functions are never trained on.

A number and the name of an operation are one token each, together with the space before it. A row is a prompt and its
answer up to the end of one block, because a block-causal model sees nothing after the block that it decodes. Blocks
count from the first token of the prompt, so the first block of an answer may begin with tokens of the prompt.
Letters in shapes: B rows of a batch, R drawn tasks, n operations of a program.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import Draws
from d5p4.eval.programs import LARGEST, LENGTHS, NAMES, OPERATIONS, VISIBLE, Drawn, Lists, attempt, heldout

from .countdown_data import align, mixed

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
