"""From a file of prompts to batches: a function of the file, the settings and the token budget alone.

So whatever was interrupted, and however many ranks there are, a prompt is decoded beside the same other prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from ..errors import D5P4Error
from ..generate import Occurrences, batches, schedule_for
from ..prompts import Request, encode, of_only_prompt, plan
from ..settings import Settings
from ..types import Model
from .reader import BadLine, PromptLine

WINDOW = 1024
"""Lines that are sorted by length and cut into batches together."""


@dataclass(frozen=True)
class Item:
    """A prompt ready to be decoded."""

    source: PromptLine
    request: Request
    key: int

    @property
    def line(self) -> int:
        return self.source.line

    @property
    def name(self) -> str:
        return f"line {self.line}"


@dataclass(frozen=True)
class Work:
    """What is done in one go: prompts that share a decode, or lines that cannot be decoded."""

    items: tuple[Item, ...] = ()
    bad: tuple[BadLine, ...] = ()

    @property
    def lines(self) -> list[int]:
        return [item.line for item in self.items] + [bad.line for bad in self.bad]


def plan_work(
    lines: Iterable[PromptLine | BadLine], model: Model, settings: Settings, length_given: bool, bad_first: bool
) -> Iterator[Work]:
    """The work of a file, window by window; the bad lines of a window come before its batches or after them."""
    occurrences, rest = Occurrences(), iter(lines)
    possible: set[int] = set()  # lengths of windows that have a schedule
    while window := list(islice(rest, WINDOW)):
        bad = [source for source in window if isinstance(source, BadLine)]
        encoded: list[tuple[PromptLine, list[int]]] = []
        for source in window:
            if isinstance(source, PromptLine):
                with _failing(source, bad):
                    encoded.append((source, encode(model, source.prompt, settings.chat, 0)))
        keys = occurrences.keys([ids for _, ids in encoded], [source.id for source, _ in encoded])
        ready: list[Item] = []
        for (source, ids), key in zip(encoded, keys, strict=True):
            with _failing(source, bad):
                request = plan(model, ids, settings, length_given, 0)
                if (length := len(request.window(model.mask_id))) not in possible:
                    schedule_for(length, settings)
                    possible.add(length)
                ready.append(Item(source, request, key))
        planned = batches(model, [item.request for item in ready], settings)
        works = [Work(items=tuple(ready[i] for i in numbers)) for _, numbers in planned]
        if bad:
            bad.sort(key=lambda entry: entry.line)
            works.insert(0 if bad_first else len(works), Work(bad=tuple(bad)))
        yield from works


@contextmanager
def _failing(source: PromptLine, bad: list[BadLine]) -> Iterator[None]:
    """What is wrong with a prompt makes its line a bad one."""
    try:
        yield
    except D5P4Error as reason:
        bad.append(BadLine(source.line, of_only_prompt(reason), source.fields))
