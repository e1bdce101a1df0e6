"""Runs a program that a model wrote in a process of its own, with limits. This is no defence against an attacker.

The process has its own temporary folder, no environment, no network where `unshare` of util-linux may cut it off, and
limits on time, memory and the size of files. A container protects better.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

LIMITS = """import resource as r, runpy, sys
for kind, most in ((r.RLIMIT_CPU, {seconds}), (r.RLIMIT_AS, {memory}), (r.RLIMIT_FSIZE, 1 << 20), (r.RLIMIT_CORE, 0)):
    r.setrlimit(kind, (most, most))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@cache
def without_network() -> list[str]:
    """Return the words before a command that take the network away, or none if this machine does not allow it."""
    words = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


def passes(program: str, seconds: int = 5, memory: int = 1 << 30) -> bool:
    """Return whether a program runs to its last line without an error. `memory` is in bytes."""
    proof = secrets.token_hex(16)  # a program that ends early, by exit(0) too, does not print it
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(f"{program}\nprint({proof!r})\n", encoding="utf-8", errors="replace")
        limits = LIMITS.format(seconds=seconds, memory=memory)
        command = [*without_network(), sys.executable, "-I", "-c", limits, str(file)]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {}}
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, start_new_session=True, **quiet)
            try:
                code = process.wait(seconds + 1)
            except subprocess.TimeoutExpired:
                code = 1
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - 64))
            return code == 0 and output.read().rstrip().endswith(proof.encode())
