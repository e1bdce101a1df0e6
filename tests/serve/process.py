"""A server in a process of its own: the command `d5p4 serve`, or a script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import d5p4
from tests.serve.running import direct, until


class Process:
    def __init__(self, *arguments: object) -> None:
        variables = {"PYTHONPATH": str(Path(d5p4.__file__).parents[1]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.run = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.run.stderr is not None
        for line in self.run.stderr:
            self.lines.append(line)

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        return until(lambda: self.run.poll() is not None or re.search(r"playground  (\S+)/\n", self.stderr), 60)[1]

    def client(self, **options: Any) -> httpx.Client:
        return direct(base_url=self.url, **options)

    def ready(self) -> httpx.Client:
        """A client of the server, when the model is loaded."""
        client = self.client()

        def loaded() -> bool:
            assert self.run.poll() is None, self.stderr
            try:
                return client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(loaded, 60)
        return client

    def end(self, seconds: float = 60.0) -> int:
        """Its exit code."""
        code = self.run.wait(seconds)
        self._reader.join(60)
        return code

    def memory(self) -> int:
        """Megabytes that are resident."""
        text = Path(f"/proc/{self.run.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) >> 10  # type: ignore[index]

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.run.pid}/task"))


@contextmanager
def process(*arguments: object, command: tuple[object, ...] = ("-m", "d5p4", "serve")) -> Iterator[Process]:
    started = Process(*command, *arguments)
    try:
        yield started
    finally:
        if started.run.poll() is None:
            started.run.kill()
        started.end()
