"""Decodes sets of answers with the library, scores the sets with outside models, and reduces each set to numbers.

Texts stay on the machine that decoded them. The numbers that drawing needs are committed, so that a clean clone can
draw the tables again and extend a run: a set whose numbers are committed is not decoded or scored again.
"""

import hashlib
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from d5p4.errors import D5P4Error, DuplicateAnswers
from d5p4.generate import generate
from d5p4.jobs.decoder import default_budget
from d5p4.options import Settings

from .rows import Row, Source, check_made, complete
from .scoring import AT_ONCE, judge_dtype, make_scorer, scorer_names, scorer_slug
from .setup import FULL_PRECISION, OPEN, SOLVER, Case, Setup, digest_of, solves


def answers(setup: Setup, case: Case, number: int | None = None) -> Source:
    """The `Source` of a case's answers, or of pass `number` alone. Experiments with equal cases share the rows."""
    made_with = _made_with(setup, case)
    reduced = None if setup.experiment.digest is None else setup.open(*_numbers_file(setup))
    slug = "" if reduced is None else _numbers_slug(setup, case)
    return Source(
        f"rows/{_slug(case)}-{digest_of(made_with)}.jsonl",
        made_with,
        case.set_keys(number),
        partial(_decode, setup, case),
        f"{case.name}, pass {number + 1} of {case.passes}" if number is not None and case.passes > 1 else case.name,
        together=partial(_sets_per_batch, setup, case),
        shared=True,
        elsewhere=lambda key: reduced is not None and f"{slug} {key}" in reduced,
    )


def scores(setup: Setup, case: Case, scorer: str) -> Source:
    """Return the `Source` of the scores of a case's sets by `scorer` (`kind:model`)."""
    source = answers(setup, case)
    rows = setup.rows(source)
    slug = scorer_slug(setup, scorer)

    def make(keys: Sequence[str]) -> Mapping[str, Row]:
        score = make_scorer(scorer, setup.device, judge_dtype(setup))
        return dict(zip(keys, score([rows[key] for key in keys]), strict=True))

    return Source(
        f"scores/{slug}/{rows.path.name}",
        {"scorer": slug, **source.made_with},
        [key for key in source.keys if key in rows],
        make,
        f"{scorer}: {case.name}",
        together=lambda: AT_ONCE[setup.torch_device.type == "cuda"],
        shared=True,
        elsewhere=source.elsewhere,
    )


def numbers(setup: Setup, some_cases: Sequence[Case] | None = None) -> Source:
    """Return the `Source` of the numbers to draw from the sets of `some_cases` (by default of all cases)."""
    wanted = setup.cases if some_cases is None else some_cases
    # If several cases have the same options, only the case with the most units is kept.
    cases = {_numbers_slug(setup, case): case for case in sorted(wanted, key=lambda case: case.units)}
    keys = [f"{slug} {key}" for slug, case in cases.items() for key in case.set_keys()]

    def make(wanted_keys: Sequence[str]) -> dict[str, Row]:
        made: dict[str, Row] = {}
        for slug, pairs in groupby((key.rsplit(" ", 1) for key in wanted_keys), itemgetter(0)):
            reduced = _reduce(setup, cases[slug], [key for _, key in pairs])
            made |= {f"{slug} {key}": row for key, row in reduced.items()}
        return made

    return Source(*_numbers_file(setup), keys, make, "numbers", together=lambda: 250)


def _numbers_file(setup: Setup) -> tuple[str, dict[str, str]]:
    assert setup.experiment.digest is not None
    name = setup.experiment.digest.name
    return f"numbers/{name}.jsonl.xz", {"numbers": name}


def numbers_of(setup: Setup, case: Case) -> list[Row]:
    """Return the numbers of a case, one row per unit: means over passes, so that intervals over units stay right."""
    return [_pooled(rows) for rows in numbers_by_unit(setup, case)]


def numbers_by_unit(setup: Setup, case: Case) -> list[list[Row]]:
    """Return the numbers of a case's sets, one list per unit. Each list has one row per pass."""
    assert setup.experiment.digest is not None
    read = setup.experiment.digest.read
    rows = [read(setup, case, row) for row in complete(setup, numbers(setup, [case]), "draw")]
    return [rows[unit :: case.units] for unit in range(case.units)]


def _pooled(rows: Sequence[Any]) -> Any:
    """Return the mean of rows that have the same shape. Text must be equal in all rows, except keys of rows."""
    first = rows[0]
    if len(rows) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: first[name] if name == "key" else _pooled([row[name] for row in rows]) for name in first}
    if isinstance(first, list):
        return [_pooled(values) for values in zip(*rows, strict=True)]
    if isinstance(first, (int, float)):
        return sum(rows) / len(rows)
    if any(value != first for value in rows):
        raise D5P4Error(f"the passes of a unit have different texts ({first!r:.20}, …), which have no mean")
    return first


def _unit(key: str) -> int:
    """The unit of a set, from the set's key (see `Case.set_keys`)."""
    return int(key.partition(".")[0])


def _reduce(setup: Setup, case: Case, keys: Sequence[str]) -> dict[str, Row]:
    digest = setup.experiment.digest
    assert digest is not None
    decoded = answers(setup, case)
    check_made(setup, decoded, "decode")
    scored = {name: scores(setup, case, name) for name in _scorers(setup, case)}
    for source in scored.values():
        check_made(setup, source, "score")
    rows = setup.rows(decoded)
    made = {}
    for key in keys:
        set_scores = {name: setup.rows(source)[key] for name, source in scored.items()}
        made[key] = digest.make(setup, case, _unit(key), rows[key], set_scores)
        if setup.reads_data(case.task):
            made[key]["asked"] = prompt_digits(rows[key]["prompt"])
    return made


def _scorers(setup: Setup, case: Case) -> list[str]:
    return scorer_names(setup) if setup.experiment.scored(case) else []


def prompt_digits(prompt: str) -> str:
    """Two hexadecimal digits of a hash of the prompt. The digits of a few prompts tell two files apart."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:2]


def known_prompts(setup: Setup, task: str) -> Iterator[tuple[Path, int, str]]:
    """Yield the path, unit and `prompt_digits` of every row on the disk whose prompt comes from the file of a task."""
    for case in (case for case in setup.cases if case.task == task and setup.reads_data(task)):
        rows = setup.rows(answers(setup, case))
        decoded = ((key, row) for key, row in rows.items() if "prompt" in row)
        yield from ((rows.path, _unit(key), prompt_digits(row["prompt"])) for key, row in decoded)
        if setup.experiment.digest is not None:
            rows = setup.open(*_numbers_file(setup))
            pairs = ((key.rsplit(" ", 1), row) for key, row in rows.items() if "asked" in row)
            slug = _numbers_slug(setup, case)
            yield from ((rows.path, _unit(key), row["asked"]) for (of, key), row in pairs if of == slug)


def _made_with(setup: Setup, case: Case) -> dict[str, Any]:
    # The case's name is left out, because two experiments may use different names for the same answers.
    made_with = {"task": case.task, "model": setup.label, "weights": setup.weights, "seed": setup.seed}
    return made_with | {"options": dict(case.options)}


def _slug(case: Case) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{case.task} {case.options['method']}")


def _numbers_slug(setup: Setup, case: Case) -> str:
    """The prefix of a case's keys in the file of numbers, with a hash of what the numbers depend on."""
    digest = setup.experiment.digest
    assert digest is not None
    settings = {name: setup[name] for name in digest.settings}
    depends_on = {"answers": _made_with(setup, case), "scorers": _scorers(setup, case), "settings": settings}
    if judge_dtype(setup) != FULL_PRECISION:
        depends_on["judge_dtype"] = judge_dtype(setup)
    return f"{_slug(case)}-{digest_of(depends_on)}"


# --- decoding ---


def case_options(case: Case) -> dict[str, Any]:
    """The case's options of `generate`. The rows of a case that names no solver are made with `SOLVER`."""
    return ({"solver": SOLVER} if solves(case.options) else {}) | dict(case.options)


def _sets_per_batch(setup: Setup, case: Case) -> int:
    """The number of sets that are decoded together. On a GPU they fill about eight forwards."""
    if setup.torch_device.type != "cuda":
        return 1
    rows = Settings.make(setup.model, **case_options(case)).pool_size
    return max(1, 8 * default_budget(setup.model) // (rows * case.options["gen_length"]))


def _decode(setup: Setup, case: Case, keys: Sequence[str]) -> dict[str, Row]:
    prompts: dict[str, Any] = {"prompts": None, "sets": len(keys)}
    examples = None
    if case.task != OPEN:
        task = setup.task(case.task, case.units).examples
        examples = [task[_unit(key)] for key in keys]
        prompts = {"prompts": [example.prompt for example in examples]}
    on_gpu = setup.torch_device.type == "cuda"
    options = case_options(case) | ({"max_tokens_per_forward": default_budget(setup.model)} if on_gpu else {})
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateAnswers)
        # A set's random numbers depend on its key alone, so batches and resumed runs give the same answers.
        names = [f"{case.task} {key}" for key in keys]
        result = generate(setup.model, **prompts, keys=names, seed=setup.seed, **options)
    seconds = (time.monotonic() - began) / len(keys)
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
