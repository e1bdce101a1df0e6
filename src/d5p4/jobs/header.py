"""The header of a run, `answers.run.json` beside `answers.jsonl`: what it was made with, by whom, and how it ended."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..__about__ import __version__
from ..errors import D5P4Error
from ..models.base import NativeModel
from ..models.load import find
from ..prompts import Prepared
from ..provenance import file_hash, provenance, weights_hash, without_places
from ..store import read_json, write_json
from ..types import Model
from .reader import PromptFile
from .rows import differences

SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
SAMPLES, SAMPLE_SIZE = 64, 1 << 16
NOT_SETTINGS = ("input", "seed")  # of the configuration: the hash in each line is of the rest


def configuration(prepared: Prepared, file: PromptFile, seed: int) -> dict[str, Any]:
    """Everything that can change answers."""
    model, chosen = prepared.model, prepared.settings.to_dict()
    if not prepared.settings.deterministic:
        del chosen["max_tokens_per_forward"]  # it cuts the work into forwards and changes answers by rounding only
    configured = {
        "d5p4": __version__,
        "model": _model_hashes(model),
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        "settings": chosen,
        "gen_length_given": prepared.length_given,
        "seed": seed,
        "input": file.digest,
    }
    return json.loads(json.dumps(configured))


def settings_hash(configured: Mapping[str, Any]) -> str:
    """Twelve digits that name a configuration without its input and seed."""
    kept = {name: value for name, value in configured.items() if name not in NOT_SETTINGS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


class Header:
    """What the header file holds, and its changes."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_suffix(".run.json")
        try:
            self.data: dict[str, Any] = read_json(self.path) or {}
            if self.data and not {"output", "configuration", "starts", "finished"} <= set(self.data):
                raise ValueError("it is another program's")
        except (OSError, ValueError) as reason:
            raise D5P4Error(
                f"{self.path} is not the header of a run ({reason}); bring back the one that was there, or move it "
                f"away together with {output.name} and {output.name}.parts"
            ) from None
        if self.data and self.data["output"] != output.name:
            raise D5P4Error(
                f"{self.path} is the header of {self.data['output']}; give that as --output (a run keeps its name), or "
                "one with another name"
            )

    @property
    def exists(self) -> bool:
        return bool(self.data)

    @property
    def finished(self) -> bool:
        return bool(self.data.get("finished"))

    @property
    def seed(self) -> int | None:
        return self.data["configuration"]["seed"] if self.data else None

    @property
    def starts(self) -> list[dict[str, Any]]:
        return self.data.get("starts", [])

    def check(self, configured: Mapping[str, Any]) -> None:
        """Refuse a configuration other than the one the output was begun with."""
        if told := differences(self.data["configuration"], configured):
            raise D5P4Error(
                f"{self.output} was begun with another configuration: {'; '.join(told)}. "
                "Give the same options to go on with it, or another --output"
            )

    def begin(self, configured: dict[str, Any], name: str, start: int, facts: Mapping[str, Any]) -> None:
        """A new start, of which the file then knows."""
        self.data |= {
            "output": self.output.name,
            "model": without_places(name),
            "configuration": configured,
            "settings": settings_hash(configured),
            "finished": False,
        }
        self.data["starts"] = [*self.starts, {"start": start, **facts}]
        write_json(self.path, self.data)

    def end(self, report: Mapping[str, Any]) -> None:
        self.data |= {"finished": True, "size": self.output.stat().st_size, "report": dict(report)}
        write_json(self.path, self.data)

    def check_output(self) -> None:
        """Of a finished run the output must be there as it was."""
        size = self.output.stat().st_size if self.output.is_file() else None
        if size != self.data.get("size"):
            what = "is gone" if size is None else f"has {size} bytes where the run left {self.data.get('size')}"
            raise D5P4Error(
                f"{self.path} says that the run is finished, but {self.output} {what}; bring it back, or remove "
                f"{self.path.name} (and {self.output.name}) to decode again"
            )


def facts(prepared: Prepared, ranks: int, mesh: tuple[int, int]) -> dict[str, Any]:
    """What is noted of a start and may differ from another's."""
    machine = provenance(prepared.model.head.weight.device)
    del machine["d5p4"]
    budget = prepared.settings.max_tokens_per_forward
    return machine | {"ranks": ranks, "mesh": list(mesh), "max_tokens_per_forward": budget}


def changes(starts: list[dict[str, Any]]) -> list[str]:
    """Of starts that were not alike, what may have changed bits."""
    notes = []
    for name in ("machine", "torch", "max_tokens_per_forward"):
        values = list(dict.fromkeys(str(start.get(name)) for start in starts))
        if len(values) > 1:
            notes.append(f"the starts of this run had different {name}: {', '.join(values)}")
    return notes


def _model_hashes(model: Model) -> dict[str, str]:
    """Of a model from a folder its files, of any other its parameters."""
    folder = _folder(model)
    if folder is None:
        return {"parameters": _parameters_hash(model)}
    small = sorted({path for pattern in SMALL_FILES for path in folder.glob(pattern)})
    listed = "".join(f"{path.name} {file_hash(path)}\n" for path in small)
    sampled = "".join(map(_sample_hash, sorted(folder.glob("*.safetensors"))))
    texts = {"files": listed, "samples": sampled}
    return {"weights": weights_hash(folder)} | {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()
    }


def _sample_hash(path: Path) -> str:
    """Of blocks all over a file: two trainings of one large model differ somewhere, but seldom at the beginning."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(size * i // SAMPLES)
            digest.update(file.read(SAMPLE_SIZE))
    return digest.hexdigest()


def _folder(model: Model) -> Path | None:
    if not isinstance(model, NativeModel):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return find(model.name)
    except D5P4Error:
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
