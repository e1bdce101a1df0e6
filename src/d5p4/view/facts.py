"""A model and a prompt in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..types import Model


def describe(model: Model) -> dict[str, Any]:
    """The model in a few plain facts; a folder is named without the path to it."""
    folder = Path(model.name)
    parameters = getattr(model, "parameters", None)
    return {
        "name": folder.resolve().name if folder.is_dir() else model.name,
        "architecture": getattr(model, "architecture", type(model).__name__),
        "parameters": sum(part.numel() for part in parameters()) if callable(parameters) else None,
        "max_length": model.max_length,
    }


def worded(model: Model, prompt: Any) -> dict[str, Any]:
    """The prompt as text, and as messages where it is a conversation."""
    if prompt is None or isinstance(prompt, str):
        return {"prompt": prompt}
    parts: Sequence[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if parts and all(isinstance(part, dict) for part in parts):
        return {"prompt": parts[-1].get("content"), "messages": parts}
    ids = list(map(int, parts))
    return {"prompt": " ".join(map(str, ids)) if model.tokenizer is None else model.tokenizer.decode(ids)}
