"""The command line: one thin file per command. The library does the work."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ..errors import D5P4Error
from .check import check
from .compare import compare
from .errors import Commands
from .generate import generate
from .info import info
from .methods import methods
from .run import run
from .score import score
from .serve import serve
from .trace import trace

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (generate, run, compare, serve, trace, score, methods, info, check):
    app.command()(command)


def _moved(name: str) -> None:
    def command() -> None:
        raise D5P4Error(f"d5p4 {name} has moved: in a checkout of the repository use python -m d5p4_lab {name} ...")

    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, hidden=True, context_settings=settings, add_help_option=False)(command)


for name in ("reproduce", "train"):
    _moved(name)


def _show_version(wanted: bool) -> None:
    if wanted:
        from ..__about__ import __version__

        typer.echo(f"d5p4 {__version__}")
        raise typer.Exit


@app.callback()
def d5p4(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Decode masked diffusion language models into sets of good answers that differ."""


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    app(prog_name="d5p4")
