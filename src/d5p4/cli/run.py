"""`d5p4 run`: every prompt of a file, by one process or many, stopped and carried on as often as need be."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..errors import D5P4Error
from .options import RUNNING, Decoding, Device, Dtype, Json, ModelName, Parameters, Quiet, given, with_options
from .progress import duration, file_progress, load_model, rate
from .ranks import joined
from .record import print_json
from .show import facts_line, note, visible

if TYPE_CHECKING:
    from ..jobs import Report


@with_options
def run(
    *,
    input: Annotated[
        Path,
        typer.Option(
            "--input", "-i", help="JSON lines with prompt or messages (and id, and anything), or .txt, a prompt a line."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON lines with the answers, in the order of the input.")
    ],
    model: ModelName,
    method: Annotated[str | None, typer.Option(help="See d5p4 methods (d5p4).", show_default=False)] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Add tokens and their log-probabilities.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first prompt that fails.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Decode again the prompts that failed before.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    decoding: Decoding,
    parameters: Parameters,
    device: Device = None,
    dtype: Dtype = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DATA,BEAM",
            help="Under torchrun: DATA groups share the prompts, the BEAM ranks of a group each pool (ranks,1).",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank ends the job.", rich_help_panel=RUNNING)
    ] = 600.0,
) -> None:
    """Decode a whole file of prompts. The same command again goes on where it was stopped.

    Many GPUs: torchrun --nproc-per-node 8 -m d5p4 run --input prompts.jsonl --output answers.jsonl --model ...
    """
    import d5p4

    from ..distributed import at_work
    from ..methods import method_named

    settings: dict[str, Any] = given(decoding) | given(parameters)
    if method is not None:
        settings["method"] = method_named(method).name  # wrong names are told before a model is loaded
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with joined(None if mesh is None else _mesh(mesh), timeout, device) as ranks:
            shown = ranks.first and not (quiet or json)
            place = device if ranks.device is None else str(ranks.device)
            with at_work(ranks):
                loaded = load_model(model, place, dtype, shown, mapped=ranks.world > 1)
            with file_progress(shown) as progress:
                report = d5p4.run_file(
                    loaded, input, output, strict=strict, retry_errors=retry_errors, mesh=ranks, progress=progress,
                    logprobs=logprobs or None, **settings,
                )  # fmt: skip
    except KeyboardInterrupt as stop:
        if _is_first():
            told = f" by {stop}" if str(stop) else ""
            typer.echo(f"stopped{told}; what is finished is kept: the same command goes on", err=True)
        raise typer.Exit(143 if str(stop) else 130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if not ranks.first:
        return
    if json:
        print_json({"output": str(output)} | report.to_dict())
    else:
        _print(report, output)
    if not quiet:
        for line in report.notes:
            note(line)


def _stop(number: int, frame: object) -> None:
    """What Slurm and torchrun send; the run ends as by Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _mesh(text: str) -> tuple[int, int]:
    data, _, beam = text.partition(",")
    try:
        return int(data), int(beam)
    except ValueError:
        raise D5P4Error(f"mesh={text!r} must be two numbers DATA,BEAM, such as 4,2") from None


def _print(report: Report, output: Path) -> None:
    console = Console()
    count = f"{report.prompts:,} prompt{'s' * (report.prompts != 1)}"
    count += f", {report.failed:,} of them failed" if report.failed else ""
    console.print(Text(f"{visible(str(output))}: {count}", style="bold"), soft_wrap=True)
    facts = [f"{report.now:,} now, {report.before:,} before"]
    if report.distinct is not None:
        facts.append(f"{100 * report.distinct:.1f} % of the answers distinct")
    facts += [f"{report.rows:,} rows", f"seed {report.seed}"]
    if report.now:
        speed = f"{rate(report.prompts_per_second)} prompts/s, {rate(report.rows_per_second)} rows/s"
        facts += [duration(report.seconds), speed]
    console.print(facts_line(*facts), soft_wrap=True)
