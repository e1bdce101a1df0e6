"""The table of compute in docs/reproduce.md: the paper's accelerator-hours, and our plan for its scale."""

from __future__ import annotations

from pathlib import Path

from ..tables import markdown
from . import EXPERIMENTS, experiment
from .plan import Estimate, parts
from .setup import Setup

PAPER = {  # the rows of the paper's table: the experiments that make the same figures, accelerator-hours, accelerators
    "open-ended generation": (("pareto", "fidelity", "control"), "192 (mixed)"),
    "E-SMC comparison": (("partition",), "72 (L40S)"),
    "question answering, three data sets": (("qa",), "240 (A100)"),
    "CFG sweep": (("guidance",), "300 (A100)"),
    "mathematical reasoning": (("math",), "360 (H100)"),
    "synthetic DPP maximisation": (("scaling",), "24 (H200)"),
}


def compute_table() -> str:
    """Return the table in Markdown. Experiments that the paper's table leaves out follow at the end."""
    named = {name for names, _ in PAPER.values() for name in names}
    others = {name: ((name,), "not in the table") for name in EXPERIMENTS if name not in named}
    rows = []
    for what, (names, paper) in (PAPER | others).items():
        total = Estimate()
        for name in names:
            setup = Setup(experiment(name), "paper", Path("no results"), device="cpu", decoding=False)
            total.add(setup, list(parts(setup, ("decode", "score"))))
        rows.append([what, ", ".join(names), paper, f"{total.seconds / 3600:.1f}"])
    columns = ["in the paper", "here", "the paper, accelerator-hours", "plan, hours on one GPU"]
    return markdown(columns, rows)
