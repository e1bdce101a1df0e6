"""Compare the time and the calls of a decode step between two versions of the library.

    git worktree add /tmp/before COMMIT
    python -m d5p4_lab bench steps --before /tmp/before/src [--device cuda] [--rounds 5]

Both versions decode the same puzzles with the model `countdown` under the fixed schedule, k = 4, w = 4, with the solver
`local-search`, alternately, in processes of their own. A figure is the best time per step of all rounds: on a
small model a step is bound by the host. `calls` counts the calls in a step from one file of the library to another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import d5p4
from d5p4.models.load import find

from . import make_parser, markdown

PROGRAM = """
import json, sys, time, warnings
import torch
import d5p4

folder, device, prompts, repeats = json.loads(sys.argv[1])
torch.set_num_threads(1)
warnings.simplefilter("ignore")
model = d5p4.load(folder, device)
puzzles = [f"{a},{b},{c},{d}:{t}" for a, b, c, d, t in (
    (2 + i % 97, 3 + i % 89, 5 + i % 83, 7 + i % 79, 10 + i % 90) for i in range(prompts))]


def decode(callback=None):
    options = dict(seed=0, method="d5p4", solver="local-search", max_tokens_per_forward=1 << 18)
    return d5p4.generate(model, puzzles, callback=callback, **options)


result, times = decode(), []
for _ in range(repeats):
    start = time.perf_counter()
    decode()
    if device == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
calls, seen = 0, []


def count(frame, event, argument):
    global calls
    if event == "call" and frame.f_back is not None:
        callee, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        calls += callee != caller and "d5p4" in callee and "d5p4" in caller


def at(shot):
    seen.append(calls)


sys.setprofile(count)
decode(at)
sys.setprofile(None)
steps = int(result.nfe.max())
texts = sorted(text for texts in result.texts for text in texts)
print(json.dumps({"ms": 1000 * min(times) / steps, "calls": seen[steps // 2 + 1] - seen[steps // 2], "texts": texts}))
"""


def main(words: Sequence[str]) -> None:
    parser = make_parser("steps", __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--before", type=Path, required=True, help="the folder `src` of the other version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", default="1,256", help="numbers of prompts, separated by commas")
    arguments = parser.parse_args(words)
    folder, after = str(find("countdown")), str(Path(d5p4.__file__).parent.parent)
    rows = []
    for prompts in map(int, arguments.prompts.split(",")):
        times: dict[str, list[float]] = {"before": [], "after": []}
        facts: dict[str, dict[str, Any]] = {}
        for _ in range(arguments.rounds):
            for name, source in (("before", str(arguments.before)), ("after", after)):
                given = json.dumps([folder, str(arguments.device), prompts, 3 if prompts == 1 else 1])
                environment = os.environ | {"PYTHONPATH": source}
                command = [sys.executable, "-c", PROGRAM, given]
                ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                facts[name] = json.loads(ended.stdout.splitlines()[-1])
                times[name].append(facts[name]["ms"])
        before, now = min(times["before"]), min(times["after"])
        calls = f"{facts['before']['calls']} / {facts['after']['calls']}"
        same = "yes" if facts["before"]["texts"] == facts["after"]["texts"] else "no"
        rows.append([prompts, f"{before:.2f}", f"{now:.2f}", f"{now / before:.3f}", calls, same])
        print(rows[-1], flush=True)
    header = ["prompts", "ms per step before", "after", "ratio", "calls before / after", "same texts"]
    print(markdown(header, rows))
