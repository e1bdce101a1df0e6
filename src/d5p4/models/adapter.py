"""An adapter changes the weights of a base model. It has PEFT's format and is merged when the model is loaded.

A weight W of the base becomes W + s·B·A, where A has r rows and s is alpha / r, or alpha / √r under `use_rslora`.
The keys of the adapter's file are

    base_model.model.<name of W without .weight>.lora_A.weight    A, and lora_B.weight for B
    base_model.model.<name of W>                                  a tensor that replaces W

and, in d5p4's own adapters alone,

    <any key of a matrix>_scale        the factors of the rows of a matrix that is stored as int8
    base_model.model.<name of the embedding without .weight>.mask_row    replaces the row of the mask
"""

import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..errors import D5P4Error, shown
from .checkpoint import INDEX, SINGLE, read_json, refusing

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter.safetensors")
ROOT, A, B, ROW, SCALE = "base_model.model.", ".lora_A.weight", ".lora_B.weight", ".mask_row", "_scale"
# Keys of the config with which a merged weight is not W + s·B·A, although the tensors have the names of A and B.
REFUSED = ["use_dora", "fan_in_fan_out", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens"]
REFUSED += ["arrow_config", "kasa_config"]
CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # starts of `init_lora_weights` that change W itself


def is_adapter(folder: Path) -> bool:
    """Say whether a folder has an adapter and no model of its own."""
    return (folder / CONFIG).is_file() and not any((folder / name).is_file() for name in (SINGLE, INDEX))


def adapter_file(folder: Path) -> Path:
    """Return the file with the tensors of an adapter."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise D5P4Error(f"{folder} has {CONFIG}, but neither {FILES[0]} nor {FILES[1]}: put the weights there")


class Adapter:
    """The adapter of a folder, in memory."""

    def __init__(self, folder: Path) -> None:
        self.config, self.place = read_json(folder / CONFIG), f"the adapter in {folder}"
        start, given = str(self.config.get("init_lora_weights")), self.config.get
        wrong = [key for key in REFUSED if given(key)] + ["peft_type"] * (given("peft_type") != "LORA")
        wrong += ["bias"] * (given("bias") not in (None, "none"))
        if wrong := wrong + ["init_lora_weights"] * start.lower().startswith(CHANGES_BASE):
            cure = "but d5p4 merges plain LoRA only; merge the adapter with peft and load the merged model"
            raise D5P4Error(f"{self.place} has {wrong[0]}={shown(given(wrong[0]))}, {cure}")
        file = adapter_file(folder)
        with refusing(f"{file} is not a complete safetensors file", "fetch it again"):
            self.tensors = load_file(file)
        self.changes: dict[str, dict[str, str]] = {}  # a weight's name to the keys of its tensors, by endings
        for key in self.tensors:
            if not key.endswith(SCALE) or key.removesuffix(SCALE) not in self.tensors:
                ending = next((ending for ending in (A, B, ROW) if key.endswith(ending)), "")
                name = key.removeprefix(ROOT).removesuffix(ending) + (ending and ".weight")
                self.changes.setdefault(name, {})[ending] = key

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Raise an error unless every tensor changes a weight of the model. `wanted` has the shapes of its weights."""
        for name, keys in self.changes.items():
            first = next(iter(keys.values()))
            if name not in wanted or not first.startswith(ROOT):
                raise D5P4Error(f"{self.place} has {first}, which changes no weight of this model")
            if (A in keys) != (B in keys):
                raise D5P4Error(f"{self.place} has {first} without the other factor")
            shape, rank = wanted[name], self.tensors[keys.get(A, first)].shape[:1]
            shapes = {"": shape, ROW: shape[1:], A: (*rank, *shape[1:]), B: (*shape[:1], *rank)}
            for ending, key in keys.items():
                tensor, scale = self.tensors[key], self.tensors.get(key + SCALE)
                readable = tensor.is_floating_point() if scale is None else scale.shape == tensor.shape[:1]
                if tensor.shape != shapes[ending] or not readable:
                    needed = f"{list(shapes[ending])} of floating point numbers, or of int8 with a scale per row"
                    raise D5P4Error(f"{self.place} has {key} {list(tensor.shape)} of {tensor.dtype}; expected {needed}")

    def apply(self, name: str, weight: Tensor, mask_id: int) -> Tensor:
        """Return a weight of the base with the adapter's changes. `weight` may be changed in place."""
        parts = {ending: self._read(key, weight) for ending, key in self.changes[name].items()}
        weight = parts.get("", weight)
        if A in parts:
            weight += (parts[B] @ parts[A]).mul_(self._factor(name.removesuffix(".weight"), len(parts[A])))
        if ROW in parts:
            weight[mask_id] = parts[ROW]
        return weight

    def _factor(self, module: str, rank: int) -> float:
        """Return s. A pattern of `alpha_pattern` fits a module if it fits the end of its name, from a dot on."""
        with refusing(f"{self.place} has no valid scale for {module}"):
            patterns = self.config.get("alpha_pattern") or {}
            fitting = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
            alpha = float(next(fitting, self.config["lora_alpha"]))
            return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def _read(self, key: str, like: Tensor) -> Tensor:
        tensor, scale = self.tensors[key].to(like, copy=True), self.tensors.get(key + SCALE)
        return tensor if scale is None else tensor.mul_(scale.to(like)[:, None])
