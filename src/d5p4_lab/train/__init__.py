"""Trains the shipped models with one recipe per model: `python -m d5p4_lab train countdown|programs|books|smol`."""

from collections.abc import Callable
from pathlib import Path

import torch

from d5p4.errors import D5P4Error

from .books import Books
from .corpus import load
from .countdown import Countdown
from .programs import Programs
from .recipe import Recipe
from .smol import Smol
from .smol import recipe as smol_recipe

RECIPES: dict[str, type[Recipe]] = {"countdown": Countdown, "programs": Programs, "books": Books, "smol": Smol}


def recipe(
    name: str,
    device: torch.device,
    seed: int,
    toy: bool,
    data: Path | None = None,
    out: Path = Path("out"),
    say: Callable[[str], None] = print,
    **options: int,
) -> Recipe:
    """Return the recipe of a model. Books needs `data`, a corpus that `corpus.prepare` made. For smol, `data` is a
    folder with gsm8k/train.jsonl and books/train.txt.xz; what the base wrote is kept beside the folder `out`."""
    if name == "smol":
        return smol_recipe(device, seed, toy, data, out.with_name(f"{out.name}-data.npz"), say, **options)
    if options:
        raise D5P4Error(f"{name} has no options: leave out --option")
    if name not in RECIPES:
        raise D5P4Error(f"there is no recipe {name!r}: choose one of {', '.join(RECIPES)}, or corpus")
    if name == "books":
        if data is None:
            raise D5P4Error("books learns from texts: make a corpus with `train corpus`, and give --data CORPUS")
        return Books(device, seed, toy, load(data))
    if data is not None:
        raise D5P4Error(f"{name} makes its own tasks: leave out --data {data}")
    return RECIPES[name](device, seed, toy)
