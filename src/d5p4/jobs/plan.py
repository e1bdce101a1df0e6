"""Divide a file of prompts into batches. A batch is a list of prompts that are decoded together.

The division depends only on the file, the settings and the token budget. A prompt is therefore always decoded together
with the same other prompts, even if the run is interrupted or shared by several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import D5P4Error
from ..generate import batches
from ..prompts import Prepared, Request
from .reader import BadLine, PromptLine

WINDOW = 1024
"""The number of lines per window. The lines of a window are sorted by length together and then divided into batches."""


@dataclass(frozen=True)
class Item:
    """A prompt that is ready to be decoded."""

    source: PromptLine
    request: Request

    @property
    def line(self) -> int:
        return self.source.line

    @property
    def name(self) -> str:
        return f"line {self.line}"


@dataclass(frozen=True)
class Work:
    """One unit of work: prompts that are decoded together, or the bad lines of a window."""

    items: tuple[Item, ...] = ()
    bad: tuple[BadLine, ...] = ()

    @property
    def lines(self) -> list[int]:
        return [item.line for item in self.items] + [bad.line for bad in self.bad]


def plan_work(lines: Iterable[PromptLine | BadLine], prepared: Prepared, bad_first: bool) -> Iterator[Work]:
    """Yield the work of a file. Batches are made inside windows of `WINDOW` consecutive lines. With `bad_first`, the
    bad lines of a window come before its batches. Otherwise they come after its batches."""
    rest = iter(lines)
    while window := list(islice(rest, WINDOW)):
        bad = [entry for entry in window if isinstance(entry, BadLine)]
        good = [entry for entry in window if isinstance(entry, PromptLine)]
        items: list[Item] = []
        requests = prepared.take([source.prompt for source in good], [source.id for source in good])
        for source, request in zip(good, requests, strict=True):
            if isinstance(request, D5P4Error):
                bad.append(BadLine(source.line, request.phrase(place=""), source.fields))
            else:
                items.append(Item(source, request))
        planned = batches(prepared.model, [item.request for item in items], prepared.settings)
        works = [Work(items=tuple(items[i] for i in numbers)) for _, numbers in planned]
        if bad:
            bad.sort(key=lambda entry: entry.line)
            works.insert(0 if bad_first else len(works), Work(bad=tuple(bad)))
        yield from works
