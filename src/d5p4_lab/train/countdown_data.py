"""Makes millions of training examples of countdown as token ids: a token is a character.

`puzzles` draws the problems and decides which problems are held out. Held-out problems are never trained on. B is the
number of examples of a batch.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import WINDOW

from ..puzzles import OPERATIONS, Draws, attempt, heldout

CHARACTERS = "0123456789+-*/=,:"  # ids 0..16
END, MASK = 17, 18
PROMPT = 17  # "99,99,99,99,99:99"
MIX = {3: 0.1, 4: 0.5, 5: 0.4}  # {numbers per problem: share of the training problems}

_ATTEMPTS = 1 << 16  # at most this many rows are drawn at once, so that their tables fit into the cache
_ACCEPTED = {3: 0.17, 4: 0.086, 5: 0.044}  # {numbers per problem: rough share of the drawn rows that are valid}
_ID = {character: i for i, character in enumerate(CHARACTERS)}


class Batch(NamedTuple):
    """Training examples as token ids."""

    prompts: NDArray[np.uint8]  # [B, PROMPT], right-aligned and filled up with END on the left
    lengths: NDArray[np.int64]  # [B], the number of characters of each prompt
    answers: NDArray[np.uint8]  # [B, 48], left-aligned and filled up with END on the right
    counts: NDArray[np.int64]  # [B], how many numbers each problem has


def batch(size: int, seed: int, index: int, mix: Mapping[int, float] = MIX) -> Batch:
    """Return `size` training examples, none of a held-out problem: a function of the arguments alone."""
    draws = Draws(1, seed, index)
    counts = mixed(draws, size, mix, WINDOW)
    prompts = np.full((size, PROMPT), END, np.uint8)
    lengths = np.zeros(size, np.int64)
    answers = np.full((size, max(WINDOW.values())), END, np.uint8)
    for count in sorted(mix):
        rows = np.flatnonzero(counts == count).tolist()
        for row, texts in zip(rows, _training(draws, len(rows), count), strict=True):
            prompt, answer = ([_ID[character] for character in text] for text in texts)
            prompts[row, PROMPT - len(prompt) :], lengths[row] = prompt, len(prompt)
            answers[row, : len(answer)] = answer
    return Batch(prompts, lengths, answers, counts)


def _training(draws: Draws, rows: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield `rows` prompts of problems that are not held out, each with an answer."""
    while rows > 0:
        ways = attempt(draws, min(_ATTEMPTS, int(rows / _ACCEPTED[count] * 1.1) + 64), count)
        fresh = np.flatnonzero(~heldout(ways.numbers, ways.target))[:rows]
        for numbers, steps in zip(ways.numbers[fresh].tolist(), ways.steps[fresh].tolist(), strict=True):
            answer = ",".join(f"{a}{OPERATIONS[operation]}{b}={c}" for a, operation, b, c in steps)
            yield f"{','.join(map(str, numbers))}:{steps[-1][3]}", answer
        rows -= len(fresh)


def mixed(draws: Draws, size: int, mix: Mapping[int, float], kinds: Collection[int]) -> NDArray[np.int64]:
    """Draw `size` keys of `mix`, each with its share. The keys must be among `kinds`."""
    if size < 1:
        raise D5P4Error(f"a batch has at least one row, got size {size}")
    if not set(mix) <= set(kinds) or min(mix.values(), default=0) < 0 or not 0 < sum(mix.values()) < np.inf:
        known = ", ".join(map(str, kinds))
        raise D5P4Error(f"mix={dict(mix)} must map {known} to finite shares that are not negative and not all 0")
    chosen = np.array(sorted(mix), np.int64)
    edges = np.cumsum([mix[int(kind)] for kind in chosen])
    uniform = draws.below(1 << 31, size) / (1 << 31)
    return chosen[np.searchsorted(edges, uniform * edges[-1], side="right")]
