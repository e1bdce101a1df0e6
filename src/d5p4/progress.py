"""A progress bar over the steps of a decode, on standard error or in the output of a notebook cell."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .types import Callback, Snapshot

PAUSE = 0.1  # the least number of seconds between two updates of a bar in a notebook


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
    """Yield the callback that moves the bar. Yield None if `shown` is false, or outside terminals and notebooks."""
    console = Console(stderr=True)
    if shown and console.is_jupyter:
        with _notebook_bar(label, prompts) as advance:
            yield advance
        return
    if not (shown and console.is_terminal):
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, work = progress.add_task(label, total=prompts), WorkDone()

        def advance(shot: Snapshot) -> None:
            total = f" of {shot.steps}" if shot.shares[0] is None else ""
            progress.update(task, completed=work(shot), description=f"{label}: step {shot.step + 1}{total}")

        yield advance


@contextmanager
def _notebook_bar(label: str, prompts: int) -> Iterator[Callback]:
    """Yield the callback that moves a bar in the output of a notebook cell. The full bar stays in the output.

    The bar of rich needs ipywidgets in a notebook, and without them it writes warnings. This bar needs IPython alone.
    """
    from IPython.display import display

    def line(done: float) -> dict[str, str]:
        text = f"{label}: {int(done)} of {prompts} prompt{'s' * (prompts != 1)}"
        return {"text/plain": text, "text/html": f'<progress value="{done:g}" max="{prompts}"></progress> {text}'}

    work, moved = WorkDone(), time.monotonic()
    handle: Any = display(line(0), raw=True, display_id=True)

    def advance(shot: Snapshot) -> None:
        nonlocal moved
        done = work(shot)
        if time.monotonic() - moved >= PAUSE:
            moved = time.monotonic()
            handle.update(line(done), raw=True)

    yield advance
    handle.update(line(prompts), raw=True)  # a prompt that ends early may count as less than 1 at its last step


def both(first: Callback | None, second: Callback | None) -> Callback | None:
    """Return a callback that calls both callbacks. It returns the prompts to drop, which the first callback returns."""
    if first is None or second is None:
        return second if first is None else first
    return lambda shot: (second(shot), first(shot))[1]
