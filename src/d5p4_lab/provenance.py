"""Records the origin of the lab's figures: the facts of `d5p4.provenance` and the lab's own command line."""

import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from d5p4.provenance import file_hash, machine, provenance, without_places


def command(arguments: Sequence[str] | None = None) -> str:
    """Return the command line of this process (or of the given arguments) for a reader to type, without local paths."""
    words = ["python", "-m", "d5p4_lab", *(sys.argv[1:] if arguments is None else arguments)]
    return shlex.join(map(without_places, words))


def about(device: torch.device | str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the facts stored with a result: machine, versions, date and command."""
    return provenance(device) | {"command": command(arguments)}


def weights_hash(folder: Path) -> str:
    """Return the sha256 of the weight files of a checkpoint. Several files are hashed in the order of their names."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return file_hash(files[0])
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def hardware(device: torch.device) -> str:
    return f"{machine(device)}, torch {torch.__version__}"
