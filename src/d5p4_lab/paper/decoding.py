"""The stage that decodes: sets of answers of every case, a row a prompt.

Ranks share the missing units of each case: they take them from a counter, as many at a time as they decode in about
`SECONDS`, so that a slow rank takes fewer.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from d5p4.distributed import at_work, check_shared
from d5p4.errors import DuplicateAnswers
from d5p4.generate import generate
from d5p4.settings import Settings
from d5p4.types import Callback

from .parts import fold, part
from .setup import OPEN, Case, Setup
from .store import JsonLines

TOKENS = {"cuda": 1 << 17}  # of one forward; elsewhere the library's default
SECONDS = 45.0  # about so long until rows are written
FULL = 4  # forwards of a first batch on a GPU; a batch of one fills it


class _Work(NamedTuple):
    """What the first rank finds to do, for all."""

    start: str  # names this start, among parts and counters
    pending: dict[str, list[int]]  # units of each case
    seconds: float | None  # until the deadline


def decode_cases(setup: Setup, deadline: float | None = None) -> bool:
    """Decode what is missing of all cases, with the other ranks; False when the deadline (of time.monotonic) came
    first. The first rank's deadline counts, and only the first rank writes into the files of cases."""
    mesh = setup.mesh
    with at_work(mesh):
        work = mesh.share(_find_work(setup, deadline) if mesh.first else None)
        if not work.pending:
            return True
        check_shared(setup.root / "rows", mesh, "--out")
        if mesh.world > 1:
            _ = setup.model  # it may take longer than a rank may be silent
    _decode_share(setup, work)
    mesh.meet()
    with at_work(mesh):
        finished = mesh.share(not _fold_all(setup) if mesh.first else None)
    if finished:
        setup.progress(1.0, "decoded")
    return finished


def _find_work(setup: Setup, deadline: float | None) -> _Work:
    pending = _fold_all(setup)
    return _Work(secrets.token_hex(4), pending, None if deadline is None else deadline - time.monotonic())


def _fold_all(setup: Setup) -> dict[str, list[int]]:
    """Put what ranks wrote, in this start or one that died, into the files of cases; what is still missing."""
    found = {}
    for case in setup.cases:
        rows = setup.rows(case)
        fold(rows)
        if units := _units_missing(case, rows):
            found[case.name] = units
    return found


def _decode_share(setup: Setup, work: _Work) -> None:
    """Decode what this rank can get hold of before the deadline."""
    mesh = setup.mesh
    deadline = None if work.seconds is None else time.monotonic() + work.seconds
    costs = {case.name: _cost(setup, case) for case in setup.cases}
    total = sum(costs[name] * len(units) for name, units in work.pending.items())
    everything = f"{work.start}/done"
    done, spent = 0, 0.0  # of this rank
    for case in setup.cases:
        units = work.pending.get(case.name, [])
        if not units:
            continue
        counter = f"{work.start}/{case.name}"
        rows = setup.rows(case) if mesh.world == 1 else part(setup.rows(case), work.start, mesh.rank)
        first = size = _first_batch(setup, case)
        while (left := len(units) - mesh.count(counter)) > 0:
            if mesh.world > 1:  # leave some for the others, but fill the device
                size = min(size, max(first // FULL, -(-left // mesh.world)))
            expected = spent / done * costs[case.name] * min(size, left) if done else 0.0
            if deadline is not None and time.monotonic() + expected > deadline:
                return
            stop = mesh.count(counter, size)
            mine = units[stop - size : stop]
            if not mine:
                break  # others were quicker
            told = mesh.count(everything) / total
            setup.progress(told, f"{case.name}: {len(units) - (stop - size)} of {case.units} left")
            began = time.monotonic()
            _decode(setup, case, mine, rows)
            seconds = time.monotonic() - began
            done += costs[case.name] * len(mine)
            spent += seconds
            mesh.count(everything, costs[case.name] * len(mine))
            size = max(1, min(4 * size, round(size * SECONDS / max(seconds, 1e-3))))


def missing(setup: Setup) -> dict[str, list[int]]:
    """The units of each case that have not been decoded."""
    found = {case.name: _units_missing(case, setup.rows(case)) for case in setup.cases}
    return {name: units for name, units in found.items() if units}


def _units_missing(case: Case, rows: JsonLines) -> list[int]:
    return [unit for unit in range(case.units) if unit not in rows]


def _options(setup: Setup, case: Case) -> dict[str, Any]:
    most = TOKENS.get(setup.torch_device.type)
    return dict(case.options) | ({} if most is None else {"max_tokens_per_forward": most})


def _settings(setup: Setup, case: Case) -> Settings:
    return Settings.make(setup.model, **case.options)


def _length(setup: Setup, case: Case) -> int:
    asked = _settings(setup, case).gen_length
    return asked or (setup.model.max_length if setup.model.carry_over else 128)


def _cost(setup: Setup, case: Case) -> int:
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


def _beat(setup: Setup) -> Callback | None:
    """Tell the other ranks of every step, where there are any."""
    return None if setup.mesh.world == 1 else lambda shot: setup.mesh.beat()


def _decode(setup: Setup, case: Case, units: Sequence[int], rows: JsonLines) -> None:
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
        result = generate(
            setup.model, **prompts, keys=keys, seed=setup.seed, callback=_beat(setup), **_options(setup, case)
        )
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
