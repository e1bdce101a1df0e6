"""Trains the shipped models with one recipe per model: `python -m d5p4_lab train countdown|programs|books|judge`."""

from __future__ import annotations

from pathlib import Path

import torch

from d5p4.errors import D5P4Error

from .recipe import Recipe

RECIPES = ("countdown", "programs", "books", "judge")


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

    The recipes books and judge need `data`: a folder of texts, or a corpus that `corpus.prepare` made. From texts, this
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
    from ..scoring.reading import transformers
    from .books import Books, Judge
    from .corpus import load, prepare

    if name == "judge":
        transformers()  # if transformers is missing, raise the error now, not after minutes of preparation
    scratch = None if (data / "corpus.json").exists() else out / "training.corpus"
    corpus = load(data) if scratch is None else prepare(data, scratch, vocabulary)
    text_recipe = (Books if name == "books" else Judge)(device, seed, toy, corpus)
    text_recipe.scratch = scratch
    return text_recipe
