"""What the processes of these tests do. A fork server has this module ready, so that a process starts at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import d5p4
from d5p4.distributed import connect
from d5p4.distributed import folder as shared_folder
from d5p4.jobs import output as output_module
from d5p4.jobs import run as run_module
from tests.fake import FakeModel

SMALL: dict[str, Any] = dict(k=2, w=2, gen_length=4, temperature=1.3, seed=5, max_tokens_per_forward=32)
"""Of the model: a few prompts a batch."""

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__])


def prompts(count: int) -> list[dict[str, Any]]:
    """Prompts of many lengths, some equal, some with ids."""
    found = []
    for i in range(count):
        entry: dict[str, Any] = {"prompt": "abcdefgh"[i % 5 : i % 5 + 1 + i % 3] * (1 + i % 4), "level": i}
        found.append({"id": f"n{i}"} | entry if i % 3 == 0 else entry)
    return found


def entries(count: int = 60) -> list[dict[str, Any]]:
    """Many batches, and a line that fails."""
    return [*prompts(50), {"prompt": "zz"}, *prompts(count)[51:]]


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


class Slow(FakeModel):
    """Takes its time, so that a kill finds it at work."""

    pause = 0.003

    def body(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        time.sleep(self.pause)
        return super().body(tokens, attention_mask)


class Cramped(FakeModel):
    """Has room for so many tokens in a forward."""

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


def decode(folder: Path, rank: int, world: int, port: int, given: dict[str, Any]) -> None:
    """One rank of a run in `folder`; how it ended is in said-<rank>.txt."""
    torch.set_num_threads(1)
    options, home = dict(SMALL) | given, folder
    limit, mesh, timeout = options.pop("limit", None), options.pop("mesh", None), options.pop("timeout", 60)
    pause = options.pop("pause", 0.0)
    if options.pop("apart", False):  # as on hosts that share no file system
        folder = folder / str(rank)
        shared_folder.PATIENCE = 0.2
    if options.pop("stderr", False):  # what the watchdog says goes to a file too
        os.dup2(os.open(folder / f"stderr-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if options.pop("spelled", False):  # each rank has its own way to write the same place
        folder = folder.joinpath(*["..", folder.name] * rank)
    if world > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, free[1]))
    model: Any = Slow() if pause else FakeModel()
    if slow := options.pop("slow", 0.0):  # to load and to hash, as large models are
        run_module.load = lambda *given, **more: time.sleep(slow) or FakeModel()
        hashes = output_module.configuration
        output_module.configuration = lambda *given: time.sleep(slow) or hashes(*given)
        model = "slow"
    if pause:
        model.pause = pause
    try:
        ranks = connect(tuple(mesh) if mesh else None, timeout)
        report = d5p4.run_file(model, folder / "p.jsonl", folder / "a.jsonl", mesh=ranks, **options)
        ranks.close()
        code, said = 0, json.dumps(report.to_dict())
    except d5p4.D5P4Error as error:
        code, said = 2, str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    (home / f"said-{rank}.txt").write_text(said)
    sys.exit(code)


def start(folder: Path, world: int = 1, **given: Any) -> list[Any]:
    """The processes of one start."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    found = [processes.Process(target=decode, args=(folder, rank, world, port, given)) for rank in range(world)]
    for process in found:
        process.start()
    return found


def finish(started: list[Any], folder: Path) -> list[str]:
    """What each of them said; none is left behind."""
    for process in started:
        process.join(100)
        process.kill()
    return [(folder / f"said-{rank}.txt").read_text() for rank in range(len(started))]


def run(folder: Path, world: int = 1, **given: Any) -> bytes:
    """A start that ends well: the output."""
    started = start(folder, world, **given)
    said = finish(started, folder)
    assert [process.exitcode for process in started] == [0] * world, said
    return (folder / "a.jsonl").read_bytes()


def written(folder: Path) -> int:
    """Bytes in the parts."""
    found = 0
    for path in (folder / "a.jsonl.parts").glob("part-*"):
        with suppress(FileNotFoundError):  # it was the end
            found += path.stat().st_size
    return found


def kill_at_random(folder: Path, kills: int, seed: int, worlds: tuple[int, ...] = (1,)) -> None:
    """SIGKILL a rank of so many starts while they are at it, most of them after they have written something."""
    chance, useful, left = random.Random(seed), 0, kills
    while left:
        before = written(folder)
        processes = start(folder, chance.choice(worlds), pause=0.004)
        wait = chance.random() < 0.7
        while wait and written(folder) <= before and processes[0].is_alive():
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        assert all(process.exitcode is None for process in processes), "the file is too short for so many kills"
        for process in chance.sample(processes, len(processes)):  # torchrun kills the others when one has died
            process.kill()
            process.join()
        useful += written(folder) > before
        left -= 1
    assert useful > kills / 3
