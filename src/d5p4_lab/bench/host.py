"""Compare the time per step of this checkout with that of an earlier commit, on one thread of the CPU.

    python -m d5p4_lab bench host [--before COMMIT] [--times 20]

Two processes decode in turn, so that other work on the machine slows down both. Times are medians of CPU time, which
does not count waiting.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from statistics import median
from typing import Any

from . import CHECKOUT, make_parser, show

CASES: list[dict[str, Any]] = [
    dict(k=4),
    dict(method="d5p4", k=3, w=3, temperature=1),
    dict(method="independent", k=4, temperature=1),
]
WORK = """
import json, sys, time, warnings, torch, d5p4
warnings.simplefilter("ignore")
torch.set_num_threads(1)
model, prompts = d5p4.load("countdown", "cpu"), ["86,28,13,31:96", "3,7,25:82"]
for line in sys.stdin:
    began = time.process_time()
    result = d5p4.generate(model, prompts, seed=5, **json.loads(line))
    print(1e3 * (time.process_time() - began) / int(result.nfe.max()), flush=True)
"""


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("host", __doc__, device=False)
    parser.add_argument("--before", default="60f5db74", help="the earlier commit")
    parser.add_argument("--times", type=int, default=20, help="decodes per case and version")
    given, pipe = parser.parse_args(arguments), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, given.before], cwd=CHECKOUT, check=True)
        places = [os.environ | {"PYTHONPATH": f"{place}/src", "OMP_NUM_THREADS": "1"} for place in (folder, CHECKOUT)]
        workers = [subprocess.Popen([sys.executable, "-c", WORK], env=place, **pipe) for place in places]  # type: ignore

        def milliseconds(worker: Any, case: dict[str, Any]) -> float:
            print(json.dumps(case), file=worker.stdin, flush=True)
            return float(worker.stdout.readline())

        for case in CASES:
            times = [[milliseconds(worker, case) for worker in workers] for _ in range(given.times + 2)][2:]
            before, now = map(median, zip(*times, strict=True))
            show({"case": case.get("method", "tree"), "before_ms": before, "now_ms": now, "change": now / before - 1})
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=CHECKOUT, check=True)
