"""Renders chat templates, which are foreign code, in a process that the system can end.

jinja2's sandbox keeps a template from reaching Python, but not from running forever or filling the memory: a loop in a
loop, a string times 10**9, a macro that calls itself. So `chat_process.py` renders all templates of this process, with
limits of the system on processor time and memory. It ends when this process ends.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import D5P4Error
from .checkpoint import refusing

SECONDS, MEMORY = 2, 2**29  # of processor time per text, and of address space in bytes
GROWTH, ROOM = 4, 2**20  # a text may have this many characters per character of the conversation, and this many more


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text that a template makes of its variables, which must be JSON values."""
    with refusing("a conversation should consist of JSON values"):
        given = json.dumps(variables)
    answer = _renderer(os.getpid()).ask(json.dumps([template, variables, ROOM + GROWTH * len(given)]) + "\n")
    if not answer:
        limits = f"{SECONDS} s of processor time and {MEMORY >> 20} MiB of memory"
        raise D5P4Error(f"the chat template was stopped, because it may use {limits}: use chat=False")
    text, error = json.loads(answer)
    if error is not None:
        raise D5P4Error(f"the chat template could not be rendered: {error}")
    return text


class Renderer:
    """The process, and the lock that makes threads wait for each other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def ask(self, line: str) -> str:
        """Send a line to the process and return its answer, which is empty if the process was ended."""
        with self.lock:
            process = self.process = self.process or subprocess.Popen(
                [sys.executable, "-S", Path(__file__).with_name("chat_process.py"), str(SECONDS), str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))},  # the same jinja2
            )
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


@lru_cache
def _renderer(process_id: int) -> Renderer:
    """The renderer of this process. A process that was forked starts its own."""
    return Renderer()
