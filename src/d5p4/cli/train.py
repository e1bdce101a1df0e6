"""`d5p4 train`: make the small models that ship, or toys of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ..errors import D5P4Error
from .options import Device, Quiet

NAMES = "countdown, books or judge; corpus only turns texts into token files."


def train(
    name: Annotated[str, typer.Argument(help=NAMES)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the model; a stopped run in it continues.")],
    minutes: Annotated[float | None, typer.Option(help="Minutes of training, compiling not counted (1).")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead: so many steps, the same weights each time.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="books, judge: a folder with train.txt and val.txt (or .xz), or a corpus.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="full or toy (full on a GPU, toy on a CPU).")] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the BPE made from texts.")] = 8192,
    seed: Annotated[int, typer.Option(help="Of the first weights, the data and the masks.")] = 0,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the model (on a GPU).")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Train nothing: measure the model in the folder again, at its size.")
    ] = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train a small model: on a GPU as it ships, on a CPU as a toy; or turn texts into a corpus."""
    from ..models.load import choose_device
    from ..train import recipe
    from ..train.corpus import prepare
    from ..train.loop import refuse_occupied
    from ..train.loop import train as run
    from ..train.schedule import Budget

    if minutes is not None and not 0 < minutes < float("inf"):
        raise D5P4Error(f"minutes={minutes} must be positive")
    if steps is not None and minutes is not None:
        raise D5P4Error(f"steps={steps} and minutes={minutes}: give one of them")
    if steps is not None and steps < 1:
        raise D5P4Error(f"steps={steps} must be at least 1")
    if size not in (None, "full", "toy"):
        raise D5P4Error(f"size={size!r} must be full or toy")
    if not 0 <= seed < 2**63:
        raise D5P4Error(f"seed={seed} must be at least 0 and below 2**63")
    started = time.perf_counter()

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line)

    if name == "corpus":
        if data is None:
            raise D5P4Error("a corpus is made of texts: give their folder (train.txt and val.txt, or .xz) with --data")
        if any(option is not None for option in (minutes, steps, size, compile, device)):
            raise D5P4Error("train corpus takes --data, --vocabulary and --out only: it trains nothing")
        corpus = prepare(data, out, vocabulary)
        say(f"{len(corpus.train):,} tokens to train on, {len(corpus.val):,} held out, in {out}")
        if corpus.left_out:
            say(f"left out of the held-out text, because the training text has them: {corpus.left_out} books")
        return
    if not validate:
        refuse_occupied(out)
    chosen = choose_device(device)
    on_gpu = chosen.type == "cuda"
    toy = size == "toy" or (size is None and not on_gpu)
    what = recipe(name, chosen, out, seed, toy, data, vocabulary)
    if validate:
        for figure, value in what.validate(out).items():
            typer.echo(f"{figure}: {value:.4g}")
        what.tidy()
        return
    budget = Budget(steps=steps) if steps is not None else Budget(seconds=60 * (minutes or 1.0))
    run(what, out, budget, compiled=on_gpu if compile is None else compile, say=say)
    say(f"{time.perf_counter() - started:.0f} s this time")
