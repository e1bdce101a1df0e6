"""The command line. Each command is in a short file of this folder and calls functions of the library."""

import os
import sys
from typing import Annotated

import typer

from ..__about__ import __version__
from ..errors import D5P4Error
from ..options import load_plugins
from .answer import compare, generate, trace
from .common import Commands, print_error
from .info import check, convert, info, methods
from .options import Decoding, plugins, with_options, with_parameters
from .run import run
from .score import score
from .serve import PARAMETERS, serve


def build() -> typer.Typer:
    """Build the commands. Their options include the parameters of all methods that are registered at this time."""
    app = typer.Typer(
        cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    for decoding in (generate, run, compare, trace):
        app.command(cls=Decoding)(with_options(decoding))
    app.command()(with_parameters(serve, PARAMETERS.values()))
    for other in (score, methods, info, check, convert):
        app.command()(other)
    app.callback()(d5p4)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"d5p4 {__version__}")
        raise typer.Exit


def d5p4(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Decode masked diffusion language models into sets of good answers that differ."""


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process has closed this standard stream
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    modules = plugins(sys.argv)
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a plugin may be a Python file in the current folder
    try:
        load_plugins(modules)
    except D5P4Error as error:
        print_error(error)
        sys.exit(2)
    build()(prog_name="d5p4")
