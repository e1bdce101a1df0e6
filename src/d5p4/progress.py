"""A progress bar over the steps of a decode, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .types import Callback, Snapshot


@contextmanager
def bar(label: str, prompts: int, shown: bool = True) -> Iterator[Callback | None]:
    """Yield the callback that moves the bar. Yield None if `shown` is false or standard error is not a terminal."""
    console = Console(stderr=True)
    if not (shown and (console.is_terminal or console.is_jupyter)):
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=prompts)

        def advance(shot: Snapshot) -> None:
            step = f"{label}: step {shot.step + 1} of {shot.steps}"
            progress.update(task, advance=len(shot.prompts) / shot.steps, description=step)

        yield advance


def both(first: Callback | None, second: Callback | None) -> Callback | None:
    """Return a callback that calls both callbacks. It returns the prompts to drop, which the first callback returns."""
    if first is None or second is None:
        return first or second
    given, moved = first, second

    def call(shot: Snapshot) -> Any:
        moved(shot)
        return given(shot)

    return call
