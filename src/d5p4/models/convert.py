"""`convert` writes the weights of a pickle file as safetensors. The command `d5p4 convert FOLDER OUT` calls it."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import D5P4Error
from .checkpoint import SINGLE, read_json, refusing
from .load import ARCHITECTURES


def convert(source: Path, target: Path, vocabulary: Path | None = None) -> None:
    """Write a copy of a checkpoint folder with safetensors weights. Nothing in a pickle file is run: torch reads
    tensors and plain containers only. `vocabulary`: a vocab.txt that is in another folder."""
    config, weights = read_json(source / "config.json"), dict[str, Tensor]()
    if target.exists() and any(target.iterdir()):
        raise D5P4Error(f"{target} is not empty: name a new folder")
    for file in sorted(source.glob("pytorch_model*.bin")):
        with refusing(f"{file} is not a file of plain tensors", "ask its authors for safetensors"):
            content = torch.load(file, map_location="cpu", weights_only=True)
            weights |= {name: tensor.clone().contiguous() for name, tensor in content.items()}  # none share memory
    if not weights:
        raise D5P4Error(f"{source} has no pytorch_model.bin: there is nothing to convert")
    if not config.get("model_type") and not config.get("architectures"):  # as in the first BERT folders
        config["model_type"] = next(
            (kind for kind in ARCHITECTURES if any(n.startswith(f"{kind}.") for n in weights)), ""
        )
    target.mkdir(parents=True, exist_ok=True)
    kept = [file for ending in ("json", "txt", "jinja") for file in source.glob(f"*.{ending}")]
    for file in [*kept, *filter(None, [vocabulary])]:
        shutil.copyfile(file, target / ("vocab.txt" if file == vocabulary else file.name))
    (target / "pytorch_model.bin.index.json").unlink(missing_ok=True)
    save_file(weights, target / SINGLE)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
