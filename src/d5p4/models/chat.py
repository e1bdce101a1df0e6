"""Renders the chat template of a checkpoint, which is foreign code, in a process that the system can end.

jinja2's sandbox keeps a template from reaching Python, but not from running forever or filling the memory: a loop in a
loop, a string times 10**9, a macro that calls itself. So one process per process renders all templates
(`chat_process.py`), under limits of the system on its processor time and memory. It ends when this process ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import D5P4Error

SECONDS, MEMORY = 2, 2**29  # of processor time per text, and of address space in bytes
GROWTH, ROOM = 4, 2**20  # a text may have this many characters per character of the conversation, and this many more


class Renderer:
    """The process, and the lock that makes threads wait for each other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template makes of its variables, which must be JSON values."""
        try:
            given = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as reason:
            raise D5P4Error(f"a conversation should consist of JSON values ({reason})") from reason
        answer = self.ask(json.dumps([template, variables, ROOM + GROWTH * len(given)]) + "\n")
        if not answer:
            limits = f"{SECONDS} s of processor time and {MEMORY >> 20} MiB of memory"
            raise D5P4Error(f"the chat template was stopped, because it may use {limits}: give chat=False")
        text, error = json.loads(answer)
        if error is not None:
            raise D5P4Error(f"the chat template could not be rendered: {error}")
        return text

    def ask(self, line: str) -> str:
        """Send a line to the process and return its answer, which is empty if the process was ended."""
        with self.lock:
            process = self.process = self.process or self.start()
            assert process.stdin is not None and process.stdout is not None
            answer = ""
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:  # after an interruption, the next answer would be that of this line
                if not answer:
                    self.process = None
                    process.kill()
                    process.communicate()
            return answer

    def start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("chat_process.py")
        path = os.pathsep.join(part for part in sys.path if os.path.isabs(part))  # so that it finds jinja2
        return subprocess.Popen(
            [sys.executable, "-S", str(script), str(SECONDS), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": path},
        )


_renderer = Renderer()


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text that a template makes of its variables, or raise an error that says why there is none."""
    return _renderer.render(template, variables)


def _forget() -> None:
    """Leave the process to the parent of a fork. The child starts its own."""
    global _renderer
    _renderer = Renderer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
