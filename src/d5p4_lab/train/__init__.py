"""Training of the small models that ship with d5p4: `d5p4 train countdown|books|judge`."""

from __future__ import annotations

from pathlib import Path

import torch

from d5p4.errors import D5P4Error

from .recipe import Recipe

RECIPES = ("countdown", "books", "judge")


def recipe(
    name: str,
    device: torch.device,
    out: Path,
    seed: int = 0,
    toy: bool = False,
    data: Path | None = None,
    vocabulary: int = 8192,
) -> Recipe:
    """The recipe of a shipped model.

    `data`, for books and judge: a folder with their texts, or one that `corpus.prepare` has made of it; texts are
    prepared in `out`, for as long as the run lasts, with a BPE of `vocabulary` tokens.
    """
    if name not in RECIPES:
        raise D5P4Error(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}, or corpus")
    if name == "countdown":
        if data is not None:
            raise D5P4Error(f"countdown makes its own puzzles: leave out --data {data}")
        from .countdown import Countdown

        return Countdown(device, seed, toy)
    if data is None:
        raise D5P4Error(f"{name} learns from texts: give their folder (train.txt and val.txt, or .xz) with --data")
    from d5p4.eval.perplexity import transformers

    from .books import Books
    from .corpus import load, prepare
    from .judge import Judge

    if name == "judge":
        transformers()  # is missed now, and not after minutes of preparing
    scratch = None if (data / "corpus.json").exists() else out / "training.corpus"
    corpus = load(data) if scratch is None else prepare(data, scratch, vocabulary)
    made = (Books if name == "books" else Judge)(device, seed, toy, corpus)
    made.scratch = scratch
    return made
