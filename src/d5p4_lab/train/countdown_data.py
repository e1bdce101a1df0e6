"""Makes millions of training examples of countdown as token ids, with numpy alone.

`d5p4.eval.countdown` draws the problems and decides which problems are held out. Held-out problems are never trained
on. Letters in shapes: B examples of a batch, R drawn examples, n numbers of a problem.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import OPERATIONS, WINDOW, Draws, Problem, Ways, attempt, heldout, is_right, problems

__all__ = ["Problem", "is_right", "problems"]  # train/countdown.py imports these names from this module

CHARACTERS = "0123456789+-*/=,:"  # ids 0..16
END, MASK = 17, 18
PROMPT = 17  # "99,99,99,99,99:99"
MIX = {3: 0.1, 4: 0.5, 5: 0.4}  # {numbers per problem: share of the training problems}

_ATTEMPTS = 1 << 16  # at most this many rows are drawn at once, so that their tables fit into the cache
_ACCEPTED = {3: 0.17, 4: 0.086, 5: 0.044}  # {numbers per problem: rough share of the drawn rows that are valid}
_BLANK = 255  # this id marks a place without a character; `align` removes such places

Id = TypeVar("Id", bound=np.integer)


class Batch(NamedTuple):
    """Training examples as token ids."""

    prompts: NDArray[np.uint8]  # [B, PROMPT], right-aligned and filled up with END on the left
    lengths: NDArray[np.int64]  # [B], the number of characters of each prompt
    answers: NDArray[np.uint8]  # [B, 48], left-aligned and filled up with END on the right
    counts: NDArray[np.int64]  # [B], how many numbers each problem has


def _training(draws: Draws, rows: int, count: int) -> Ways:
    """Draw `rows` valid solutions of problems that are not held out."""
    numbers, steps, missing = [], [], rows
    while missing > 0:
        ways = attempt(draws, min(_ATTEMPTS, int(missing / _ACCEPTED[count] * 1.1) + 64), count)
        fresh = np.flatnonzero(~heldout(ways.numbers, ways.target))[:missing]
        numbers.append(ways.numbers[fresh])
        steps.append(ways.steps[fresh])
        missing -= len(fresh)
    return Ways(np.concatenate(numbers), np.concatenate(steps))


def batch(size: int, seed: int, index: int, mix: Mapping[int, float] = MIX) -> Batch:
    """Return `size` training examples, none of a held-out problem. `mix` is {numbers per problem: share of problems}.

    The result depends on the arguments alone, so a continued run only needs to know the index of its next batch.
    """
    if size < 1:
        raise D5P4Error(f"a batch has at least one example, got size {size}")
    if not set(mix) <= set(WINDOW) or min(mix.values(), default=0) < 0 or not 0 < sum(mix.values()) < np.inf:
        raise D5P4Error(f"mix={dict(mix)} must map 3, 4 or 5 to finite shares that are not negative and not all 0")
    draws = Draws(1, seed, index)
    counts = mixed(draws, size, mix)
    prompts = np.full((size, PROMPT), END, np.uint8)
    lengths = np.zeros(size, np.int64)
    answers = np.full((size, max(WINDOW.values())), END, np.uint8)
    for count in sorted(mix):
        rows = np.flatnonzero(counts == count)
        if len(rows):
            ways = _training(draws, len(rows), count)
            prompts[rows], lengths[rows] = align(_spell_prompts(ways), PROMPT, END, _BLANK, right=True)
            answers[rows], _ = align(_spell_answers(ways), answers.shape[1], END, _BLANK, right=False)
    return Batch(prompts, lengths, answers, counts)


def mixed(draws: Draws, size: int, mix: Mapping[int, float]) -> NDArray[np.int64]:
    """Draw `size` keys of `mix`, each with its share."""
    kinds = np.array(sorted(mix), np.int64)
    edges = np.cumsum([mix[int(kind)] for kind in kinds])
    uniform = draws.below(1 << 31, size) / (1 << 31)
    return kinds[np.searchsorted(edges, uniform * edges[-1], side="right")]


def _digits(values: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Turn values [...] of at most three digits into ids [..., 3], with `_BLANK` in place of leading zeros."""
    ids = np.stack([values // 100, values // 10 % 10, values % 10], axis=-1).astype(np.uint8)
    ids[..., 0][values < 100] = _BLANK
    ids[..., 1][values < 10] = _BLANK
    return ids


def _spell_prompts(ways: Ways) -> NDArray[np.uint8]:
    """Return the ids [R, 4(n + 1)] of the prompts "a,b,c:target", with `_BLANK` in unused places."""
    rows, count = ways.numbers.shape
    text = np.full((rows, count + 1, 4), CHARACTERS.index(","), np.uint8)
    text[:, :-1, :3] = _digits(ways.numbers)
    text[:, -1, :3] = _digits(ways.target)
    text[:, -2, 3] = CHARACTERS.index(":")
    text[:, -1, 3] = _BLANK
    return text.reshape(rows, -1)


def _spell_answers(ways: Ways) -> NDArray[np.uint8]:
    """Return the ids [R, 12(n - 1)] of the answers: steps "a+b=c" joined by commas, with `_BLANK` in unused places."""
    rows, count, _ = ways.steps.shape
    text = np.full((rows, count, 12), CHARACTERS.index(","), np.uint8)
    text[..., 0:3] = _digits(ways.steps[..., 0])
    text[..., 3] = CHARACTERS.index(OPERATIONS[0]) + ways.steps[..., 1]
    text[..., 4:7] = _digits(ways.steps[..., 2])
    text[..., 7] = CHARACTERS.index("=")
    text[..., 8:11] = _digits(ways.steps[..., 3])
    text[:, -1, 11] = _BLANK
    return text.reshape(rows, -1)


def align(text: NDArray[Id], width: int, end: int, blank: int, *, right: bool) -> tuple[NDArray[Id], NDArray[np.int64]]:
    """Remove `blank` from ids [R, *]. Return ids [R, width] filled up with `end`, and the lengths [R] before that."""
    written = text != blank
    lengths = written.sum(axis=1, dtype=np.int64)
    place = np.arange(width)
    where = place >= width - lengths[:, None] if right else place < lengths[:, None]
    aligned = np.full((len(text), width), end, text.dtype)
    aligned[where] = text[written]  # numpy assigns row by row, so each row keeps its characters in order
    return aligned, lengths


def decode(ids: Iterable[int]) -> str:
    """Return the text of the ids up to the first end-of-text. A mask becomes `_`."""
    text = []
    for token in ids:
        token = int(token)
        if token == END:
            break
        if not 0 <= token <= MASK:
            raise D5P4Error(f"countdown ids are 0..{MASK}, got {token}")
        text.append("_" if token == MASK else CHARACTERS[token])
    return "".join(text)
