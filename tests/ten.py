"""The quick tests under ten different conditions: python -m tests.ten [--runs "2 7"] -- ARGUMENTS OF PYTEST

The runs combine temporary folders of 40, 72, 80 and 120 characters, terminals of 40, 80 and 200 columns, SIGINT ignored
(as under nohup), test files in shuffled order, and two busy loops that take CPU time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

LONGEST = 3600  # seconds per run; a run that hangs fails after them
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends when this process ends


class Run(NamedTuple):
    path: int  # length of the temporary folders' paths, in characters
    columns: int
    ignored: bool = False  # whether SIGINT is ignored
    seed: int | None = None  # shuffles the order of the test files
    busy: bool = False  # whether two busy loops run beside the tests


RUNS = (
    Run(40, 80),
    Run(72, 40, ignored=True),
    Run(80, 200, seed=3, busy=True),
    Run(120, 80, seed=4),
    Run(40, 40, ignored=True, seed=5),
    Run(72, 200, seed=6),
    Run(80, 40, seed=7),
    Run(120, 200, ignored=True, busy=True),
    Run(72, 80, seed=9),
    Run(120, 40, ignored=True, seed=10),
)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def folder_of(root: Path, name: str, characters: int) -> Path:
    """A new folder whose path has this many characters."""
    path = Path(f"{root}/{name}".ljust(characters, "x"))
    assert len(str(path)) == characters, f"{root} is too long for a path of {characters} characters"
    path.mkdir()
    return path


def attempt(run: Run, root: Path, log: Path, arguments: list[str]) -> int:
    """Run pytest, end all its processes, and return its exit code."""
    base, temporary = (folder_of(root, name, run.path) for name in ("b", "t"))
    environment = os.environ | {"TMPDIR": str(temporary), "COLUMNS": str(run.columns)}
    environment |= {} if run.seed is None else {"SHUFFLE_FILES": str(run.seed)}
    command = [sys.executable, "-m", "pytest", *arguments, f"--basetemp={base}"]
    action = signal.SIG_IGN if run.ignored else signal.SIG_DFL
    with log.open("wb") as file, busy_loops(2 * run.busy):
        pytest = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, action),
        )
        try:
            return pytest.wait(LONGEST)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
            for folder in (base, temporary):
                shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ten", description=__doc__)
    parser.add_argument("--runs", default="", help='numbers of runs, such as "2 7"; all by default')
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    numbers = [int(word) for word in given.runs.split()] or list(range(1, len(RUNS) + 1))
    if wrong := [number for number in numbers if not 1 <= number <= len(RUNS)]:
        parser.error(f"there is no run {wrong[0]}; runs are numbered 1 to {len(RUNS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with SIGINT ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root, failed = Path(tempfile.mkdtemp(prefix="ten-", dir="/tmp")), 0
    try:
        for number in numbers:
            run, log, began = RUNS[number - 1], root / f"run-{number}.log", time.monotonic()
            code = attempt(run, root, log, given.arguments)
            lines = log.read_text(errors="replace").splitlines()
            counts = re.findall(r"\d+ (?:passed|failed|errors?|xfailed|skipped)", lines[-1] if lines else "")
            outcome = ", ".join(counts) or f"pytest ended with {code}"
            print(f"{number} of {len(RUNS)}: {run}: {outcome} in {time.monotonic() - began:.0f} s", flush=True)
            if code:
                failed += 1
                names = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
                print(*names, f"see {log}", sep="\n", flush=True)
    finally:
        if not failed:
            shutil.rmtree(root)
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
