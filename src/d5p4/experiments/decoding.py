"""The stage that decodes: sets of answers of every case, a row a prompt."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import DuplicateAnswers
from ..generate import generate
from ..settings import Settings
from .setup import OPEN, Case, Setup

TOKENS = {"cuda": 1 << 17}  # of one forward; elsewhere the library's default
SECONDS = 45.0  # about so long until rows are written


def decode_cases(setup: Setup, deadline: float | None = None) -> bool:
    """Decode what is missing of all cases; False when the deadline (of time.monotonic) came first."""
    pending = missing(setup)
    if not pending:
        return True
    costs = {case.name: _cost(setup, case) for case in setup.cases}
    total = sum(costs[name] * len(units) for name, units in pending.items())
    done, spent = 0.0, 0.0
    for case in setup.cases:
        size = _first_batch(setup, case)
        units = pending.get(case.name, [])
        while units:
            expected = spent / done * costs[case.name] * min(size, len(units)) if done else 0.0
            if deadline is not None and time.monotonic() + expected > deadline:
                return False
            setup.progress(done / total, f"{case.name}: {len(units)} of {case.units} left")
            began = time.monotonic()
            _decode(setup, case, units[:size])
            seconds = time.monotonic() - began
            done += costs[case.name] * len(units[:size])
            spent += seconds
            units = units[size:]
            size = max(1, min(4 * size, round(size * SECONDS / max(seconds, 1e-3))))
    setup.progress(1.0, "decoded")
    return True


def missing(setup: Setup) -> dict[str, list[int]]:
    """The units of each case that have not been decoded."""
    found = {}
    for case in setup.cases:
        rows = setup.rows(case)
        if units := [unit for unit in range(case.units) if unit not in rows]:
            found[case.name] = units
    return found


def _options(setup: Setup, case: Case) -> dict[str, Any]:
    most = TOKENS.get(setup.torch_device.type)
    return dict(case.options) | ({} if most is None else {"max_tokens_per_forward": most})


def _settings(setup: Setup, case: Case) -> Settings:
    return Settings.make(setup.model, **case.options)


def _length(setup: Setup, case: Case) -> int:
    asked = _settings(setup, case).gen_length
    return asked or (setup.model.max_length if setup.model.carry_over else 128)


def _cost(setup: Setup, case: Case) -> float:
    """Of one unit, as tokens that go through the model if no two rows are equal."""
    settings = _settings(setup, case)
    length = _length(setup, case)
    return settings.pool_size * length * (settings.steps or length) * (1 if settings.guidance == 1 else 2)


def _first_batch(setup: Setup, case: Case) -> int:
    """Units of the first call: few, so that something is on the disk and a time can be told soon."""
    if setup.torch_device.type != "cuda":
        return 1
    tokens = 8 * TOKENS["cuda"]
    return max(1, tokens // (_settings(setup, case).pool_size * 2 * _length(setup, case)))


def _decode(setup: Setup, case: Case, units: Sequence[int]) -> None:
    rows = setup.rows(case)
    prompts: dict[str, Any] = {"prompts": None, "sets": len(units)}
    examples = None
    if case.task != OPEN:
        held = setup.task(case.task, case.units).examples
        examples = [held[unit] for unit in units]
        prompts = {"prompts": [example.prompt for example in examples]}
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateAnswers)
        # The unit names the random stream, so batches, resuming and more units change no answer.
        keys = [f"{case.task} {unit}" for unit in units]
        result = generate(setup.model, **prompts, keys=keys, seed=setup.seed, **_options(setup, case))
    seconds = (time.monotonic() - began) / len(units)
    found: dict[str, dict[str, Any]] = {}
    for place, unit in enumerate(units):
        row: dict[str, Any] = {
            "texts": result.texts[place],
            "score": [round(score, 6) for score in result.score[place].tolist()],
            "logdet": round(max(-1e9, float(result.logdet[place])), 5),
            "distinct": int(result.distinct[place]),
            "nfe": int(result.nfe[place]),
            "rows": int(result.rows[place]),
            "nominal": int(result.rows_nominal[place]),
            "seconds": round(seconds, 3),
        }
        if examples is not None:
            row |= {"id": examples[place].id, "prompt": examples[place].prompt}
            row |= {"references": list(examples[place].references)}
        found[str(unit)] = row
    rows.add_all(found)
