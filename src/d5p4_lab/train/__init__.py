"""Trains the shipped models with one recipe per model: `python -m d5p4_lab train countdown|programs|books`."""

from __future__ import annotations

from pathlib import Path

import torch

from d5p4.errors import D5P4Error

from .books import Books
from .corpus import load
from .countdown import Countdown
from .programs import Programs
from .recipe import Recipe

RECIPES: dict[str, type[Recipe]] = {"countdown": Countdown, "programs": Programs, "books": Books}


def recipe(name: str, device: torch.device, seed: int, toy: bool, data: Path | None = None) -> Recipe:
    """Return the recipe of a model. Books needs `data`, a corpus that `corpus.prepare` made."""
    if name not in RECIPES:
        raise D5P4Error(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}, or corpus")
    if name == "books":
        if data is None:
            raise D5P4Error("books learns from texts: make a corpus with `train corpus`, and give --data CORPUS")
        return Books(device, seed, toy, load(data))
    if data is not None:
        raise D5P4Error(f"{name} makes its own tasks: leave out --data {data}")
    return RECIPES[name](device, seed, toy)
