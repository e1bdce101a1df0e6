"""`Beams` knows which process holds which rows of a pool. It keeps all rows in one process; `distributed.SpreadBeams`
spreads them over ranks.

With R ranks, each rank holds n = N / R neighbouring rows of a pool, and with a partition k / R whole groups. Every rank
has the small tensors (hashes, ties, groups, scores, similarities, the choice) of all N rows. Only the rank that holds a
row has its tokens and hidden states. "Here" means: on this rank. The parents whose children are drawn here form a table
of G x q parents, q for each entry of `Seats.prompt`.
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
    """The parents whose hidden rows this rank has. Their children are drawn on this rank."""

    prompt: Tensor  # [G]
    column: Tensor  # [G, q] index of the parent among the m parents of its prompt
    row: Tensor  # [G, q] index of the parent among the rows held here
    settled: bool  # whether the children stay here, as this rank's rows of the next pool
    everybody: tuple[int, int]  # P, m

    def of(self, everybody: Tensor) -> Tensor:
        """Select the values [G, q, ...] of these parents from the values [P, m, ...] of all m parents."""
        return everybody[self.prompt[:, None], self.column]

    def here(self, rows: Tensor) -> Tensor:
        """Select the values [G, q, ...] of these parents from the values [P, n, ...] of the rows held here."""
        return rows[self.prompt[:, None], self.row]


class Beams:
    """All rows are in one process, so that nothing is shared and nobody waits."""

    size = 1
    rank = 0

    def check(self, k: int, pool_size: int, **refused: Any) -> None:
        """Raise an error for settings that cannot be spread over ranks. `refused` are options that need one process."""

    def own(self, everybody: Tensor) -> Tensor:
        """Return [P, n, ...], the part of [P, N, ...] that this rank holds."""
        return everybody

    def gather(self, rows: Tensor) -> Tensor:
        """Return [P, N, ...], joined from the rows [P, n, ...] of each rank."""
        return rows

    def alike(self, values: Tensor, row_hash: Tensor) -> Tensor:
        """Return values [P, N] with equal numbers for equal rows. In one process, equal rows share a hidden row."""
        return values

    def seats(self, parents: Tensor, rows: int) -> Seats:
        """Return the seats of the parents [P, m] of a pool of `rows` rows."""
        prompts, count = parents.shape
        column = torch.arange(count, device=parents.device).expand(prompts, count)
        return Seats(torch.arange(prompts, device=parents.device), column, parents, True, (prompts, count))

    def everyone(self, drawn: Tensor, seats: Seats) -> Tensor:
        """Return [P, m, ...], joined from what each rank computed for its parents, [G, q, ...]."""
        return drawn

    def settle(self, drawn: Tensor, seats: Seats) -> Tensor:
        """Return [P, m/R, ...] from [G, q, ...]: the values of the parents whose children this rank will hold."""
        return drawn

    def cosine(self, features: Tensor, slot: Tensor, row_hash: Tensor) -> Tensor:
        """Return S [P, N, N]. Row i held here of pool p is features[slot[p, i]]; features [U, B, D], slot [P, n]."""
        return pool_gram(features, slot)

    def agree(self, choice: Choice) -> Choice:
        """Return the first rank's choice, which all ranks use."""
        return choice

    def agree_on(self, value: Any) -> Any:
        """Return the first rank's value of a small plain object."""
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that all ranks run. If it fails on one rank, it fails on all."""
        yield


ALONE = Beams()
