"""Rows of an experiment: the sources that make rows, and the loop that makes the missing rows.

A row is a set of answers, the scores of a set, or anything else that an experiment measures. `fill` makes the missing
rows, batch by batch. Each batch is on the disk before the next one begins, so a stopped run continues where it stopped.
All ranks take keys from a common counter, batch by batch, so a slow rank takes fewer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5p4.distributed import Mesh, check_shared
from d5p4.errors import D5P4Error
from d5p4.jobs.rows import RowStore
from d5p4.store import json_line

if TYPE_CHECKING:
    from .setup import Setup

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Describes rows of one kind."""

    path: str  # relative to the folder of results; a `.xz` file is compressed, and is committed for drawing
    made_with: Mapping[str, Any]  # everything that the rows depend on; a file made with other values raises an error
    keys: Sequence[str]  # names of the rows, in order
    make: Callable[[Sequence[str]], Mapping[str, Row]]  # makes the rows of the given keys
    label: str  # the name of these rows in progress reports and errors
    together: Callable[[], int] = lambda: 1  # how many keys `make` gets per call
    shared: bool = False  # whether ranks share the keys; otherwise the first rank makes all rows
    elsewhere: Callable[[str], bool] = lambda key: False  # whether another file contains the numbers of this key's row
    early: bool = False  # whether the rows need data and a tokenizer, but no model; they are tried before decoding
    models: Sequence[str] = ()  # the names of the models that make the rows


class Rows(dict[str, Row]):
    """The rows of a source that are on the disk, by key."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.store = path, RowStore(path, header)
        super().__init__(self._stored())

    def _stored(self) -> dict[str, Row]:
        return {key: place.facts for key, place in self.store.read(_summarise).places.items()}

    def add(self, rows: Mapping[str, Mapping[str, Any]], start: int, rank: int = 0) -> None:
        """Write rows to the disk, with their keys. Call this method inside `with self.store.locked()`."""
        lines = {key: {"key": key, **row} for key, row in rows.items()}
        self.store.append(start, rank, [json_line(line) for line in lines.values()])
        self.update(lines)

    def fold(self) -> None:
        """Move the rows of all parts (the files that ranks write) into the main file, in the order of the keys."""
        if self.store.parts():
            self.update(self._stored())  # other ranks have written rows too
            self.store.write(json_line(self[key]) for key in sorted(self, key=_natural))
            self.store.remove_parts()


def _summarise(entry: Any) -> tuple[str, Row, bool] | None:
    return (entry["key"], entry, False) if isinstance(entry, dict) and isinstance(entry.get("key"), str) else None


def _natural(key: str) -> list[Any]:
    """A sort key that compares numbers inside names by value, so that "unit 9" comes before "unit 10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


def missing_keys(setup: Setup, source: Source) -> list[str]:
    rows = setup.rows(source)
    return [key for key in source.keys if key not in rows and not source.elsewhere(key)]


def fill(setup: Setup, sources: Sequence[Source], mesh: Mesh) -> bool:
    """Make the missing rows of the sources, and return whether any row was missing.

    All ranks must call this function together. Each rank writes its own parts, and the first rank merges them.
    """
    mesh.meet()  # wait for all ranks, because none may still read files when the first rank merges them
    with ExitStack() as locks:
        work = None
        if mesh.first:
            work = secrets.randbits(40), _plan(setup, sources, locks)
        start, missing = mesh.share(work)
        if not any(missing):
            return False
        check_shared(setup.root, mesh, "--out")
        todo = [(source, keys) for source, keys in zip(sources, missing, strict=True) if keys]
        _make_all(setup, todo, start, mesh)
        mesh.meet()
        if mesh.first:
            for source, _ in todo:
                setup.rows(source).fold()
        mesh.meet()
        return True


def _plan(setup: Setup, sources: Sequence[Source], locks: ExitStack) -> list[list[str]]:
    missing: list[list[str]] = []
    planned: dict[str, set[str]] = {}  # the missing keys of each file; cases with the same options share a file
    for source in sources:
        rows, others = setup.rows(source), planned.setdefault(source.path, set())
        if rows.store.folder.exists() and not others:
            with rows.store.locked():
                rows.fold()  # the parts that a killed run has left
        keys = [key for key in missing_keys(setup, source) if key not in others]
        if keys and not others:
            locks.enter_context(rows.store.locked())
        others.update(keys)
        missing.append(keys)
    return missing


def _make_all(setup: Setup, todo: Sequence[tuple[Source, list[str]]], start: int, mesh: Mesh) -> None:
    """Make the rows of the keys that this rank takes. The random number `start` names part files and counters."""
    total = sum(len(keys) for _, keys in todo)
    for number, (source, keys) in enumerate(todo):
        if not (source.shared or mesh.first):
            continue
        counter = f"{start}/{number}"
        size = source.together()
        while (left := len(keys) - mesh.count(counter)) > 0:
            if source.shared:  # take at most this rank's share of the keys
                size = min(size, -(-left // mesh.world))
            stop = mesh.count(counter, size)
            batch = keys[stop - size : stop]
            if not batch:
                break  # other ranks took the remaining keys
            share = mesh.count(f"{start}/done") / total
            setup.progress(share, f"{source.label}: {left} of {len(source.keys)} left")
            rows = source.make(batch)
            setup.rows(source).add(rows, start, mesh.rank)
            mesh.count(f"{start}/done", len(batch))
    setup.progress(1.0, "done")


def check_made(setup: Setup, source: Source, stage: str) -> None:
    if missing := missing_keys(setup, source):
        what = f"{setup.experiment.name}: {len(missing)} of {len(source.keys)} rows of {source.label!r} are missing"
        raise D5P4Error(f"{what}; run --stage {stage} ({setup.rows(source).path})")


def complete(setup: Setup, source: Source, stage: str = "decode") -> list[Row]:
    """Return all rows of a source, in the order of its keys. Raise an error if rows are missing."""
    check_made(setup, source, stage)
    rows = setup.rows(source)
    return [rows[key] for key in source.keys]
