"""Decodes sets of answers with the library, scores the sets with outside models, and reduces each set to numbers.

The texts of a set are large and stay on the machine that decoded the set. The few numbers that the tables and figures
need are committed to git, so that a clean clone can draw the tables again and extend a run. If the numbers of a set are
committed, the set is not decoded or scored again.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from d5p4.errors import DuplicateAnswers
from d5p4.generate import generate
from d5p4.options import Settings
from d5p4.types import Callback

from .rows import Row, Source, check_made, complete
from .scoring import AT_ONCE, make_scorer, scorer_names
from .setup import OPEN, SOLVER, Case, Setup, digest_of, slugged, solves

TOKENS = {"cuda": 1 << 17}  # at most this many tokens per forward on a GPU; other devices use the default limit


def answers(setup: Setup, case: Case) -> Source:
    """Return the `Source` of a case's answers, with one row per set. Experiments with equal cases share these rows."""
    made_with = _made_with(setup, case)
    reduced = None if setup.experiment.digest is None else setup.open(*_numbers_file(setup))
    slug = "" if reduced is None else _numbers_slug(setup, case)
    return Source(
        f"rows/{_slug(case)}-{digest_of(made_with)}.jsonl",
        made_with,
        [str(unit) for unit in range(case.units)],
        partial(_decode, setup, case),
        case.name,
        together=partial(_first_batch, setup, case),
        cost=partial(_cost, setup, case),
        shared=True,
        elsewhere=lambda key: reduced is not None and f"{slug} {key}" in reduced,
    )


def scores(setup: Setup, case: Case, scorer: str) -> Source:
    """Return the `Source` that scores the answers of a case with `scorer` (`kind:model`). It has one row per set."""
    source = answers(setup, case)
    rows = setup.rows(source)
    kind, _, model = scorer.partition(":")

    def make(keys: Sequence[str]) -> Mapping[str, Row]:
        score = make_scorer(scorer, setup.device, bool(setup.settings.get("remote_code")))
        return dict(zip(keys, score([rows[key] for key in keys]), strict=True))

    return Source(
        f"scores/{kind}-{model.rstrip('/').split('/')[-1]}/{rows.path.name}",
        {"scorer": f"{kind}-{model.rstrip('/').split('/')[-1]}", **source.made_with},
        [key for key in source.keys if key in rows],
        make,
        f"{scorer}: {case.name}",
        together=lambda: AT_ONCE,
        elsewhere=source.elsewhere,
    )


def numbers(setup: Setup, some_cases: Sequence[Case] | None = None) -> Source:
    """Return the `Source` of the numbers to draw, with one row per set of `some_cases` (by default of all cases)."""
    wanted = setup.cases if some_cases is None else some_cases
    # If several cases have the same options, only the case with the most units is kept.
    cases = {_numbers_slug(setup, case): case for case in sorted(wanted, key=lambda case: case.units)}
    keys = [f"{slug} {unit}" for slug, case in cases.items() for unit in range(case.units)]

    def make(wanted_keys: Sequence[str]) -> dict[str, Row]:
        made: dict[str, Row] = {}
        for slug, group in groupby(wanted_keys, lambda key: key.rsplit(" ", 1)[0]):
            units = [key.rsplit(" ", 1)[1] for key in group]
            made |= {f"{slug} {unit}": row for unit, row in _reduce(setup, cases[slug], units).items()}
        return made

    return Source(*_numbers_file(setup), keys, make, "numbers", together=lambda: 250)


def _numbers_file(setup: Setup) -> tuple[str, dict[str, str]]:
    """Return the path and header of the file of numbers. The settings are hashed into the keys of the file's rows."""
    assert setup.experiment.digest is not None
    name = setup.experiment.digest.name
    return f"numbers/{name}.jsonl.xz", {"numbers": name}


def numbers_of(setup: Setup, case: Case) -> list[Row]:
    """Return the numbers of a case's sets, one set per unit, in the order of the units."""
    assert setup.experiment.digest is not None
    read = setup.experiment.digest.read
    return [read(setup, case, row) for row in complete(setup, numbers(setup, [case]), "draw")]


def _reduce(setup: Setup, case: Case, units: Sequence[str]) -> dict[str, Row]:
    """Compute the numbers of some sets of a case, one set per unit, from the answers and scores of these sets."""
    digest = setup.experiment.digest
    assert digest is not None
    decoded = answers(setup, case)
    check_made(setup, decoded, "decode")
    scored = {name: scores(setup, case, name) for name in _scorers(setup, case)}
    for source in scored.values():
        check_made(setup, source, "score")
    rows = setup.rows(decoded)
    made = {}
    for unit in units:
        unit_scores = {name: setup.rows(source)[unit] for name, source in scored.items()}
        made[unit] = digest.make(setup, case, int(unit), rows[unit], unit_scores)
        if setup.reads_data(case.task):
            made[unit]["asked"] = prompt_digits(rows[unit]["prompt"])
    return made


def _scorers(setup: Setup, case: Case) -> list[str]:
    return scorer_names(setup) if setup.experiment.scored(case) else []


def prompt_digits(prompt: str) -> str:
    """Return two hexadecimal digits of a hash of the prompt. The digits of a few prompts tell two files apart."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:2]


def known_prompts(setup: Setup, task: str) -> Iterator[tuple[Path, int, str]]:
    """Yield the path, unit and `prompt_digits` of every row on the disk that belongs to a task.

    Nothing is yielded if the task does not read its prompts from a file.
    """
    for case in setup.cases if setup.reads_data(task) else ():
        if case.task != task:
            continue
        rows = setup.rows(answers(setup, case))
        yield from ((rows.path, int(row["key"]), prompt_digits(row["prompt"])) for row in rows if "prompt" in row)
        if setup.experiment.digest is not None:
            rows, slug = setup.open(*_numbers_file(setup)), _numbers_slug(setup, case)
            for row in rows:
                if row["key"].startswith(f"{slug} ") and "asked" in row:
                    yield rows.path, int(row["key"].rsplit(" ", 1)[1]), row["asked"]


def _made_with(setup: Setup, case: Case) -> dict[str, Any]:
    # The case's name is left out, because two experiments may use different names for the same answers.
    made_with = {"task": case.task, "model": setup.label, "weights": setup.weights, "seed": setup.seed}
    return made_with | {"options": dict(case.options)}


def _slug(case: Case) -> str:
    return slugged(f"{case.task} {case.options['method']}")


def _numbers_slug(setup: Setup, case: Case) -> str:
    """The prefix of a case's keys in the file of numbers, with a hash of the answers' options, scorers, settings."""
    assert setup.experiment.digest is not None
    settings = {name: setup[name] for name in setup.experiment.digest.settings}
    depends_on = {"answers": _made_with(setup, case), "scorers": _scorers(setup, case), "settings": settings}
    return f"{_slug(case)}-{digest_of(depends_on)}"


# --- decoding ---


def _settings(setup: Setup, case: Case) -> Settings:
    return Settings.make(setup.model, **_options(case))


def _options(case: Case) -> dict[str, Any]:
    """The case's options of `generate`. The rows of a case that names no solver are made with `SOLVER`."""
    return ({"solver": SOLVER} if solves(case.options) else {}) | dict(case.options)


def _length(setup: Setup, case: Case) -> int:
    gen_length = _settings(setup, case).gen_length
    return gen_length or (setup.model.max_length if setup.model.carry_over else 128)


def _cost(setup: Setup, case: Case) -> float:
    """The cost of one set: the number of tokens that go through the model if all rows of the set's pool differ."""
    settings, length = _settings(setup, case), _length(setup, case)
    return settings.pool_size * length * (settings.steps or length) * (1 if settings.guidance == 1 else 2)


def _first_batch(setup: Setup, case: Case) -> int:
    """The number of sets in the first batch. A small first batch gives an early estimate of the time left."""
    if setup.torch_device.type != "cuda":
        return 1
    tokens = 8 * TOKENS["cuda"]
    return max(1, tokens // (_settings(setup, case).pool_size * 2 * _length(setup, case)))


def _beat(setup: Setup) -> Callback | None:
    """Return a callback that tells the other ranks that this rank is alive, or None if there is only one rank."""
    return None if setup.mesh.world == 1 else lambda shot: setup.mesh.beat()


def _decode(setup: Setup, case: Case, keys: Sequence[str]) -> dict[str, Row]:
    units = [int(key) for key in keys]
    prompts: dict[str, Any] = {"prompts": None, "sets": len(units)}
    examples = None
    if case.task != OPEN:
        task = setup.task(case.task, case.units).examples
        examples = [task[unit] for unit in units]
        prompts = {"prompts": [example.prompt for example in examples]}
    tokens = TOKENS.get(setup.torch_device.type)
    options = _options(case) | ({} if tokens is None else {"max_tokens_per_forward": tokens})
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateAnswers)
        # A unit's random numbers do not depend on other units, so batches and resumed runs give the same answers.
        names = [f"{case.task} {unit}" for unit in units]
        result = generate(setup.model, **prompts, keys=names, seed=setup.seed, callback=_beat(setup), **options)
    seconds = (time.monotonic() - began) / len(units)
    made: dict[str, Row] = {}
    for place, key in enumerate(keys):
        made[key] = {
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
            example = examples[place]
            made[key] |= {"id": example.id, "prompt": example.prompt, "references": list(example.references)}
    return made
