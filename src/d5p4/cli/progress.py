"""Shows the progress of a file run on standard error: as a bar in a terminal, or else as a line every 30 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

if TYPE_CHECKING:
    from ..jobs import Pace
    from ..jobs.run import Progress as FileProgress

LINE_EVERY = 30.0  # if standard error is not a terminal, a line is printed once in this many seconds


@contextmanager
def file_progress(shown: bool) -> Iterator[FileProgress | None]:
    """Yield the function that shows progress, or None if `shown` is false."""
    console = Console(stderr=True)
    if not shown:
        yield None
    elif not console.is_terminal:
        yield _line_printer()
    else:
        columns = (TextColumn("decoding"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("")

            def show(pace: Pace) -> None:
                bar.update(task, total=pace.total, completed=pace.before + pace.now, description=_speed(pace))

            yield show


def _line_printer() -> FileProgress:
    """Return a function that prints a line of progress on standard error every `LINE_EVERY` seconds."""
    last = time.monotonic()

    def show(pace: Pace) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            print(f"{int(pace.before + pace.now):,} of {pace.total:,} prompts, {_speed(pace)}", file=sys.stderr)

    return show


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
