"""Where a figure of the lab comes from: `d5p4.provenance` with the lab's own command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from d5p4 import provenance


def _words(given: Sequence[str] | None) -> list[str]:
    return ["python", "-m", "d5p4_lab", *(sys.argv[1:] if given is None else given)]


def command(given: Sequence[str] | None = None) -> str:
    """This process's command (or the words given) as a reader would type it, without places of this machine."""
    return provenance.command(_words(given))


def about(device: torch.device | str, given: Sequence[str] | None = None) -> dict[str, Any]:
    """What stands beside a result: machine, versions, date, and the command as above."""
    return provenance.provenance(device, _words(given))
