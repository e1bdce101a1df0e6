"""Training of the small models that ship with d5p4: `d5p4 train countdown|books|judge`."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import D5P4Error
from .recipe import Recipe

RECIPES = ("countdown", "books", "judge")


def recipe(
    name: str, device: torch.device, out: Path, seed: int = 0, toy: bool = False, data: Path | None = None
) -> Recipe:
    """The recipe of a shipped model.

    `data`, for books and judge: a folder with their texts, or one that `corpus.prepare` has made of it; texts are
    prepared in `out`.
    """
    if name not in RECIPES:
        raise D5P4Error(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}")
    if name == "countdown":
        from .countdown import Countdown

        return Countdown(device, seed, toy)
    if data is None:
        raise D5P4Error(f"{name} learns from texts: give their folder (train.txt and val.txt, or .xz) with --data")
    from .books import Books
    from .corpus import load, prepare
    from .judge import Judge

    corpus = load(data) if (data / "corpus.json").exists() else prepare(data, out / "corpus")
    return (Books if name == "books" else Judge)(device, seed, toy, corpus)
