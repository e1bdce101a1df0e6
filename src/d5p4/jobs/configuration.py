"""The configuration of a run is all values that can change the answers. A run continues only if all are unchanged."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..__about__ import __version__
from ..errors import D5P4Error
from ..models.base import NativeModel
from ..models.load import find
from ..prompts import Prepared
from ..provenance import file_hash, weights_hash
from ..types import Model

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
SAMPLES, SAMPLE_SIZE = 64, 1 << 16  # the number of blocks of a file that are hashed, and the bytes per block
NOT_HASHED = ("input", "seed")


def configuration(prepared: Prepared, input_hash: str, seed: int) -> dict[str, Any]:
    """Return the configuration. The header file of a run keeps it, and later starts must have the same one."""
    model, settings = prepared.model, prepared.settings.to_dict()
    if not prepared.settings.deterministic:
        del settings["max_tokens_per_forward"]  # the size of a forward can change answers only by rounding
    configured = {
        "d5p4": __version__,
        "model": _model_hashes(model),
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        "settings": settings,
        "gen_length_given": prepared.length_given,
        "seed": seed,
        "input": input_hash,
    }
    return json.loads(json.dumps(configured))


def settings_hash(configured: Mapping[str, Any]) -> str:
    """Return a hash (12 hexadecimal digits) of the configuration without input and seed. Every line has it."""
    hashed = {name: value for name, value in configured.items() if name not in NOT_HASHED}
    return _sha256(json.dumps(hashed, sort_keys=True))[:12]


def _model_hashes(model: Model) -> dict[str, str]:
    """Return hashes of the model's files if the model was loaded from a folder, or else a hash of its parameters."""
    folder = _folder(model)
    if folder is None:
        return {"parameters": _parameters_hash(model)}
    small = sorted({path for pattern in SMALL_FILES for path in folder.glob(pattern)})
    return {
        "weights": weights_hash(folder),
        "files": _sha256("".join(f"{path.name} {file_hash(path)}\n" for path in small)),
        "samples": _sha256("".join(map(_sample_hash, sorted(folder.glob("*.safetensors"))))),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sample_hash(path: Path) -> str:
    """Return a hash of blocks from all parts of the file, because two checkpoints may begin with the same bytes."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(size * i // SAMPLES)
            digest.update(file.read(SAMPLE_SIZE))
    return digest.hexdigest()


def _folder(model: Model) -> Path | None:
    """Return the folder that the model was loaded from, or None if there is no such folder."""
    with warnings.catch_warnings(), suppress(D5P4Error):
        warnings.simplefilter("ignore")
        return find(model.name) if isinstance(model, NativeModel) else None
    return None


def _parameters_hash(model: Model) -> str:
    module: Any = getattr(model, "module", model)
    tensors: dict[str, Tensor] = dict(module.state_dict()) if isinstance(module, nn.Module) else {}
    if not tensors:
        tensors = {name: x for name, x in vars(model).items() if isinstance(x, Tensor)}
        tensors |= {"head": model.head.weight} | ({} if model.head.bias is None else {"bias": model.head.bias})
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
