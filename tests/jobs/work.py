"""Helpers of the tests of whole files: inputs, models that fail, and the function that each process runs."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import d5p4
from d5p4.distributed import Mesh, connect
from d5p4.distributed import mesh as mesh_module
from tests.distributed import ranks
from tests.fake import FakeModel

SMALL: dict[str, Any] = dict(k=2, gen_length=4, temperature=1.3, seed=5, max_tokens_per_forward=16)
"""A batch has only a few prompts."""
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def prompts(count: int) -> list[dict[str, Any]]:
    """Prompts of many lengths, some equal, some with ids."""
    entries = []
    for i in range(count):
        entry: dict[str, Any] = {"prompt": "abcdefgh"[i % 5 : i % 5 + 1 + i % 3] * (1 + i % 4), "level": i}
        entries.append({"id": f"n{i}"} | entry if i % 3 == 0 else entry)
    return entries


def entries(count: int = 30) -> list[dict[str, Any]]:
    """Many batches, and a line that fails."""
    return [*prompts(20), {"prompt": "zz"}, *prompts(count)[21:]]


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


class Watched(FakeModel):
    """Waits for the other ranks at its first forward, so that a quick rank cannot take all the work.

    With a `marker`, the model then makes that file and stays in the forward until the process is killed.
    """

    def __init__(self, mesh: Mesh, marker: Path | None) -> None:
        super().__init__()
        self.mesh, self.marker = mesh, marker

    def body(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        if not self.rows_seen:
            self.mesh.meet()
            if self.marker is not None:
                self.marker.touch()
            while self.marker is not None:
                time.sleep(0.02)
        return super().body(tokens, attention_mask)


class Cramped(FakeModel):
    """Has memory for `room` tokens per forward."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.largest = room, 0

    def body(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        if tokens.numel() > self.room:
            raise torch.OutOfMemoryError("no room")
        self.largest = max(self.largest, tokens.numel())
        return super().body(tokens, attention_mask)


class Spoiled(FakeModel):
    """Gives NaN for rows that begin with certain tokens."""

    def __init__(self, *first: int) -> None:
        super().__init__()
        self.first = first

    def body(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden = super().body(tokens, attention_mask)
        start = torch.zeros(len(tokens), dtype=torch.int64)
        if attention_mask is not None:
            start = attention_mask.to(torch.int64).argmax(-1)
        wrong = torch.isin(tokens[torch.arange(len(tokens)), start], torch.tensor(self.first))
        hidden.states[wrong] = torch.nan
        return hidden


def decode_here(folder: Path, **options: Any) -> d5p4.jobs.Report:
    """A run in this process."""
    return d5p4.run_file(FakeModel(), folder / "p.jsonl", folder / "a.jsonl", **SMALL | options)


def stopped(run: Callable[..., Any], lines: int, *given: Any, **options: Any) -> None:
    """Stop a run when this number of lines is finished."""

    def stop(pace: d5p4.jobs.Pace) -> None:
        if pace.now >= lines:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(*given, progress=stop, **options)


def parts(output: Path) -> list[Path]:
    """The files of finished lines of an unfinished run."""
    return sorted(output.with_name(f"{output.name}.parts").glob("*.jsonl"))


def kept(output: Path) -> int:
    """How many finished lines of an unfinished run are on the disk."""
    return sum(path.read_bytes().count(b"\n") for path in parts(output))


@contextmanager
def no_file_above(size: int | None) -> Iterator[None]:
    """Simulate a full disk."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free[0] if size is None else size, free[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)


def die_at(step: int) -> None:
    """Kill this process when it opens, renames or removes files of the run for the `step`th time."""
    left = step

    def count(event: str, given: tuple[Any, ...]) -> None:
        nonlocal left
        if event in STEPS and "/a." in str(given[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def decode(
    place: Path,
    mesh: tuple[int, int] | None = None,
    timeout: float = 60,
    limit: int | None = None,  # bytes of a file
    meets: bool = False,  # every rank waits for the others at its first forward
    paused: int | None = None,  # the rank that stays in its first forward, after all have met there
    dies: tuple[int, int] | None = None,  # a rank, and the step it dies at
    apart: bool = False,  # each rank has its own folder, as on hosts that share no file system
    spelled: bool = False,  # each rank writes the path of the folder in another way
    **options: Any,
) -> dict[str, Any]:
    """One rank of a run in a folder. Returns the report and the rows that went through its model; prints an error."""
    connected = connect(mesh, timeout)
    rank = connected.rank
    model: Any = FakeModel()
    if meets or paused is not None:
        model = Watched(connected, place / "paused" if rank == paused else None)
    if apart:
        place, mesh_module.PATIENCE = place / str(rank), 0.2
    if spelled:
        place = place.joinpath(*["..", place.name] * rank)
    if dies is not None and dies[0] == rank:
        die_at(dies[1])
    try:
        with no_file_above(limit):
            given = model, place / "p.jsonl", place / "a.jsonl"
            report = d5p4.run_file(*given, mesh=connected, **SMALL | options)
        connected.close()
    except d5p4.D5P4Error as error:
        print(error, flush=True)
        sys.exit(2)
    return report.to_dict() | {"rows_here": model.rows_seen}


def start(folder: Path, world: int = 1, **given: Any) -> list[ranks.Rank]:
    """The processes of one start."""
    return ranks.start("tests.jobs.work:decode", world, folder / "ranks", place=folder, **given)


def run(folder: Path, world: int = 1, **given: Any) -> list[dict[str, Any]]:
    """A start that succeeds. Returns what each rank returns."""
    return ranks.results("tests.jobs.work:decode", world, folder / "ranks", place=folder, **given)


def until_paused(folder: Path, started: list[ranks.Rank]) -> None:
    """Wait until the rank to be paused has reached its first forward."""
    while not (folder / "paused").exists():
        assert any(rank.poll() is None for rank in started), [rank.output.read_text() for rank in started]
        time.sleep(0.01)
    (folder / "paused").unlink()
