"""The table of compute in docs/reproduce.md: the paper's accelerator-hours, a plan for its scale, and our own runs.

`python -m d5p4_lab bench tables` draws the table. The plan is that of `reproduce NAME --scale paper --plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5p4.store import read_json

from ..tables import markdown
from . import EXPERIMENTS, experiment
from .plan import MANY, Estimate, parts
from .setup import Setup
from .sizes import h200

STAGES = ("decode", "score")
PAPER = {  # the rows of the paper's table: the experiments that make the same figures, accelerators, accelerator-hours
    "open-ended generation": (("pareto", "fidelity", "control"), "mixed", 192),
    "E-SMC comparison": (("partition",), "L40S", 72),
    "question answering, three data sets": (("qa",), "A100", 240),
    "CFG sweep": (("guidance",), "A100", 300),
    "mathematical reasoning": (("math",), "H100", 360),
    "synthetic DPP maximisation": (("scaling",), "H200", 24),
}


def compute_table(root: Path) -> str:
    """Return the table in Markdown. `root` has the folders of the experiments that were run with the models in the box.

    Experiments that the paper's table leaves out follow at the end.
    """
    named = {name for names, *_ in PAPER.values() for name in names}
    lines: dict[str, tuple[tuple[str, ...], str, int | None]] = dict(PAPER)
    lines |= {name: ((name,), "", None) for name in EXPERIMENTS if name not in named}
    rows = []
    for what, (names, accelerator, hours) in lines.items():
        paper = "not in the table" if hours is None else f"{hours} ({accelerator})"
        rows.append([what, ", ".join(names), paper, *_planned(names), _measured(root, names)])
    header = ["in the paper", "here", "the paper, accelerator-hours", "plan, 1 GPU, h", f"plan, {MANY} GPUs, h"]
    return markdown([*header, "in the box"], rows)


def _planned(names: Sequence[str]) -> list[str]:
    """The estimated hours of a run at the paper's scale, on one GPU and on several."""
    total, speed = Estimate(), h200()
    for name in names:
        setup = Setup(experiment(name), "paper", Path("no results"), device="cpu", decoding=False)
        total.add(setup, list(parts(setup, STAGES)), speed)
    return [f"{seconds / 3600:.1f}" for seconds in (total.on(1), total.on(MANY))]


def _measured(root: Path, names: Sequence[str]) -> str:
    """The seconds that the committed runs took, by machine."""
    seconds: dict[str, float] = {}
    for name in names:
        config: Mapping[str, Any] = read_json(root / name / "config.json") or {}
        for stage in STAGES:
            for run in config.get("stages", {}).get(stage, ()):
                place = run["machine"].split(",")[0]
                seconds[place] = seconds.get(place, 0.0) + run["seconds"] * run.get("ranks", 1)
    return ", ".join(f"{spent:.0f} s ({place})" for place, spent in seconds.items()) or "with other experiments"
