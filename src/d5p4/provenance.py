"""How a result was made: machine, versions, weights and command, without the paths of files on this machine."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .__about__ import __version__

_READ_WHOLE = 1 << 30  # weight files up to this size are hashed byte by byte
_HEAD = 1 << 20
# A path, also inside an argument such as --out=/somewhere or judges=["/somewhere"], but not a network address.
_PATH = re.compile(r"""(?:^|(?<=[="'\[,:]))(?!//)(?:/|~|\.\.)[^"',\]]*""")


def machine(device: torch.device | str) -> str:
    """Return the name of the device, such as "NVIDIA H200" or "x86_64 CPU, 2 threads"."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type.upper()}, {torch.get_num_threads()} threads"


def file_hash(file: Path) -> str:
    """Return the sha256 of a file. Of a file larger than a GiB, only the size and the first MiB are hashed."""
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
    """Return the sha256 over a checkpoint's weight files, in the order of their names."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return file_hash(files[0])
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def command(words: Sequence[str]) -> str:
    """Return a command line as a reader would type it, with the paths of this machine shortened to their last part."""
    return shlex.join(map(without_places, words))


def without_places(text: str) -> str:
    """Return the text with the paths of this machine shortened to their last part."""
    return _PATH.sub(lambda path: os.path.basename(path[0].rstrip("/")) or path[0], text)


def provenance(device: torch.device | str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts that are stored beside a result."""
    facts = {
        "machine": machine(device),
        "torch": torch.__version__,
        "d5p4": __version__,
        "date": datetime.date.today().isoformat(),
    }
    return facts | ({"command": command(words)} if words else {})
