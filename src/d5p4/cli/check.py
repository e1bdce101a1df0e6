"""`d5p4 check` loads a checkpoint and tests the model on one prompt."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from .options import Device, Dtype
from .show import visible


def check(
    model: Annotated[str, typer.Argument(help="A folder, a hub id such as org/name, or a shipped model.")],
    compare_remote: Annotated[
        bool,
        typer.Option(
            "--compare-remote", help="Also run the code in the checkpoint and compare. Run only code you trust."
        ),
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Load a model and test it on one prompt. The exit code is 1 if a test fails.

    Example: d5p4 check countdown
    """
    from ..models.check import check as try_out

    console = Console()
    lines = try_out(model, device, dtype, compare_remote)
    for line in lines:
        mark = ("pass", "green") if line.passed else ("fail", "red")
        console.print(Text.assemble(mark, "  ", (line.name, "bold"), ": ", visible(line.detail)), soft_wrap=True)
    passed = all(line.passed for line in lines)
    console.print(Text("pass" if passed else "fail", style="bold green" if passed else "bold red"))
    if not passed:
        raise typer.Exit(1)
