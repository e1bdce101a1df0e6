"""Trains the shipped models with one recipe per model: `python -m d5p4_lab train countdown|programs|books`."""

from __future__ import annotations

from pathlib import Path

import torch

from d5p4.errors import D5P4Error

from .recipe import Recipe

RECIPES = ("countdown", "programs", "books")


def recipe(
    name: str,
    device: torch.device,
    out: Path,
    seed: int = 0,
    toy: bool = False,
    data: Path | None = None,
    vocabulary: int = 8192,
) -> Recipe:
    """Return the recipe of a model.

    The recipe books needs `data`: a folder of texts, or a corpus that `corpus.prepare` made. From texts, this
    function makes a corpus with a BPE of `vocabulary` tokens in a folder inside `out`. The run removes that folder when
    it has finished.
    """
    if name not in RECIPES:
        raise D5P4Error(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}, or corpus")
    if name in ("countdown", "programs"):
        if data is not None:
            raise D5P4Error(f"{name} makes its own tasks: leave out --data {data}")
        from .countdown import Countdown
        from .programs import Programs

        return (Countdown if name == "countdown" else Programs)(device, seed, toy)
    if data is None:
        raise D5P4Error(f"{name} learns from texts: give the folder of train.txt and val.txt (or .xz) with --data")
    from .books import Books
    from .corpus import load, prepare

    scratch = None if (data / "corpus.json").exists() else out / "training.corpus"
    corpus = load(data) if scratch is None else prepare(data, scratch, vocabulary)
    books = Books(device, seed, toy, corpus)
    books.scratch = scratch
    return books
