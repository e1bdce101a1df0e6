"""Do all ranks see one folder? What they write apart has to be found together."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from ..errors import D5P4Error
from ..store import write_text
from .mesh import Mesh

WORD = "ranks.word"
PATIENCE = 20.0  # seconds that what the first rank writes may take to be seen by the others


def check_shared(folder: Path, mesh: Mesh, option: str) -> None:
    """All ranks come here; one that does not see what the first writes is told to share what `option` names."""
    if mesh.world == 1:
        return
    file, word = folder / WORD, mesh.share(secrets.token_hex(8))
    if mesh.first:
        write_text(file, word)
    mesh.meet()
    until = time.monotonic() + PATIENCE
    while not _reads(file, word):
        if time.monotonic() > until:
            raise D5P4Error(
                f"rank {mesh.rank} does not see what rank 0 writes into {folder}; {option} must be on a file system "
                "that all hosts share"
            )
        time.sleep(0.1)
    mesh.meet()
    if mesh.first:
        file.unlink(missing_ok=True)


def _reads(file: Path, word: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == word
    except OSError:
        return False
