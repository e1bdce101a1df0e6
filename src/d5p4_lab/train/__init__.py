"""Trains the shipped models with one recipe per model: `python -m d5p4_lab train countdown|programs|books`."""

from __future__ import annotations

from pathlib import Path

import torch

from d5p4.errors import D5P4Error

from .books import Books
from .corpus import load, prepare
from .countdown import Countdown
from .programs import Programs
from .recipe import Recipe

RECIPES = ("countdown", "programs", "books")


def recipe(
    name: str, device: torch.device, out: Path, seed: int, toy: bool, data: Path | None = None, vocabulary: int = 8192
) -> Recipe:
    """Return the recipe of a model. Books needs `data`: a folder of texts, or a corpus that `corpus.prepare` made.

    From texts, a corpus with a BPE of `vocabulary` tokens is made inside `out` and removed when the run has ended.
    """
    if name not in RECIPES:
        raise D5P4Error(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}, or corpus")
    if name in ("countdown", "programs"):
        if data is not None:
            raise D5P4Error(f"{name} makes its own tasks: leave out --data {data}")
        return (Countdown if name == "countdown" else Programs)(device, seed, toy)
    if data is None:
        raise D5P4Error(f"{name} learns from texts: give the folder of train.txt and val.txt (or .xz) with --data")
    scratch = None if (data / "corpus.json").exists() else out / "training.corpus"
    books = Books(device, seed, toy, load(data) if scratch is None else prepare(data, scratch, vocabulary))
    books.scratch = scratch
    return books
