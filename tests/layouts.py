"""What must not depend on the layout of work: batches, their order, the size of a forward, forwards of equal rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import d5p4

COSTS = ("rows", "nfe", "rows_nominal", "tokens_run")
NUMBERS = ("score", "similarity", "perturbed", "kappa")
PLAIN = ("answers", "texts", "logprobs", "reveal_step", "lineage", *NUMBERS, *COSTS)


def facts(result: d5p4.Result, *without: str) -> list[dict[str, Any]]:
    """Everything about each prompt; numbers to the noise of float64 sums."""
    fields = {name: getattr(result, name) for name in PLAIN if name not in without}
    fields = {name: values for name, values in fields.items() if values is not None}

    def read(name: str, value: Any) -> Any:
        if name == "logprobs":
            return [[round(x, 7) for x in row] for row in value]
        value = value.nan_to_num().double().round(decimals=7) if name in NUMBERS else value
        return value.tolist() if hasattr(value, "tolist") else value

    return [{name: read(name, values[p]) for name, values in fields.items()} for p in range(len(result))]


def check_layouts(
    run: Callable[..., d5p4.Result], prompts: Sequence[Any], tokens: int = 20
) -> tuple[d5p4.Result, d5p4.Result]:
    """Alone or together, in any order, in small forwards, with all rows of a pool or distinct ones. Return the last two
    results: with the savings of distinct rows, and without."""
    saved, plain = run(prompts), run(prompts, savings=False)
    together = facts(saved)
    assert together == [facts(run([prompt]))[0] for prompt in prompts]
    assert together == facts(run(prompts[::-1], max_tokens_per_forward=tokens))[::-1]
    shown = [name for name in COSTS if name != "rows_nominal"]
    assert facts(plain, *shown) == facts(saved, *shown) and (saved.rows <= plain.rows).all()
    return saved, plain
