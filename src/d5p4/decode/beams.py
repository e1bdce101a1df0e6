"""This module decides which process holds which rows of a pool. `Beams` keeps all rows in one process. Its subclass
`distributed.SpreadBeams` spreads the rows over R processes, called ranks.

Each rank holds n = N / R neighbouring rows of a pool. If the method divides the pool into k groups, these n rows are
k / R whole groups. Every rank has the small tensors (hashes, ties, groups, scores, similarities, the choice) of all N
rows. Only the rank that holds a row has the tokens and hidden states of that row. A rank draws the children of the
parents that it holds. These parents form a table [G, q], with q parents per entry of `LocalParents.prompt` [G].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.gram import pool_gram
from ..types import Choice


class LocalParents(NamedTuple):
    """The parents whose hidden states this rank has. This rank draws the children of these parents."""

    prompt: Tensor  # [G] the index of the prompt
    column: Tensor  # [G, q] the index of the parent among all m parents of the prompt
    row: Tensor  # [G, q] the index of the parent among the rows that this rank holds
    keeps_children: bool  # whether this rank also holds the children in the next pool
    everybody: tuple[int, int]  # P, m

    def of(self, everybody: Tensor) -> Tensor:
        """Select the values [G, q, ...] of this rank's parents from the values [P, m, ...] of all m parents."""
        return everybody[self.prompt[:, None], self.column]

    def here(self, rows: Tensor) -> Tensor:
        """Select the values [G, q, ...] of this rank's parents from the values [P, n, ...] of this rank's rows."""
        return rows[self.prompt[:, None], self.row]


class Beams:
    """Keeps all rows in one process, so nothing is sent and no process waits for another."""

    size = 1
    rank = 0

    def check(self, k: int, pool_size: int, **refused: Any) -> None:
        """Raise an error if rows cannot be spread over the ranks. `refused` holds options that need one process."""

    def own(self, everybody: Tensor) -> Tensor:
        """Select the values [P, n, ...] of the rows that this rank holds from the values [P, N, ...] of all rows."""
        return everybody

    def gather(self, rows: Tensor) -> Tensor:
        """Join the values [P, n, ...] of the rows of each rank into the values [P, N, ...] of all rows."""
        return rows

    def alike(self, values: Tensor, row_hash: Tensor) -> Tensor:
        """Return values [P, N] that are the same for rows with the same hash. In one process they already are."""
        return values

    def local(self, parents: Tensor, rows: int) -> LocalParents:
        """Return the parents that this rank holds. parents [P, m] are all chosen rows of a pool of `rows` rows."""
        prompts, count = parents.shape
        column = torch.arange(count, device=parents.device).expand(prompts, count)
        return LocalParents(torch.arange(prompts, device=parents.device), column, parents, True, (prompts, count))

    def everyone(self, drawn: Tensor, local: LocalParents) -> Tensor:
        """Join the values [G, q, ...] of each rank's own parents into the values [P, m, ...] of all parents."""
        return drawn

    def redistribute(self, drawn: Tensor, local: LocalParents) -> Tensor:
        """Exchange values between ranks: from values [G, q, ...] of the parents that this rank holds to values
        [P, m/R, ...] of the parents whose children this rank will hold."""
        return drawn

    def cosine(self, features: Tensor, slot: Tensor, row_hash: Tensor) -> Tensor:
        """Compute the similarity S [P, N, N] from features [U, B, D] and slot [P, n]. On this rank, row i of prompt
        p has the features features[slot[p, i]]."""
        return pool_gram(features, slot)

    def fetch(
        self, states: Tensor, features: Tensor, slot: Tensor, source: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return states and features [U', L, D] and, for each row that this rank holds, the slot [P, n] of its source.

        source [P, N] is the index, in the previous pool, of the row whose states a row takes over, and slot [P, n] are
        the slots of the previous pool. Only the slots of rows that are `wanted` [P, N] have a meaning.
        """
        return states, features, slot.gather(1, source)

    def agree(self, choice: Choice) -> Choice:
        """Return, on every rank, the choice that the first rank made."""
        return choice

    def agree_on(self, value: Any) -> Any:
        """Return, on every rank, the value that the first rank gave. The value is a small Python object."""
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that all ranks run. If the block fails on one rank, all ranks raise the error."""
        yield


ALONE = Beams()
