"""Describe how a result was made: machine, versions and weights. Paths on this machine are not recorded."""

import datetime
import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from .__about__ import __version__

_READ_WHOLE = 1 << 30  # a file of at most this many bytes is hashed as a whole
_BLOCKS, _BLOCK = 256, 1 << 20  # of a larger file, this many blocks of this many bytes are hashed
# Matches a path, also inside an argument such as --out=/somewhere or judges=["/somewhere"], but no network address.
_PATH = re.compile(r"""(?:^|(?<=[="'\[,:]))(?!//)(?:/|~|\.\.)[^"',\]]*""")


def machine(device: torch.device | str) -> str:
    """Return the name of the device, such as "NVIDIA H200" or "x86_64 CPU, 2 threads"."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type.upper()}, {torch.get_num_threads()} threads"


def file_hash(file: Path) -> str:
    """Return the sha256 of a file. Of a file above 1 GiB, it covers the size and blocks from all parts of the file,
    because two checkpoints may begin with the same bytes."""
    size = file.stat().st_size
    large = size > _READ_WHOLE
    digest = hashlib.sha256(f"{size}:".encode() if large else b"")
    with file.open("rb") as stream:
        for start in [size * i // _BLOCKS for i in range(_BLOCKS)] if large else range(0, size, _BLOCK):
            stream.seek(start)
            digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


def without_places(text: str) -> str:
    """Shorten each path on this machine in the text to the last part of the path."""
    return _PATH.sub(lambda path: os.path.basename(path[0].rstrip("/")) or path[0], text)


def provenance(device: torch.device | str) -> dict[str, Any]:
    """Return machine, versions and date, which are stored beside a result."""
    return {
        "machine": machine(device),
        "torch": torch.__version__,
        "d5p4": __version__,
        "date": datetime.date.today().isoformat(),
    }
