"""A progress bar over the steps of a decode, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .types import Callback, Snapshot


class WorkDone:
    """Adds up the work that is done after a step, in prompts. A prompt that has left the snapshots is finished."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}

    def __call__(self, shot: Snapshot) -> float:
        self._shares = dict.fromkeys(self._shares, 1.0)
        self._shares |= {number: shot.done(place) for place, number in enumerate(shot.prompts.tolist())}
        return sum(self._shares.values())


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

        work = WorkDone()

        def advance(shot: Snapshot) -> None:
            total = f" of {shot.steps}" if shot.shares[0] is None else ""
            progress.update(task, completed=work(shot), description=f"{label}: step {shot.step + 1}{total}")

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
