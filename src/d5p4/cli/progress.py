"""What moves while you wait: on standard error, and only in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ..models.base import NativeModel
    from ..types import Callback, Snapshot


def load_model(name: str, device: str | None, dtype: str | None, shown: bool) -> NativeModel:
    """`d5p4.load` with a word about it."""
    import d5p4

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        return d5p4.load(name, device, dtype)
    with console.status(f"loading {name}"):
        return d5p4.load(name, device, dtype)


@contextmanager
def progress(label: str, prompts: int, shown: bool) -> Iterator[Callback | None]:
    """A bar over the steps of all prompts; gives the callback that moves it, or None."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=prompts)

        def advance(shot: Snapshot) -> None:
            where = f"{label}: step {shot.step + 1} of {shot.steps}"
            bar.update(task, advance=len(shot.prompts) / shot.steps, description=where)

        yield advance
