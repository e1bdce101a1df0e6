"""From a file of prompts to batches: a function of the file, the settings and the token budget alone.

So whatever was interrupted, and however many ranks there are, a prompt is decoded beside the same other prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import D5P4Error
from ..generate import Occurrences, batches
from ..prompts import Request, encode, plan
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
    while window := list(islice(rest, WINDOW)):
        found = [
            source if isinstance(source, BadLine) else _ready(source, model, settings, length_given, occurrences)
            for source in window
        ]
        ready = [entry for entry in found if isinstance(entry, Item)]
        bad = [entry for entry in found if isinstance(entry, BadLine)]
        planned = batches(model, [item.request for item in ready], settings)
        works = [Work(items=tuple(ready[i] for i in numbers)) for _, numbers in planned]
        if bad:
            works.insert(0 if bad_first else len(works), Work(bad=tuple(bad)))
        yield from works


def _ready(
    source: PromptLine, model: Model, settings: Settings, length_given: bool, occurrences: Occurrences
) -> Item | BadLine:
    try:
        ids = encode(model, source.prompt, settings.chat, 0)
        key = occurrences.key(ids, source.id)
        return Item(source, plan(model, ids, settings, length_given, 0), key)
    except D5P4Error as reason:
        said = re.sub(r"^prompt 0\b", "the prompt", str(reason)).removeprefix("the prompt: ")
        return BadLine(source.line, said, source.fields)
