"""`d5p4 run` decodes every prompt of a file, with one or many processes. A stopped run can be continued.

It shows its progress on standard error: in a terminal as one line that changes, elsewhere as a line per 30 seconds.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import D5P4Error
from ..jobs import Pace, Report, run_file
from ..jobs.run import Progress as FileProgress
from ..resolve import typed
from .common import facts_line, joined, load_model, note, print_json, visible
from .options import DEFAULT_MODEL, PROMPT_FILE, RUNNING, Device, Dtype, Given, Json, ModelName, Quiet, Seed

LINE_EVERY = 30.0  # if standard error is not a terminal, a line is printed once in this many seconds


def run(
    *,
    input: Annotated[Path, typer.Option("--input", "-i", help=PROMPT_FILE)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the answers: JSON lines in the order of the input.")
    ],
    model: ModelName = DEFAULT_MODEL,
    seed: Seed = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first prompt that fails.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Decode the prompts that failed in earlier runs again.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = None,
    dtype: Dtype = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DATA,ROWS",
            help="Under torchrun: DATA groups divide the prompts, and the ROWS ranks of a group divide each forward.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds that a rank waits for others before the job ends.", rich_help_panel=RUNNING),
    ] = 1800.0,
    options: Given,
) -> None:
    """Decode a whole file of prompts. Run the same command again to continue after a stop.

    Example: d5p4 run -i prompts.jsonl -o answers.jsonl -k 4

    Many GPUs: torchrun --nproc-per-node 8 -m d5p4 run -i prompts.jsonl -o answers.jsonl
    """
    options = typed(options, "command")
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with joined(None if mesh is None else _mesh(mesh), timeout, device) as ranks:
            shown = ranks.first and not (quiet or json)
            place = device if ranks.device is None else str(ranks.device)
            loaded = load_model(model, place, dtype, shown, mapped=ranks.world > 1)
            with file_progress(shown) as progress:
                options |= {"seed": seed, "strict": strict, "retry_errors": retry_errors}
                report = run_file(loaded, input, output, mesh=ranks, progress=progress, **options)
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            cause = f" by {stop}" if str(stop) else ""
            typer.echo(f"stopped{cause}; finished lines are kept: run the same command again to continue", err=True)
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
    """Treat SIGTERM, which Slurm and torchrun send to stop a job, like Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _mesh(text: str) -> tuple[int, int]:
    data, _, beam = text.partition(",")
    try:
        return int(data), int(beam)
    except ValueError:
        raise D5P4Error("must be two whole numbers DATA,ROWS, such as 4,2", option="mesh", value=text) from None


def _print(report: Report, output: Path) -> None:
    console = Console()
    count = f"{report.prompts:,} prompt{'s' * (report.prompts != 1)}"
    count += f", {report.failed:,} of them failed" if report.failed else ""
    console.print(Text(f"{visible(str(output))}: {count}", style="bold"), soft_wrap=True)
    facts = [f"{report.now:,} now, {report.before:,} before"]
    if report.answers:
        distinct, near = (f"{100 * count / report.answers:.1f} %" for count in (report.distinct, report.near_copies))
        facts.append(f"{distinct} of the answers distinct, {near} near copies")
    facts += [f"{report.rows:,} rows", f"seed {report.seed}"]
    if report.now:
        speed = f"{rate(report.prompts_per_second)} prompts/s, {rate(report.rows_per_second)} rows/s"
        facts += [duration(report.seconds), speed]
    console.print(facts_line(*facts), soft_wrap=True)


@contextmanager
def file_progress(shown: bool) -> Iterator[FileProgress | None]:
    if not shown:
        yield None
        return
    console, last = Console(stderr=True), time.monotonic()
    with console.status("decoding") if console.is_terminal else nullcontext() as status:

        def show(pace: Pace) -> None:
            nonlocal last
            line = f"{int(pace.before + pace.now):,} of {pace.total:,} prompts, {_speed(pace)}"
            if status is not None:
                status.update(line)
            elif time.monotonic() - last >= LINE_EVERY:
                last = time.monotonic()
                print(line, file=sys.stderr)

        yield show


def _speed(pace: Pace) -> str:
    left = "" if pace.left is None else f", about {duration(pace.left)} left"
    rows = f", {rate(pace.rows_per_second)} rows/s" if pace.rows else ""  # no rows until a first batch is done
    return f"{rate(pace.prompts_per_second)} prompts/s{rows}{left}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a number of seconds as text, such as "3 h 2 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
