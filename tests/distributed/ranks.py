"""Real processes that talk by gloo: `start` runs a function of a test module in each, with torchrun's environment.

They come from a fork server that has torch ready, so that a start costs little.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import random
import socket
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

# CUDA does not survive a fork.
processes = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
processes.set_forkserver_preload(["tests.distributed.work", "tests.jobs.work"])  # one server for all who import this


def free_port() -> int:
    """A free port below those that the system hands out to clients, so that no client takes it meanwhile."""
    while True:
        with socket.socket() as s:
            port = random.SystemRandom().randrange(10_000, 32_000)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Rank(processes.Process):  # type: ignore[name-defined,misc]
    """One process with the methods of subprocess.Popen. Its output goes to folder/<rank>.txt."""

    def __init__(self, function: str, folder: Path, given: dict[str, Any], rank: int, world: int, port: int) -> None:
        super().__init__(daemon=True)
        self.function, self.given = function, given
        self.result, self.output = folder / f"{rank}.json", folder / f"{rank}.txt"
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        self.environment = {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}

    def run(self) -> None:
        os.environ.update(self.environment)
        handle = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        torch.set_num_threads(1)
        atexit._clear()
        module, _, name = self.function.partition(":")
        try:
            self.result.write_text(json.dumps(getattr(import_module(module), name)(**self.given)))
        finally:
            atexit._run_exitfuncs()  # as at the end of an interpreter, which a forked process does not see

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float = 100) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.function, timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def start(function: str, world: int, folder: Path, **given: Any) -> list[Rank]:
    """`world` processes that call `function` ("tests.module:name") with keyword arguments; each writes what it returns
    as JSON into folder/<rank>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    # The server's socket needs a short path, and TMPDIR may be long.
    before, tempfile.tempdir = tempfile.tempdir, "/tmp"
    multiprocessing.util.get_temp_dir()
    tempfile.tempdir = before
    port = free_port()
    ranks = [Rank(function, folder, given, rank, world, port) for rank in range(world)]
    for rank in ranks:
        rank.result.unlink(missing_ok=True)
        rank.start()
    return ranks


def finish(ranks: list[Rank], timeout: float = 100) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left behind."""
    try:
        return [(rank.wait(timeout), rank.output.read_text()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def results(function: str, world: int, folder: Path, **given: Any) -> list[Any]:
    """What the function returned in each rank; all must end well."""
    ranks = start(function, world, folder, **given)
    for rank, (code, output) in enumerate(finish(ranks)):
        assert code == 0, f"rank {rank} ended with {code}:\n{output}"
    return [json.loads(rank.result.read_text()) for rank in ranks]
