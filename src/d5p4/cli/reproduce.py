"""`d5p4 reproduce`: an experiment of the paper with one command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import D5P4Error
from .options import RUNNING, Device, Dtype, Quiet
from .ranks import joined

NAMES = "pareto, fidelity, control, qa, guidance, math, partition, quality-signal, features, scaling, cost, theory, "
NAMES += "budget; all of them: all; the page of claims from what was drawn: claims."
UNFINISHED = 3  # the exit code when --minutes were not enough


def reproduce(
    name: Annotated[str, typer.Argument(help=NAMES)],
    scale: Annotated[str, typer.Option(help="box: the models of the repository, offline; paper: as in the paper.")] = (
        "box"
    ),
    stage: Annotated[
        list[str] | None, typer.Option(help="decode, score or draw; may be repeated (all, one after the other).")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Instead of the scale's own.")] = None,
    data: Annotated[Path | None, typer.Option(help="The task's file or folder, where it needs one.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the results (results/SCALE).")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Another value of a setting, such as units=4; may be repeated.")
    ] = None,
    scorers: Annotated[str | None, typer.Option(help="Score with these only, commas between, such as ppl,cos.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Start no decoding that would end later.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random streams.")] = 0,
    page: Annotated[Path, typer.Option(help="The page that `claims` writes.")] = Path("docs/claims.md"),
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank ends the job.", rich_help_panel=RUNNING)
    ] = 600.0,
) -> None:
    """Run an experiment of the paper again: config, raw rows, table and figure, stage by stage, resumable.

    Many GPUs: torchrun --nproc-per-node 8 -m d5p4 reproduce NAME ...
    """
    from ..experiments import EXPERIMENTS, experiment
    from ..experiments.claims import write_claims
    from ..experiments.decoding import missing
    from ..experiments.run import STAGES
    from ..experiments.run import reproduce as run

    folder = out if out is not None else Path("results") / scale
    if minutes is not None and minutes < 0:
        raise D5P4Error(f"minutes={minutes:g} must not be negative")
    changes = dict(_change(text) for text in change or ())
    if name == "all" and data is None and "decode" in (stage or STAGES):
        # What has been drawn has its rows, and needs the text no more.
        need = [each for each in EXPERIMENTS if scale in experiment(each).needs_text]
        undone = [each for each in need if not (folder / each / "summary.json").is_file()]
        if undone:
            raise D5P4Error(f"{', '.join(undone)} need{'s' * (len(undone) == 1)} a text file: give --data")
    began = time.monotonic()
    finished = True
    with joined(None, timeout, device) as mesh:
        if name == "claims" and mesh.first:
            typer.echo(write_claims(folder, page))
        for each in {"all": EXPERIMENTS, "claims": ()}.get(name, (name,)):
            setup = run(
                each, scale=scale, out=folder, stages=stage or STAGES, model=model, data=data, device=device,
                dtype=dtype, seed=seed, minutes=None if minutes is None else minutes - (time.monotonic() - began) / 60,
                scorers=None if scorers is None else scorers.split(","), changes=changes,
                progress=None if quiet else _Teller(each), mesh=mesh,
            )  # fmt: skip
            finished = finished and setup.finished
            if not mesh.first:
                continue
            if setup.finished:
                typer.echo(f"{each}: {setup.folder}")
            else:
                left = sum(map(len, missing(setup).values()))
                typer.echo(f"{each}: not finished, {left} sets left; run the same command again")
    if not finished and mesh.first:
        raise typer.Exit(UNFINISHED)


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise D5P4Error(f"--set {text!r} must be a name and a value, such as units=4")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class _Teller:
    """A line of progress at most every few seconds, with the time left."""

    def __init__(self, label: str) -> None:
        self.label, self.began, self.last = label, time.monotonic(), 0.0
        self.start = 0.0  # share done when the stage began

    def __call__(self, share: float, text: str) -> None:
        now = time.monotonic()
        if share <= 0 or share < self.start:
            self.began, self.start = now, share
        if now - self.last < 2 and share < 1:
            return
        self.last = now
        spent = now - self.began
        left = f", about {spent / share * (1 - share):.0f} s left" if 0 < share < 1 and spent > 1 else ""
        typer.echo(f"{self.label} {100 * share:3.0f} % {text}{left}", err=True)
