"""The ranks of a command under torchrun: they part when all are done, and where one fails it tells the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..distributed import Mesh


@contextmanager
def joined(mesh: tuple[int, int] | None, timeout: float, device: str | None) -> Iterator[Mesh]:
    """The mesh of this job. What goes wrong is said by the rank it happened to, and by the first."""
    from ..distributed import RankLost, connect

    ranks = connect(mesh, timeout, device)
    try:
        with ranks:
            yield ranks
    except RankLost as error:
        if ranks.first or not error.reported:
            raise
        time.sleep(1)  # torchrun ends all ranks with the first: let the one that gave up say why
        raise typer.Exit(2) from None
