"""Where finished lines live until the end: `OUT.parts/part-<start>-<rank>.jsonl`.

Each rank of each start has a file of its own and only appends to it, so nobody can harm what another has written, and
nothing that is on the disk is ever taken away before OUT is whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..distributed.folder import WORD
from ..errors import D5P4Error
from ..store import replace_file, sync_folder

LOCK = "lock"
PART = re.compile(r"part-(\d+)-(\d+)\.jsonl")
BUSY = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


class Place(NamedTuple):
    """Where a line is, and what the report wants of it."""

    part: Path
    start: int
    stop: int
    failed: bool
    distinct: int
    answers: int
    rows: int


@dataclass
class Found:
    """The lines of all parts by their number in the input."""

    places: dict[int, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """How many have answers."""
        return sum(not place.failed for place in self.places.values())

    def finished(self, retry_errors: bool = False) -> Iterator[int]:
        """Numbers of lines that need not be decoded again."""
        return (line for line, place in self.places.items() if not (retry_errors and place.failed))

    def add(self, line: int, place: Place) -> None:
        """The first line of a number counts, but anything after an error replaces it."""
        before = self.places.get(line)
        if before is None or before.failed:
            self.places[line] = place


class Parts:
    """The parts of one output."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".parts")

    def files(self) -> list[Path]:
        """By start, then by rank."""
        named = [(PART.fullmatch(path.name), path) for path in self.folder.glob("part-*.jsonl")]
        return [path for *_, path in sorted((int(name[1]), int(name[2]), path) for name, path in named if name)]

    def file(self, start: int, rank: int) -> Path:
        return self.folder / f"part-{start:04d}-{rank:04d}.jsonl"

    def last_start(self) -> int:
        return max((int(path.name.split("-")[1]) for path in self.files()), default=0)

    def read(self, beat: Callable[[], None]) -> Found:
        """Every whole line. A broken one is left out and noted: its prompt is decoded again."""
        found = Found()
        for path in self.files():
            broken, tail = 0, False
            with path.open("rb") as file:
                start = 0
                for number, raw in enumerate(file):
                    tail = not raw.endswith(b"\n")
                    entry = None if tail else _parsed(raw)
                    if entry is not None:
                        found.add(entry["line"], _place(path, start, start + len(raw), entry))
                    elif not tail:
                        broken += 1
                    start += len(raw)
                    if number % 1000 == 0:
                        beat()
            if tail:
                found.notes.append(f"{path.name} ended in half a line; its prompt counts as not decoded")
            if broken:
                found.notes.append(f"{path.name} has {broken} broken lines; their prompts count as not decoded")
        return found

    def error(self, line: int, found: Found) -> str:
        """What a line that failed says."""
        place = found.places[line]
        with place.part.open("rb") as file:
            file.seek(place.start)
            return f"line {line}: {json.loads(file.read(place.stop - place.start))['error']}"

    def restore(self, start: int) -> None:
        """The lines of a finished output are the first part of a new start."""
        with self.output.open("rb") as whole:
            replace_file(self.file(start, 0), lambda file: _copy(whole, file))

    def merge(self, places: dict[int, Place], beat: Callable[[], None]) -> None:
        """Write the output: all lines in the order of the input, at once."""

        def write(out: IO[bytes]) -> None:
            handles: dict[Path, IO[bytes]] = {}
            try:
                for number, line in enumerate(sorted(places)):
                    place = places[line]
                    if place.part not in handles:
                        if len(handles) >= 64:  # many starts of many ranks
                            handles.pop(next(iter(handles))).close()
                        handles[place.part] = place.part.open("rb")
                    handles[place.part].seek(place.start)
                    out.write(handles[place.part].read(place.stop - place.start))
                    if number % 1000 == 0:
                        beat()
            finally:
                for handle in handles.values():
                    handle.close()

        replace_file(self.output, write)

    def remove(self) -> None:
        """The parts, once they are no longer needed."""
        for path in (*self.files(), *self.folder.glob("*.partial")):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While one run has this output to itself. What is left of the folder is removed when it holds no part."""
        try:
            self.folder.mkdir(exist_ok=True)
            sync_folder(self.folder.parent)
            file = (self.folder / LOCK).open("ab")
        except OSError as reason:
            raise D5P4Error(f"{self.folder} cannot be made: {reason.strerror or reason}") from None
        with file:
            self._lock(file)
            try:
                yield
            finally:
                if not self.files():
                    with suppress(OSError):  # something of somebody else's is in it
                        for left in (*self.folder.glob(f"{WORD}*"), self.folder / LOCK):
                            left.unlink(missing_ok=True)
                        self.folder.rmdir()

    def _lock(self, file: IO[bytes]) -> None:
        taken = D5P4Error(f"another run is writing {self.output}; wait until it ends, or give another --output")
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return
        except OSError as reason:
            if reason.errno in BUSY:
                raise taken from None
            return  # a file system without locks
        try:
            same = os.path.samestat(os.stat(file.name), os.fstat(file.fileno()))
        except FileNotFoundError:
            same = False
        if not same:  # it ended in this moment and took its lock away
            raise taken


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(entry, dict) and isinstance(entry.get("line"), int) and isinstance(entry.get("answers"), list)
    return entry if whole else None


def _place(path: Path, start: int, stop: int, entry: dict[str, Any]) -> Place:
    failed = entry.get("error") is not None
    count, rows = (0, 0) if failed else (entry.get("distinct") or 0, entry.get("rows") or 0)
    return Place(path, start, stop, failed, count, len(entry["answers"]), rows)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while block := source.read(1 << 20):
        target.write(block)
