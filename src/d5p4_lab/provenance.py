"""Records the origin of the lab's figures: calls `d5p4.provenance` with the lab's own command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from d5p4 import provenance


def _words(arguments: Sequence[str] | None) -> list[str]:
    return ["python", "-m", "d5p4_lab", *(sys.argv[1:] if arguments is None else arguments)]


def command(arguments: Sequence[str] | None = None) -> str:
    """Return the command line of this process (or of the given arguments) for a reader to type, without local paths."""
    return provenance.command(_words(arguments))


def about(device: torch.device | str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the facts stored with a result: machine, versions, date and command."""
    return provenance.provenance(device, _words(arguments))
