"""The quick tests under ten different conditions: python -m tests.ten [--runs "2 7"] -- ARGUMENTS OF PYTEST

The runs combine temporary folders of 40, 72, 80 and 120 characters, terminals of 40, 80 and 200 columns, SIGINT ignored
(as under nohup), test files in shuffled order, and two busy loops that take CPU time.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends when this process ends


class Run(NamedTuple):
    path: int  # length of the temporary folders' paths, in characters
    columns: int
    ignored: bool = False  # whether SIGINT is ignored
    seed: int = 0  # if not 0: shuffles the order of the test files
    busy: bool = False  # whether two busy loops run beside the tests


RUNS = [Run(40, 80), Run(72, 40, True), Run(80, 200, False, 3, True), Run(120, 80, False, 4), Run(40, 40, True, 5)]
RUNS += [Run(72, 200, False, 6), Run(80, 40, False, 7), Run(120, 200, True, 0, True), Run(72, 80, False, 9)]
RUNS += [Run(120, 40, True, 10)]


def passes(run: Run, arguments: list[str]) -> bool:
    print(run, flush=True)
    with tempfile.TemporaryDirectory(prefix="ten-", dir="/tmp", ignore_cleanup_errors=True) as root:
        base, temporary = (Path(f"{root}/{name}".ljust(run.path, "x")) for name in "bt")
        temporary.mkdir()
        environment = os.environ | {"TMPDIR": str(temporary), "COLUMNS": str(run.columns)}
        environment |= {"SHUFFLE_FILES": str(run.seed)} if run.seed else {}
        loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * run.busy)]
        try:
            # pytest inherits that the signal is ignored
            signal.signal(signal.SIGINT, signal.SIG_IGN if run.ignored else signal.default_int_handler)
            command = [sys.executable, "-m", "pytest", *arguments, f"--basetemp={base}"]
            return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode == 0
        finally:
            for loop in loops:
                loop.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.ten", description=__doc__)
    parser.add_argument("--runs", default="", help='numbers of runs, such as "2 7"; all by default')
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    numbers = list(map(int, given.runs.split())) or range(1, len(RUNS) + 1)
    failed = [number for number in numbers if not passes(RUNS[number - 1], given.arguments)]
    sys.exit(f"failed: {failed} of the runs {list(numbers)}" if failed else 0)
