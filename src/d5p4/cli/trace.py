"""`d5p4 trace`: how the answers to a prompt came about, as one page that needs no server, or as JSON."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import D5P4Error, DuplicateAnswers
from .call import read_prompt
from .compare import share
from .options import Decoding, Device, Dtype, ModelName, Parameters, Quiet, given, with_options
from .progress import load_model, progress
from .show import facts_line

SUFFIXES = (".html", ".htm", ".json")


@with_options
def trace(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input. None: unconditional answers.")
    ] = None,
    model: ModelName,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write: .html, a page to open in a browser, or .json.")
    ],
    methods: Annotated[str, typer.Option(help="Names with commas between; see d5p4 methods.")] = "independent,d5p4",
    quiet: Quiet = False,
    decoding: Decoding,
    parameters: Parameters,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Write how answers came about: every pool, who survived, what differs.

    The methods answer with the same seed. A method's own parameter goes to the methods that have it.
    """
    from .. import view

    settings = given(decoding)
    own = share(methods, given(parameters))
    prompt = None if prompt is None else read_prompt(prompt)
    check_place(output)
    loaded = load_model(model, device, dtype, not quiet)
    traces: list[dict[str, Any]] = []
    for method, values in own.items():
        with warnings.catch_warnings(), progress(method, 1, not quiet) as callback:
            warnings.simplefilter("ignore", DuplicateAnswers)  # the page says it
            found = view.trace(loaded, prompt, callback=callback, method=method, **settings, **values)
        settings["seed"] = found["seed"]
        traces.append(found)
    try:
        (view.write_json if output.suffix.lower() == ".json" else view.write_html)(output, traces)
    except OSError as reason:
        raise D5P4Error(f"{output} cannot be written: {reason.strerror or reason}") from reason
    if not quiet:
        size = f"{max(1, round(output.stat().st_size / 1000)):,} kB"
        facts = facts_line(str(output), size, f"seed {settings['seed']}", *map(_outcome, traces))
        Console().print(facts, soft_wrap=True)


def check_place(path: Path) -> None:
    """Raise before any work is done where a file cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise D5P4Error(f"{path} should end in .html (a page) or .json")
    if path.is_dir():
        raise D5P4Error(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise D5P4Error(f"{path} cannot be written: there is no folder {path.parent}")
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as reason:
        raise D5P4Error(f"{path} cannot be written: {reason.strerror or reason}") from reason


def _outcome(trace: dict[str, Any]) -> str:
    right = "" if trace["right"] is None else f", {trace['right']} right"
    return f"{trace['method']}: {trace['distinct']} of {len(trace['answers'])} distinct{right}"
