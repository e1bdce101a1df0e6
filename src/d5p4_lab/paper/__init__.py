"""The experiments of the paper: one module per table or figure. `EXPERIMENTS` maps names of experiments to modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from d5p4.errors import D5P4Error

if TYPE_CHECKING:
    from .setup import Experiment

EXPERIMENTS = {
    "pareto": "pareto",
    "fidelity": "fidelity",
    "control": "control",
    "qa": "qa",
    "guidance": "guided",
    "math": "mathematics",
    "partition": "partition",
    "quality-signal": "quality_signal",
    "features": "features",
    "scaling": "scaling",
    "cost": "cost",
    "theory": "theory",
}


def experiment(name: str) -> Experiment:
    """Return the experiment with this name. Its module is imported at the first call."""
    if name not in EXPERIMENTS:
        raise D5P4Error(f"there is no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}")
    return import_module(f".{EXPERIMENTS[name]}", __name__).EXPERIMENT
