"""Rows of an experiment: where they come from, and the loop that makes the missing rows.

A `Source` names rows by keys and makes some of them at a time: sets of answers, scores of those answers, or anything
else that an experiment measures. `fill` makes the missing rows, batch by batch. Each batch is on the disk before the
next batch begins, so a stopped run continues where it stopped, and a longer run adds only the new rows. Ranks share the
sources that are marked `shared`: they take keys from a common counter, as many as they can make in about `SECONDS`, so
a slow rank takes fewer.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d5p4.distributed import Mesh, at_work, check_shared
from d5p4.errors import D5P4Error
from d5p4.jobs.rows import RowStore, Summary
from d5p4.store import json_line

if TYPE_CHECKING:
    from .setup import Setup

Row = dict[str, Any]
SECONDS = 45.0  # how long one batch of a shared source should take
FULL = 4  # the first batch on a GPU fills this many forwards; one full forward keeps the GPU busy


@dataclass(frozen=True)
class Source:
    """What rows of one kind are called, where they are stored, and how they are made.

    path       the file, relative to the folder of results; `.xz` files are compressed, and committed for drawing
    made_with  everything that the rows depend on; a file made with other values is refused
    keys       names of the rows, in order
    make       makes the rows of the given keys and returns them by key
    label      the name of these rows in progress reports and errors
    together   how many keys `make` gets per call (if ranks share the source: in the first call)
    cost       the work per key, relative to other sources
    shared     whether ranks share the keys; otherwise the first rank makes all rows
    elsewhere  whether another file contains the numbers of the row with this key, so that the row need not be made
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


class Rows:
    """The rows of a source that are on the disk. They are read at the first use."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.store = RowStore(path, _summarise, header)

    @cached_property
    def by_key(self) -> dict[str, Row]:
        return {key: place.facts for key, place in self.store.read(with_output=True).places.items()}

    def __contains__(self, key: object) -> bool:
        return str(key) in self.by_key

    def __getitem__(self, key: object) -> Row:
        return self.by_key[str(key)]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, rows: Mapping[str, Mapping[str, Any]], start: int, rank: int = 0) -> None:
        """Write rows by their keys, and return when they are on the disk. Call this method inside `RowStore.locked`."""
        lines = {key: {"key": key, **row} for key, row in rows.items()}
        self.store.append(start, rank, [json_line(line) for line in lines.values()])
        self.by_key.update(lines)

    def fold(self) -> None:
        """Move the rows of all parts into the file, in the order of their keys."""
        if self.store.parts():
            self.__dict__.pop("by_key", None)  # other ranks have written too
            self.store.write(json_line(self.by_key[key]) for key in sorted(self.by_key, key=_natural))
            self.store.remove_parts()


def _summarise(entry: Any) -> Summary | None:
    return Summary(entry["key"], entry) if isinstance(entry, dict) and isinstance(entry.get("key"), str) else None


def _natural(key: str) -> list[Any]:
    """A sort key that puts "unit 9" before "unit 10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]


class _Work(NamedTuple):
    """The plan that the first rank makes for all ranks."""

    start: int  # a random number that identifies this run in parts and counters
    missing: list[list[str]]  # for each source, the keys of its missing rows
    seconds: float | None  # time until the deadline


def missing_keys(setup: Setup, source: Source) -> list[str]:
    rows = setup.rows(source)
    return [key for key in source.keys if key not in rows and not source.elsewhere(key)]


def fill(setup: Setup, sources: Sequence[Source], mesh: Mesh, deadline: float | None = None) -> tuple[bool, bool]:
    """Make the missing rows of some sources. Returns whether all rows exist now, and whether any was missing.

    All ranks of the mesh must call this together. The deadline is a time of `time.monotonic` on the first rank; no
    batch begins that would end later. Each rank writes its own parts; only the first rank merges them into the files.
    """
    work = None
    mesh.meet()  # no rank may still be reading files when the first rank merges them
    with ExitStack() as locks:
        if mesh.first:
            with at_work(mesh):
                work = _plan(setup, sources, deadline, locks)
        work = mesh.share(work)
        if not any(work.missing):
            return True, False
        check_shared(setup.root, mesh, "--out")
        finished = _make_all(setup, sources, work, mesh)
        mesh.meet()
        if mesh.first:
            with at_work(mesh):
                for source, keys in zip(sources, work.missing, strict=True):
                    if keys:
                        setup.rows(source).fold()
                finished = not any(missing_keys(setup, source) for source in sources)
        return mesh.share(finished), True


def _plan(setup: Setup, sources: Sequence[Source], deadline: float | None, locks: ExitStack) -> _Work:
    missing: list[list[str]] = []
    planned: dict[str, set[str]] = {}  # keys by path: cases with the same options share a file
    for source in sources:
        rows, others = setup.rows(source), planned.setdefault(source.path, set())
        if rows.store.folder.exists() and not others:  # parts of a run that was killed
            with rows.store.locked():
                rows.fold()
        keys = [key for key in missing_keys(setup, source) if key not in others]
        if keys and not others:
            locks.enter_context(rows.store.locked())
        others.update(keys)
        missing.append(keys)
    return _Work(secrets.randbits(40), missing, None if deadline is None else deadline - time.monotonic())


def _make_all(setup: Setup, sources: Sequence[Source], work: _Work, mesh: Mesh) -> bool:
    """Make the rows that this rank takes from the counters. Returns False if the deadline came first."""
    deadline = None if work.seconds is None else time.monotonic() + work.seconds
    todo = [(source, keys) for source, keys in zip(sources, work.missing, strict=True) if keys]
    with at_work(mesh):
        costs = [source.cost() for source, _ in todo]
    total = sum(cost * len(keys) for cost, (_, keys) in zip(costs, todo, strict=True))
    done, spent = 0.0, 0.0  # cost of the rows that this rank has made, and the seconds they took
    for number, (cost, (source, keys)) in enumerate(zip(costs, todo, strict=True)):
        if not (source.shared or mesh.first):
            continue
        counter = f"{work.start}/{number}"
        first = size = source.together()
        while (left := len(keys) - mesh.count(counter)) > 0:
            if mesh.world > 1 and source.shared:  # leave keys for other ranks, but keep the device busy
                size = min(size, max(first // FULL, -(-left // mesh.world)))
            expected = spent / done * cost * min(size, left) if done else 0.0
            if deadline is not None and time.monotonic() + expected > deadline:
                return False
            stop = mesh.count(counter, size)
            batch = keys[stop - size : stop]
            if not batch:
                break  # other ranks took the rest
            share = mesh.count(f"{work.start}/done") / 1e6
            setup.progress(share, f"{source.label}: {left} of {len(source.keys)} left")
            began = time.monotonic()
            if source.shared:
                rows = source.make(batch)
            else:
                with at_work(mesh):
                    rows = source.make(batch)
            setup.rows(source).add(rows, work.start, mesh.rank)
            seconds = time.monotonic() - began
            done, spent = done + cost * len(batch), spent + seconds
            mesh.count(f"{work.start}/done", round(1e6 * cost * len(batch) / total))
            if source.shared:
                size = max(1, min(4 * size, round(size * SECONDS / max(seconds, 1e-3))))
    setup.progress(1.0, "done")
    return True


def check_made(setup: Setup, source: Source, stage: str) -> None:
    """Raise an error that names the stage to run, if rows of a source are missing."""
    if missing := missing_keys(setup, source):
        what = f"{len(missing)} of {len(source.keys)} rows of {source.label!r}"
        path = setup.rows(source).path
        raise D5P4Error(f"{setup.experiment.name}: {what} are missing; run --stage {stage} ({path})")


def complete(setup: Setup, source: Source, stage: str = "decode") -> list[Row]:
    """All rows of a source, in the order of its keys. Raises an error if some are missing."""
    check_made(setup, source, stage)
    rows = setup.rows(source)
    return [rows[key] for key in source.keys]
