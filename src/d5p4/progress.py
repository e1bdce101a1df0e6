"""A progress bar over the steps of a decode, on standard error (which a notebook shows in the output of a cell)."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from tqdm import tqdm

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
    """Yield the callback that moves the bar. Yield None if `shown` is false, or outside terminals and notebooks."""
    console = Console(stderr=True)
    if not (shown and (console.is_terminal or console.is_jupyter)):
        yield None
        return
    shape, work = "{desc} {percentage:3.0f}%|{bar}| {remaining}", WorkDone()
    with tqdm(desc=label, total=prompts, bar_format=shape, leave=console.is_jupyter) as progress:

        def advance(shot: Snapshot) -> None:
            total = f" of {shot.steps}" if shot.shares[0] is None else ""
            progress.set_description_str(f"{label}: step {shot.step + 1}{total}", refresh=False)
            progress.update(work(shot) - progress.n)

        yield advance
        progress.update(prompts - progress.n)  # a prompt that ends early may count as less than 1 at its last step


def both(first: Callback | None, second: Callback | None) -> Callback | None:
    """Return a callback that calls both callbacks. It returns the prompts to drop, which the first callback returns."""
    if first is None or second is None:
        return second if first is None else first
    return lambda shot: (second(shot), first(shot))[1]
