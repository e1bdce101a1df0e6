"""The output of a run as the first rank keeps it: its beginning, and its end out of the parts.

The end has four steps: all lines into the output, the header says finished, the parts go, their folder goes. Whichever
was the last to happen, the same command finds its way from there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..distributed import Mesh
from ..errors import D5P4Error
from ..generate import chosen_seed
from ..prompts import Prepared
from .done import Done
from .header import Header, changes, configuration, facts, settings_hash
from .reader import PromptFile
from .report import Pace, Report
from .rows import Found, Place, RowStore, Summary


class Facts(NamedTuple):
    """What the report wants to know of a line."""

    distinct: int
    answers: int
    rows: int


def summarise(entry: Any) -> Summary | None:
    """A line of the output by its number in the input."""
    whole = isinstance(entry, dict) and isinstance(entry.get("line"), int) and isinstance(entry.get("answers"), list)
    if not whole:
        return None
    failed = entry.get("error") is not None
    distinct, rows = (0, 0) if failed else (entry.get("distinct") or 0, entry.get("rows") or 0)
    return Summary(entry["line"], Facts(distinct, len(entry["answers"]), rows), failed)


def _error(line: int, found: Found) -> str:
    """What a line that failed says."""
    place: Place = found.places[line]
    with place.path.open("rb") as file:
        file.seek(place.start)
        return f"line {line}: {json.loads(file.read(place.stop - place.start))['error']}"


@dataclass(frozen=True)
class Start:
    """What the first rank finds out for all."""

    number: int
    seed: int
    settings: str  # the hash of the configuration
    digest: str  # of the input
    token: str  # names what the ranks count in this start
    finished: Done = Done()  # lines
    answered: int = 0  # of them with answers
    report: Report | None = None  # there was nothing left to do


class Output:
    """The output, its header and its parts, in the hands of one process (`RowStore.locked`)."""

    def __init__(self, store: RowStore, file: PromptFile, mesh: Mesh) -> None:
        self.store, self.file, self.mesh, self.path = store, file, mesh, store.output
        self.header = Header(self.path)
        self.notes: list[str] = []

    def begin(self, prepared: Prepared, seed: int | None, retry_errors: bool) -> Start:
        """Look at what there is, and write down that this start goes on with it."""
        self._check_ours()
        seed = chosen_seed(self.header.seed if seed is None else seed)
        configured = configuration(prepared, self.file, seed)
        number = 1 + max(len(self.header.starts), self.store.last_start())
        start = Start(number, seed, settings_hash(configured), self.file.digest, secrets.token_hex(8))
        found = self.store.read(self.mesh.beat)
        if self.header.finished or found.answered:
            self.header.check(configured)
        elif found.places:  # nothing but failures: there is nothing that could be spoiled, or worth keeping
            self.store.remove_parts()
            found = Found()
        if self.header.finished:
            self.header.check_output()
            report = Report.from_dict(self.header.data["report"])
            if not (retry_errors and report.failed):
                self.store.remove_parts()
                return replace(start, report=report.nothing_left())
            self.store.restore(number)
            found = self.store.read(self.mesh.beat)
        with writing(self.path):
            mesh = (self.mesh.data, self.mesh.beam)
            self.header.begin(configured, prepared.model.name, number, facts(prepared, self.mesh.world, mesh))
        self.notes += found.notes
        return replace(start, finished=Done(self.file.last, found.finished(retry_errors)), answered=found.answered)

    def end(self, start: Start, pace: Pace, memory: list[int]) -> Report:
        """Merge the parts. `memory`: token budgets that were too large."""
        self.file.check_unchanged()
        found = self.store.read(self.mesh.beat)
        if len(found.places) != self.file.count:
            raise D5P4Error(
                f"{self.store.folder} holds {len(found.places)} of {self.file.count} lines, though every rank has "
                "finished; run the same command again"
            )
        if not found.answered:
            raise D5P4Error(
                f"all prompts of {self.file.path} failed, so the run is not finished; the first: "
                f"{_error(min(found.places), found)}"
            )
        failed = len(found.places) - found.answered
        facts = [place.facts for place in found.places.values()]
        answers = sum(each.answers for each in facts)
        notes = [*self.notes, *changes(self.header.starts)]
        notes += [f"out of memory with a budget of {size} tokens; went on with half of it" for size in memory]
        if failed:
            who, whose = ("1 prompt", "its line says") if failed == 1 else (f"{failed} prompts", "their lines say")
            notes.append(f"{who} failed: {whose} why, and --retry-errors decodes again what failed")
        report = Report(
            prompts=self.file.count,
            now=self.file.count - pace.before,
            before=pace.before,
            failed=failed,
            distinct=round(sum(each.distinct for each in facts) / answers, 6) if answers else None,
            rows=sum(each.rows for each in facts),
            seconds=round(pace.seconds, 3),
            prompts_per_second=round(pace.prompts_per_second, 3),
            rows_per_second=round(pace.rows_per_second, 3),
            seed=start.seed,
            settings=start.settings,
            notes=tuple(notes),
        )
        with writing(self.path):
            self.store.write(self.store.raw_rows(found.places, self.mesh.beat))
            self.header.end(report.to_dict())
            self.store.remove_parts()
        return report

    def _check_ours(self) -> None:
        """Nothing that another program made is touched."""
        if self.header.exists:
            return
        name = self.header.path.name
        if self.path.exists():
            raise D5P4Error(
                f"{self.path} exists and was not made by d5p4 run (there is no {name}); move it away, or give another "
                "--output"
            )
        if self.store.parts():
            raise D5P4Error(
                f"{self.store.folder} holds lines of a run whose {name} is gone; bring that back, or move the folder "
                "away"
            )


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What the system says when a disk is full, as a sentence."""
    try:
        yield
    except OSError as reason:
        raise D5P4Error(
            f"{place} cannot be written: {reason.strerror or reason}; what is finished is kept: free some space and "
            "run the same command again"
        ) from reason
