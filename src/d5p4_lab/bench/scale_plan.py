"""What a large file costs on many GPUs: arithmetic from measured step times, checked by a simulation of the schedule.

    python benchmarks/scale_plan.py                           prints the tables of docs/scale.md
    python benchmarks/scale_plan.py --page docs/scale.md --figure docs/scale.svg

Step times come from benchmarks/results/gpu.json (LLaDA-8B's shape on one H200), fixed shapes from deterministic.json,
all else from scale.json. The
arithmetic is in scale_cost.py, the simulation in scale_schedule.py, the tables in scale_page.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from d5p4_lab.bench.scale_figure import figure  # noqa: E402
from d5p4_lab.bench.scale_page import TABLES, Facts, fill  # noqa: E402


def read(name: str) -> dict[str, Any]:
    path = ROOT / "src/d5p4_lab/results/bench" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"sections": {}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, help="a page whose tables are made anew, such as docs/scale.md")
    parser.add_argument("--figure", type=Path, help="a drawing, such as docs/scale.svg; needs matplotlib")
    options = parser.parse_args(arguments)
    facts = Facts(read("gpu.json"), read("scale.json"), read("deterministic.json"))
    if options.page:
        options.page.write_text(fill(options.page.read_text(encoding="utf-8"), facts), encoding="utf-8")
    if options.figure:
        figure(facts.scale, options.figure)
    if not (options.page or options.figure):
        for name, table in TABLES.items():
            print(f"### {name}\n\n{table(facts)}\n", flush=True)


if __name__ == "__main__":
    main()
