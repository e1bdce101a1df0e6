"""Describe how a result was made: machine, versions and weights. Paths on this machine are not recorded."""

from __future__ import annotations

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
_HEAD = 1 << 20  # of a larger file, only the size and the first MiB (this many bytes) are hashed
# Matches a path, also inside an argument such as --out=/somewhere or judges=["/somewhere"], but no network address.
_PATH = re.compile(r"""(?:^|(?<=[="'\[,:]))(?!//)(?:/|~|\.\.)[^"',\]]*""")


def machine(device: torch.device | str) -> str:
    """Return the name of the device, such as "NVIDIA H200" or "x86_64 CPU, 2 threads"."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type.upper()}, {torch.get_num_threads()} threads"


def file_hash(file: Path) -> str:
    """Return the sha256 of a file. If the file is larger than 1 GiB, only its size and its first MiB are hashed."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        if size > _READ_WHOLE:
            digest.update(f"{size}:".encode() + stream.read(_HEAD))
        else:
            while block := stream.read(_HEAD):
                digest.update(block)
    return digest.hexdigest()


def weights_hash(folder: Path) -> str:
    """Return the sha256 of the weight files of a checkpoint. Several files are hashed in the order of their names."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return file_hash(files[0])
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


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
