"""Writes the folder of a training run: a checkpoint (config.json, tokenizer, small safetensors shards) and a card."""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from d5p4.errors import D5P4Error

STATE = "training.state"  # the name of the file with the state of an unfinished run
WRITTEN = ("*.json", "*.safetensors", "README.md")  # patterns of the files that a finished run has written
SHARD = 15 * 2**20 - 2**16  # the most bytes of tensors per shard, so that the file with its header has at most 15 MiB


def refuse_occupied(out: Path) -> None:
    """Raise an error if the folder has files as a finished run writes them, but no state of an unfinished run."""
    names = sorted(path.name for pattern in WRITTEN for path in out.glob(pattern))
    if names and not (out / STATE).exists():
        content = "a model" if "config.json" in names else names[0]
        raise D5P4Error(f"{out} already has {content}: choose another folder, or delete it")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """Round tensors to bfloat16 and save them in shards of limited size. Return the number of bytes of all tensors."""
    rounded = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    save_torch_state_dict(rounded, folder, max_shard_size=SHARD)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors lets only the owner read its files
    return sum(tensor.nbytes for tensor in rounded.values())


def write_card(folder: Path, name: str, data: str, facts: Mapping[str, str], figures: Mapping[str, float]) -> None:
    """Write README.md, the model's card: its facts and figures, in the prose of cards/NAME.md beside this file."""
    template = Template((Path(__file__).parent / "cards" / f"{name}.md").read_text(encoding="utf-8"))
    above = "\n".join(f"| {label} | {value} |" for label, value in facts.items())
    below = "\n".join(f"| {label} | {value:.4g} |" for label, value in figures.items())
    text = template.substitute(data=data, facts=above, figures=below)
    (folder / "README.md").write_text(text, encoding="utf-8")
