"""Who holds which rows of a pool. Alone, one process holds them all; `distributed.SpreadBeams` spreads them over ranks.

With R ranks, each rank holds n = N / R neighbouring rows of a pool: with a partition into groups, k / R whole groups.
Every rank has the small tensors (hashes, ties, groups, scores, similarities, the choice) for all N rows; only the rank
that holds a row has its tokens and hidden states. Letters: G x q is a grid of parents whose children are drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops.gram import pool_gram
from .types import Choice


class Seats(NamedTuple):
    """The parents whose hidden rows are here: their children are drawn here."""

    prompt: Tensor  # [G]
    column: Tensor  # [G, q] which of the m parents
    row: Tensor  # [G, q] which of the rows held here
    settled: bool  # their children stay here, as this rank's rows of the next pool
    everybody: tuple[int, int]  # P, m

    def of(self, everybody: Tensor) -> Tensor:
        """[G, q, ...] of what everybody has for the m parents [P, m, ...]."""
        return everybody[self.prompt[:, None], self.column]

    def here(self, rows: Tensor) -> Tensor:
        """[G, q, ...] of what is held here for rows [P, n, ...]."""
        return rows[self.prompt[:, None], self.row]


class Beams:
    """All rows in one process: nothing to share, nobody to wait for."""

    size = 1
    rank = 0

    def check(self, k: int, pool_size: int, **refused: Any) -> None:
        """Raise an error for what cannot be spread; `refused` are options that a spread decode does not take."""

    def own(self, everybody: Tensor) -> Tensor:
        """[P, n, ...] the part of [P, N, ...] that is held here."""
        return everybody

    def gather(self, rows: Tensor) -> Tensor:
        """[P, N, ...] from what each rank holds, [P, n, ...]."""
        return rows

    def alike(self, values: Tensor, row_hash: Tensor) -> Tensor:
        """values [P, N] with equal numbers for equal rows; in one process they share a hidden row anyway."""
        return values

    def seats(self, parents: Tensor, rows: int) -> Seats:
        """Where the parents [P, m] of a pool of `rows` rows sit."""
        prompts, count = parents.shape
        column = torch.arange(count, device=parents.device).expand(prompts, count)
        return Seats(torch.arange(prompts, device=parents.device), column, parents, True, (prompts, count))

    def everyone(self, drawn: Tensor, seats: Seats) -> Tensor:
        """[P, m, ...] from what was made for the parents here, [G, q, ...]."""
        return drawn

    def settle(self, drawn: Tensor, seats: Seats) -> Tensor:
        """[P, m/R, ...] what was made for the parents whose children will be held here, from [G, q, ...]."""
        return drawn

    def cosine(self, features: Tensor, slot: Tensor, row_hash: Tensor) -> Tensor:
        """S [P, N, N] of pools whose row i held here is features[slot[p, i]]: features [U, B, D], slot [P, n]."""
        return pool_gram(features, slot)

    def agree(self, choice: Choice) -> Choice:
        """The choice that counts: the first rank's."""
        return choice

    def agree_on(self, value: Any) -> Any:
        """The first rank's value of a small plain object."""
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call that all ranks make; one that fails makes all fail."""
        yield


ALONE = Beams()
