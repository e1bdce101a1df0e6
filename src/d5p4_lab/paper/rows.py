"""Rows of an experiment: the sources that make rows, and the loop that makes the missing rows.

A row is a set of answers, the scores of a set, or anything else that an experiment measures. `fill` makes the missing
rows, batch by batch. Each batch is on the disk before the next one begins, so a stopped run continues where it stopped.
All ranks take keys from a common counter, as many as they can make in about `SECONDS`, so a slow rank takes fewer.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5p4.distributed import Mesh, at_work, check_shared
from d5p4.errors import D5P4Error
from d5p4.jobs.rows import RowStore
from d5p4.store import json_line

if TYPE_CHECKING:
    from .setup import Setup

Row = dict[str, Any]
SECONDS = 45.0  # a batch of a shared source should take about this many seconds
FULL = 4  # on a GPU, the first batch fills 4 forwards, so a quarter of that batch keeps the GPU busy


@dataclass(frozen=True)
class Source:
    """Describes rows of one kind.

    path       the file, relative to the folder of results; a `.xz` file is compressed, and is committed for drawing
    made_with  everything that the rows depend on; a file made with other values raises an error
    keys       names of the rows, in order
    make       makes the rows of the given keys and returns them by key
    label      the name of these rows in progress reports and errors
    together   returns how many keys `make` gets per call (if ranks share the source: only in the first call)
    cost       returns the work per key, relative to other sources
    shared     whether ranks share the keys; otherwise the first rank makes all rows
    elsewhere  returns whether the row of a key need not be made, because another file contains the row's numbers
    early      whether the rows need data and a tokenizer, but no model; such rows are tried before anything is decoded
    tokens     for each model that makes a row: the number of tokens that go through this model (for estimates)
    seconds    other seconds per row on one CPU thread (for estimates)
    """

    path: str
    made_with: Mapping[str, Any]
    keys: Sequence[str]
    make: Callable[[Sequence[str]], Mapping[str, Row]]
    label: str
    together: Callable[[], int] = lambda: 1
    cost: Callable[[], float] = lambda: 1.0
    shared: bool = False
    elsewhere: Callable[[str], bool] = lambda key: False
    early: bool = False
    tokens: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Rows:
    """The rows of a source that are on the disk. The file is read at the first use."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.store = RowStore(path, header)

    @cached_property
    def by_key(self) -> dict[str, Row]:
        return {key: place.facts for key, place in self.store.read(_summarise).places.items()}

    def __contains__(self, key: object) -> bool:
        return str(key) in self.by_key

    def __getitem__(self, key: object) -> Row:
        return self.by_key[str(key)]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, rows: Mapping[str, Mapping[str, Any]], start: int, rank: int = 0) -> None:
        """Write rows to the disk, with their keys. Call this method inside `with self.store.locked()`."""
        lines = {key: {"key": key, **row} for key, row in rows.items()}
        self.store.append(start, rank, [json_line(line) for line in lines.values()])
        self.by_key.update(lines)

    def fold(self) -> None:
        """Move the rows of all parts (the files that ranks write) into the main file, in the order of the keys."""
        if self.store.parts():
            self.__dict__.pop("by_key", None)  # forget the rows that were read: other ranks have written rows too
            self.store.write(json_line(self.by_key[key]) for key in sorted(self.by_key, key=_natural))
            self.store.remove_parts()


def _summarise(entry: Any) -> tuple[str, Row, bool] | None:
    return (entry["key"], entry, False) if isinstance(entry, dict) and isinstance(entry.get("key"), str) else None


def _natural(key: str) -> list[Any]:
    """A sort key that compares numbers inside names by value, so that "unit 9" comes before "unit 10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


def missing_keys(setup: Setup, source: Source) -> list[str]:
    rows = setup.rows(source)
    return [key for key in source.keys if key not in rows and not source.elsewhere(key)]


def fill(setup: Setup, sources: Sequence[Source], mesh: Mesh, deadline: float | None = None) -> tuple[bool, bool]:
    """Make the missing rows of the sources. Return whether all rows exist now, and whether any row was missing before.

    All ranks must call this function together. No batch begins that would end after the deadline, a time of
    `time.monotonic` on the first rank. Each rank writes its own parts, and the first rank merges them.
    """
    mesh.meet()  # wait for all ranks, because none may still read files when the first rank merges them
    with ExitStack() as locks:
        work = None
        if mesh.first:
            with at_work(mesh):
                seconds = None if deadline is None else deadline - time.monotonic()
                work = secrets.randbits(40), _plan(setup, sources, locks), seconds
        start, missing, seconds = mesh.share(work)
        if not any(missing):
            return True, False
        check_shared(setup.root, mesh, "--out")
        deadline = None if seconds is None else time.monotonic() + seconds
        todo = [(source, keys) for source, keys in zip(sources, missing, strict=True) if keys]
        finished = _make_all(setup, todo, start, mesh, deadline)
        mesh.meet()
        if mesh.first:
            with at_work(mesh):
                for source, _ in todo:
                    setup.rows(source).fold()
                finished = not any(missing_keys(setup, source) for source in sources)
        return mesh.share(finished), True


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


def _make_all(
    setup: Setup, todo: Sequence[tuple[Source, list[str]]], start: int, mesh: Mesh, deadline: float | None
) -> bool:
    """Make the rows of the keys that this rank takes from the counters. Return False if the deadline ended the work.

    `start` is a random number that names this run in the names of part files and counters.
    """
    with at_work(mesh):
        costs = [source.cost() for source, _ in todo]
    total = sum(cost * len(keys) for cost, (_, keys) in zip(costs, todo, strict=True))
    done, spent = 0.0, 0.0  # the cost of the rows that this rank has made, and the seconds that it spent on them
    for number, (cost, (source, keys)) in enumerate(zip(costs, todo, strict=True)):
        if not (source.shared or mesh.first):
            continue
        counter = f"{start}/{number}"
        first = size = source.together()
        while (left := len(keys) - mesh.count(counter)) > 0:
            if mesh.world > 1 and source.shared:  # take at most this rank's share of the keys, but fill a forward
                size = min(size, max(first // FULL, -(-left // mesh.world)))
            expected = spent / done * cost * min(size, left) if done else 0.0
            if deadline is not None and time.monotonic() + expected > deadline:
                return False
            stop = mesh.count(counter, size)
            batch = keys[stop - size : stop]
            if not batch:
                break  # other ranks took the remaining keys
            share = mesh.count(f"{start}/done") / 1e6
            setup.progress(share, f"{source.label}: {left} of {len(source.keys)} left")
            began = time.monotonic()
            with nullcontext() if source.shared else at_work(mesh):
                rows = source.make(batch)
            setup.rows(source).add(rows, start, mesh.rank)
            seconds = time.monotonic() - began
            done, spent = done + cost * len(batch), spent + seconds
            mesh.count(f"{start}/done", round(1e6 * cost * len(batch) / total))
            if source.shared:
                size = max(1, min(4 * size, round(size * SECONDS / max(seconds, 1e-3))))
    setup.progress(1.0, "done")
    return True


def check_made(setup: Setup, source: Source, stage: str) -> None:
    if missing := missing_keys(setup, source):
        what = f"{setup.experiment.name}: {len(missing)} of {len(source.keys)} rows of {source.label!r} are missing"
        raise D5P4Error(f"{what}; run --stage {stage} ({setup.rows(source).path})")


def complete(setup: Setup, source: Source, stage: str = "decode") -> list[Row]:
    """Return all rows of a source, in the order of its keys. Raise an error if rows are missing."""
    check_made(setup, source, stage)
    rows = setup.rows(source)
    return [rows[key] for key in source.keys]
