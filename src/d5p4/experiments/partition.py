from collections.abc import Mapping
from typing import Any

from . import open_ended
from .open_ended import base
from .setup import Case, Experiment, Setup

BOX: Mapping[str, Any] = {
    **{name: open_ended.BOX[name] for name in ("model", "judges", "encoder", "gen_length", "steps")},
    "k": 2, "w": 2, "units": 64, "units_large": 24, "lam": 5.0, "interval": (4, 8, 16, 32, 64, 128),
    "beta": (1, 2, 4, 6, 8, 10, 12, 30, 100), "beta_large": (30, 100), "large": (8, 4),
}  # fmt: skip
PAPER: Mapping[str, Any] = dict(BOX) | {
    **{name: open_ended.PAPER[name] for name in ("model", "judges", "encoder", "gen_length")},
    "steps": 256, "units": 8, "units_large": 8,
}  # fmt: skip


def cases(setup: Setup) -> list[Case]:
    small = base(setup) | {"w": setup["w"]}
    particles = base(setup) | {"method": "e-smc", "k": setup["k"] * setup["w"], "w": 1, "lam": setup["lam"]}
    units = setup["units"]
    found = [
        Case(f"E-SMC, every {i}", particles | {"interval": i}, units, group="E-SMC", value=float(i))
        for i in setup["interval"]
    ]
    k, w = setup["large"]
    for name, method in (("D5P3", "d5p3"), ("D5P4+", "d5p4")):
        for beta in setup["beta"]:
            options = small | {"method": method, "beta": float(beta)}
            found.append(Case(f"{name}, β {beta:g}", options, units, group=name, value=float(beta)))
        for beta in setup["beta_large"]:
            options = base(setup) | {"k": k, "w": w, "method": method, "beta": float(beta)}
            found.append(
                Case(f"{name} {k}×{w}, β {beta:g}", options, setup["units_large"], group=f"{name} {k}×{w}", value=beta)
            )
    return found


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("partition", "The partition, and resampling particles", "Fig. esmc", {"box": BOX, "paper": PAPER}, draw, cases, scorers=("ppl", "cos"))
