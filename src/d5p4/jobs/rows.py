"""A store of rows, which are JSON lines. Many ranks may write rows, and a run may be started several times (each time
is a *start*). If a run is killed, no finished row is damaged.

Each rank of each start appends to its own part, `OUT.parts/part-<start>-<rank>.jsonl`. At the end the parts are merged
into the output OUT, and no part is removed before OUT is complete. The row of a line that a kill cut off is missing.
Rows may be added to a finished OUT: its rows are read first, and then those of the new parts. A store with a header
writes it as the first line of every file, and refuses files that have another one. An OUT named `.xz` is compressed.
"""

import errno
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..distributed.mesh import WORD
from ..errors import D5P4Error
from ..store import append, json_line, replace_file, sync_folder

LOCK = "lock"
BUSY = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


Summarise = Callable[[Any], "tuple[Any, Any, bool] | None"]
"""A function that turns a parsed line into the key of its row, the facts that are kept in memory, and whether the row
failed (then a later row with the same key replaces it). It returns None if the line is not a complete row."""


class Place(NamedTuple):
    """The file and the bytes of a row, its facts, and whether it failed."""

    path: Path
    start: int
    stop: int
    facts: Any
    failed: bool


@dataclass
class StoredRows:
    """The places of all complete rows, by their keys, and notes about broken lines."""

    places: dict[Any, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return sum(not place.failed for place in self.places.values())


class RowStore:
    """The rows of one output, the file that holds all rows at the end.

    The header has the settings with which all rows were made. It is None if the files have no header.
    """

    def __init__(self, output: Path, header: Mapping[str, Any] | None = None) -> None:
        self.output, self.header = output, None if header is None else json.loads(json.dumps(header))
        self.folder = output.with_name(output.name + ".parts")

    def parts(self) -> list[Path]:
        """Return the paths of all parts, ordered by start and then by rank."""
        return sorted(self.folder.glob("part-*.jsonl"))

    def append(self, start: int, rank: int, lines: Iterable[bytes]) -> None:
        """Add lines to a part. The lines are on the disk when this method returns."""
        path = self.folder / f"part-{start:04d}-{rank:04d}.jsonl"
        append(path, [*([] if path.exists() else self._head()), *lines])

    def _head(self) -> list[bytes]:
        return [] if self.header is None else [json_line({"header": self.header})]

    def read(self, summarise: Summarise) -> StoredRows:
        rows = StoredRows()
        for path in [self.output] * self.output.exists() + self.parts():
            try:
                self._read_file(path, rows, summarise)
            except (OSError, lzma.LZMAError, EOFError) as reason:
                fact = getattr(reason, "strerror", None) or reason
                raise D5P4Error(
                    f"{path} cannot be read ({fact}); replace it by an intact copy, or move it away"
                ) from None
        return rows

    def _read_file(self, path: Path, rows: StoredRows, summarise: Summarise) -> None:
        broken, half, start = 0, False, 0
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            for number, raw in enumerate(file):
                half, entry = not raw.endswith(b"\n"), None
                if not half:
                    with suppress(ValueError, RecursionError):
                        entry = json.loads(raw)
                if self.header is not None and number == 0:
                    if not half:  # after a kill, the file may have half a header and no rows
                        self._check_header(path, entry)
                elif entry is None or (row := summarise(entry)) is None:
                    broken += not half
                elif row[0] not in rows.places or rows.places[row[0]].failed:
                    rows.places[row[0]] = Place(path, start, start + len(raw), *row[1:])
                start += len(raw)
        if half:
            rows.notes.append(f"{path.name} ended in half a line; the row of that line counts as missing")
        if broken:
            which = "1 broken line; its row counts" if broken == 1 else f"{broken} broken lines; their rows count"
            rows.notes.append(f"{path.name} has {which} as missing")

    def _check_header(self, path: Path, entry: Any) -> None:
        made_with = entry.get("header") if isinstance(entry, dict) else None
        if not isinstance(made_with, dict):
            raise D5P4Error(f"{path} is not a file of rows (its first line has no header); move the file away")
        if changed := differences(made_with, self.header or {}):
            raise D5P4Error(f"{path} was made with other settings: {'; '.join(changed)}; give another --out")

    def raw_rows(self, places: Mapping[Any, Place]) -> Iterator[bytes]:
        """Yield the stored lines of the rows unchanged, in the order of the keys."""
        with ExitStack() as files:
            handles: dict[Path, IO[bytes]] = {}
            for _, place in sorted(places.items()):
                if place.path not in handles:
                    if len(handles) >= 64:  # there can be more parts than a process may open
                        files.close()
                        handles.clear()
                    handles[place.path] = files.enter_context(place.path.open("rb"))
                handles[place.path].seek(place.start)
                yield handles[place.path].read(place.stop - place.start)

    def write(self, lines: Iterable[bytes]) -> None:
        """Replace the whole output by these lines at once. The parts stay until `remove_parts` is called."""

        def write_all(file: IO[bytes]) -> None:
            packed = self.output.suffix == ".xz"
            with lzma.open(file, "wb", preset=9 | lzma.PRESET_EXTREME) if packed else nullcontext(file) as target:
                target.writelines(chain(self._head(), lines))

        replace_file(self.output, write_all)

    def remove_parts(self) -> None:
        """Remove all parts, and also temporary files that a killed process has left in the folder of the parts."""
        for path in (*self.parts(), *self.folder.glob("*.partial")):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output against other runs. After the `with` block, remove the folder of parts if no part is left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
            file = (self.folder / LOCK).open("ab")
        except OSError as reason:
            raise D5P4Error(f"the folder {self.folder} cannot be created: {reason.strerror or reason}") from None
        with file:
            self._lock(file)
            try:
                yield
            finally:
                if not self.parts():
                    with suppress(OSError):  # removing the folder fails if it holds other files
                        for left in (*self.folder.glob(f"{WORD}*"), self.folder / LOCK):
                            left.unlink(missing_ok=True)
                        self.folder.rmdir()

    def _lock(self, file: IO[bytes]) -> None:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
                    return
            # Otherwise the other run removed this lock file when it ended, so our lock protects nothing.
        except ImportError:
            return
        except OSError as reason:
            if reason.errno not in BUSY:
                return  # this file system does not support locks
        raise D5P4Error(f"another run is writing {self.output}; wait until it ends, or give another output")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare two configurations. Return one phrase, `NAME was A and is B`, for each value that differs."""
    old, new = dict(_flat(before)), dict(_flat(now))
    names = [name for name in old | new if old.get(name) != new.get(name)]
    return [f"{name} was {_short(old.get(name))} and is {_short(new.get(name))}" for name in names]


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{before}{name}.")
        else:
            yield before + name, item


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:12] + "…" + '"' * text.startswith('"')
