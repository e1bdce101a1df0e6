"""The processes (ranks) that divide the forwards of a call. `Ranks` is a single process. Its subclass
`distributed.ConnectedRanks` has several, which torchrun starts.

Every rank has the whole pool and makes the same calls. The runner (`decode.rows`) divides the rows. The loop takes what
a callback returns from the first rank, and a step is recorded only if there is one rank. No other code knows of ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..ops.ties import first_equal


class Ranks:
    """One process, so nothing is sent and no process waits for another."""

    size = 1
    rank = 0

    def join(self, own: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Return tensors [U, ...], on every rank, given own tensors [u, ...] of every rank. counts: u of each rank."""
        return list(own)

    def agree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return, on every rank, the tensors that the first rank gave."""
        return list(tensors)

    def agree_on(self, value: Any) -> Any:
        """Return, on every rank, the value that the first rank gave. The value is a small Python object."""
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that all ranks run. If the block fails on one rank, all ranks raise the error."""
        yield


ALONE = Ranks()


def divide(fresh: Tensor, ranks: int, home: Tensor | None = None, context: Tensor | None = None) -> Tensor:
    """Return the rank [P, N] that runs each row that is `fresh`. The numbers of rows per rank differ by at most one.

    home [P, N]: the rank that has the states of each row's parent, and maybe its context. Rows that are not fresh stay
    there. context [P, N]: the name of the context that a row reads. Rows of the same context are neighbours in the
    sequence that is divided, and each context stays on its rank if there is room.
    """
    prompts, size = fresh.shape
    home = torch.zeros_like(fresh, dtype=torch.int64) if home is None else home
    rows = fresh.nonzero().unbind(1)
    number = torch.arange(len(rows[0]), device=fresh.device)
    if context is not None:
        first = first_equal(context)
        key = (home.gather(1, first) * prompts + torch.arange(prompts, device=fresh.device)[:, None]) * size + first
        number = key[rows].argsort(stable=True).argsort()
    return home.index_put(rows, number * ranks // max(1, len(number)))
