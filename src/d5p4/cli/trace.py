"""`d5p4 trace` records how the answers to a prompt were made, as an HTML page that needs no server, or as JSON."""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import view
from ..errors import D5P4Error, DuplicateAnswers
from ..progress import bar
from ..resolve import alike
from ..result import counted
from .common import load_model, read_prompt
from .options import DEFAULT_MODEL, Device, Dtype, Given, MethodNames, ModelName, PromptText, Quiet, Seed, share
from .show import facts_line

SUFFIXES = (".html", ".htm", ".json")


def trace(
    *,
    prompt: Annotated[str | None, PromptText] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write: .html (a page for a browser) or .json.")
    ] = Path("trace.html"),
    model: ModelName = DEFAULT_MODEL,
    methods: MethodNames = "tree,independent",
    seed: Seed = None,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    options: Given,
) -> None:
    """Write a page that shows how the answers were made: where the beams part, on which token, how probable it was.

    All methods use the same seed, order, reveal rule and early stop, as in `d5p4 compare`.

    Example: d5p4 trace "86,28,13,31:96" -o trace.html
    """
    own = share(methods, options)
    prompt = None if prompt is None else read_prompt(prompt)
    _check_place(output)
    loaded = load_model(model, device, dtype, not quiet)
    traces: list[dict[str, Any]] = []
    for method, chosen in alike(loaded, own).items():
        with warnings.catch_warnings(), bar(method, 1, not quiet) as callback:
            warnings.simplefilter("ignore", DuplicateAnswers)  # needs no warning, because the page shows duplicates
            traces.append(view.trace(loaded, prompt, callback=callback, seed=seed, **chosen))
        seed = traces[-1]["seed"]
    try:
        (view.write_json if output.suffix.lower() == ".json" else view.write_html)(output, traces)
    except OSError as reason:
        raise D5P4Error(f"{output} cannot be written: {reason.strerror or reason}") from reason
    if not quiet:
        size = f"{max(1, round(output.stat().st_size / 1000)):,} kB"
        facts = facts_line(str(output), size, f"seed {seed}", *map(_outcome, traces))
        Console().print(facts, soft_wrap=True)


def _check_place(path: Path) -> None:
    """Raise an error if the file cannot be written. The command checks this before it loads the model."""
    if path.suffix.lower() not in SUFFIXES:
        raise D5P4Error(f"the name of the output file {path} must end in .html (a page) or .json")
    if path.is_dir():
        raise D5P4Error(f"{path} is a folder; give the name of a file in that folder")
    if not path.parent.is_dir():
        raise D5P4Error(f"{path} cannot be written: there is no folder {path.parent}")


def _outcome(trace: dict[str, Any]) -> str:
    right = "" if trace["right"] is None else f", {trace['right']} different right"
    count = f"{trace['distinct']} of {len(trace['answers'])} distinct, {counted(trace['near_copies'])}"
    return f"{trace['method']}: {count}{right}"
