"""What a run needs: time, disk, memory, models and data. `plan` estimates it, and `check` opens it before decoding.

Both look at the same list of missing rows. Rows that several experiments share count once in the total.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from d5p4.errors import D5P4Error
from d5p4.models.checkpoint import weight_files
from d5p4.models.load import find
from d5p4.options import Settings

from ..tables import markdown
from .answers import answers, case_options, scores
from .rows import missing_keys
from .scoring import TOKENS as JUDGED
from .scoring import judge_dtype, models_of, scorer_names
from .setup import TEXTS, Case, Setup
from .sizes import (
    GB,
    GPU,
    TOKENS,
    Shape,
    decoding_memory,
    is_local,
    judge_memory,
    number_size,
    seconds,
    shape_of,
)
from .tasks import SOURCES

PROMPTS = {"truthfulqa": 40, "arc-challenge": 55, "commonsenseqa": 45, "gsm8k": 110, "countdown": 16, "books": 40}
LETTERS = 4.6  # bytes of text per token


# ---- the rows that are missing, and what they cost


class Part(NamedTuple):
    """Missing rows of one source."""

    stage: str
    path: str
    keys: list[str]
    work: Mapping[tuple[str, str | None], float]  # operations per row, by model and dtype (None: the decoded model)
    seconds: float  # other seconds per row, on one CPU thread
    size: float  # bytes per row


def parts(setup: Setup, stages: Sequence[str]) -> Iterator[Part]:
    """The rows that the stages have to make."""
    if "decode" in stages:
        for source in setup.experiment.sources(setup):
            work = {(name, _dtype(setup, name)): n * _body(name) for name, n in source.tokens.items()}
            yield Part("decode", source.path, missing_keys(setup, source), work, source.seconds, 2e3)
        for case in setup.cases:
            source = answers(setup, case)
            work = {(setup.named, None): decoding(shape_of(setup.named), case)}
            size = 400 + case.options.get("k", 1) * case.options["gen_length"] * LETTERS
            yield Part("decode", source.path, missing_keys(setup, source), work, 0.0, size)
    for scorer in scorer_names(setup) if "score" in stages else ():
        kind, _, name = scorer.partition(":")
        for case in filter(setup.experiment.scored, setup.cases):
            done, source = scores(setup, case, scorer), answers(setup, case)
            texts, length = case.options.get("k", 1), case.options["gen_length"]
            keys = [key for key in source.keys if key not in setup.rows(done) and not source.elsewhere(key)]
            work = {(name, _dtype(setup, name)): texts * length * _body(name, length)}
            size = {"ppl": 10 * texts, "cos": 9 * texts**2, "features": 4e3 * texts}[kind]
            yield Part("score", done.path, keys, work, 0.0, 40 + size)


def members(setup: Setup) -> list[Setup]:
    """The run itself, and the runs with other models that are part of its experiment."""
    return [setup, *setup.experiment.others(setup)]


def _dtype(setup: Setup, name: str) -> str | None:
    """The dtype of an outside model. A decoded model has none here, because its dtype is the device's default."""
    for member in members(setup):
        if "model" in member.settings and name == member.named:
            return None
        if name in member.settings.get("judges", ()):
            return judge_dtype(member)
    return "float32"


def _body(name: str, length: int = 512) -> float:
    shape = shape_of(name)
    return 0.0 if shape is None else shape.body(length) + shape.head


def decoding(shape: Shape | None, case: Case) -> float:
    """Operations of one set of answers, if all rows of its pool differ at every step."""
    if shape is None:
        return 0.0
    options = {"k": 1, "spare": 0, "w": 1, "guidance": 1.0} | dict(case.options)
    prompt, length = PROMPTS.get(case.task.partition(":")[0], 0), options["gen_length"]
    body = (prompt + length) * shape.body(prompt + length) * (1 if options["guidance"] == 1 else 2)
    met = length / 2 if shape.carry_over else length  # positions of a row that meet the head, on average
    rows = (options["k"] + options["spare"]) * options["w"]
    return rows * (options.get("steps") or length) * (body + met * shape.head)


@dataclass
class Estimate:
    """What the missing rows of one or more experiments cost."""

    rows: int = 0
    seconds: float = 0.0  # on one GPU
    disk: float = 0.0  # bytes
    memory: float = 0.0  # bytes on each GPU
    unknown: set[str] = field(default_factory=set)  # models of unknown size
    seen: dict[str, set[str]] = field(default_factory=dict)  # the keys of each file that were counted

    def add(self, setup: Setup, given: Sequence[Part]) -> None:
        for part in given:
            seen = self.seen.setdefault(part.path, set())
            keys = [key for key in part.keys if key not in seen]
            seen.update(keys)
            shapes = {(name, dtype): shape_of(name) for name, dtype in part.work} if keys else {}
            self.unknown |= {name for (name, _), shape in shapes.items() if shape is None}
            one_row = part.seconds / 4  # a GPU's machine has faster cores
            one_row += sum(seconds(part.work[key], s.width, key[1]) for key, s in shapes.items() if s)
            self.rows += len(keys) if part.stage == "decode" else 0
            self.disk += len(keys) * part.size
            self.seconds += len(keys) * one_row
        self.memory = max(self.memory, memory(setup, given))


def memory(setup: Setup, given: Sequence[Part]) -> float:
    """Bytes on a GPU. The decoded model is freed before the stage score loads its judges."""
    needed = {"decode": 0.0, "score": 0.0}
    for stage, name, dtype in {(part.stage, *model) for part in given if part.keys for model in part.work}:
        if (shape := shape_of(name)) is not None:
            decoded = dtype is None
            size = number_size(setup.dtype if decoded else dtype)
            needed[stage] += decoding_memory(shape, TOKENS, size) if decoded else judge_memory(shape, JUDGED, size)
    return max(needed.values())


def outside_names(setup: Setup) -> list[str]:
    return [name for name in (*setup.settings.get("judges", ()), setup.settings.get("encoder")) if name]


# ---- printing a plan


def plan(setups: Sequence[Setup], stages: Sequence[str], command: str) -> str:
    """Describe what the experiments need, as text. No weights are read, and nothing is fetched."""
    total, rows = Estimate(), []
    work = [(setup, list(parts(setup, stages))) for setup in setups]
    for setup, given in work:
        own = Estimate()
        own.add(setup, given)
        total.add(setup, given)
        rows.append((setup.experiment.name, *_cells(own)))
    if len(setups) > 1:
        rows.append(("all, shared rows once", *_cells(total)))
    text = [
        f"Plan of `{command}`: what the missing rows need. A row is one set of answers or one measurement.",
        "",
        markdown(("experiment", "rows", "time", "disk", "GPU memory"), rows),
        "",
        *_models(work),
        *_data(work),
        f"Times are estimates for {GPU}, within a factor of two. Ranks share most of the rows.",
        "They count every candidate of a pool. Equal candidates run only once, so decoding may take less time.",
        "To make fewer rows, use --set, for example --set units=8. A finished run can be extended with a larger value.",
    ]
    if total.unknown:
        text.append(f"Not counted, because their size is unknown: {', '.join(sorted(total.unknown))}.")
    return "\n".join(text)


def _cells(own: Estimate) -> tuple[str, ...]:
    time = f"{own.seconds / 3600:,.1f} h" if own.seconds >= 3600 else f"{own.seconds / 60:.0f} min"
    return f"{own.rows:,}", time, f"{own.disk / GB:.2f} GB", f"{own.memory / GB:.0f} GB"


def _models(work: Sequence[tuple[Setup, Sequence[Part]]]) -> list[str]:
    users: dict[str, list[str]] = {}
    for setup, given in work:
        for name in dict.fromkeys(name for part in given if part.keys for name, _ in part.work):
            users.setdefault(name, []).append(setup.experiment.name)
    lines = []
    for name, experiments in users.items():
        shape, facts = shape_of(name), "on this machine"
        if not is_local(name):
            size = "size unknown" if shape is None else f"{shape.fetched / GB:.1f} GB"
            facts = f"fetched from the hub unless it was before, {size}"
            if shape and shape.gated:
                facts += ", gated: accept the licence on its hub page, then run `hf auth login`"
        lines.append(f"  {name}: {facts}; for {', '.join(experiments)}")
    return ["Models:", *lines, ""] if lines else []


def _data(work: Sequence[tuple[Setup, Sequence[Part]]]) -> list[str]:
    users: dict[str, list[str]] = {}
    paths: dict[str, Path | None] = {}
    for setup, given in work:
        busy = any(part.keys for part in given if part.stage == "decode")
        for member in members(setup) if busy else ():
            for task in member.readers:
                users.setdefault(task, []).append(setup.experiment.name)
                paths[task] = member.data_of(task) or paths.get(task)
    lines = []
    for task, experiments in users.items():
        source = str(paths[task])
        if paths[task] is None and task in TEXTS:
            source = f"give --data {task}=FILE, a text on which the model was not trained (the paper used FineWeb)"
        elif paths[task] is None:
            source = f"{SOURCES[task].hub_id} from the hub, or give --data {task}=FILE"
        lines.append(f"  {task}: {source}; for {', '.join(dict.fromkeys(experiments))}")
    return ["Data:", *lines, ""] if lines else []


# ---- opening everything before the first decode


def check(setup: Setup, stages: Sequence[str]) -> None:
    """Open or check everything that the stages need, and fetch what is on the hub. Nothing is written."""
    _check_writing(setup.root)
    if setup.decoding and "model" in setup.settings:
        with _explaining(setup.named, "--model FOLDER"):
            find(setup.named)  # the hash of its weights tells which rows are missing
    given = list(parts(setup, stages))
    if not any(part.keys for part in given):
        return
    if (setup.named if "model" in setup.settings else None) in _models_of(given, "decode"):
        with _explaining(setup.named, "--model FOLDER"):
            weight_files(find(setup.named))
            outline = setup.outline
        for case in setup.cases:
            Settings.make(outline, **case_options(case))
    if "decode" in stages:
        _check_data(setup)
    kinds = {"decode": models_of(setup, setup.experiment.measured_by), "score": scorer_names(setup)}
    for stage in (stage for stage in kinds if stage in stages):
        for scorer in kinds[stage]:
            if scorer.partition(":")[2] in _models_of(given, stage):
                check_outside(setup, scorer)
    needed = sum(len(part.keys) * part.size for part in given)
    if needed > (free := shutil.disk_usage(_existing(setup.root)).free):
        raise D5P4Error(
            f"{setup.experiment.name} writes about {needed / GB:.1f} GB into {setup.root}, where {free / GB:.1f} GB "
            "are free; free some space or give another --out"
        )
    for other in setup.experiment.others(setup):
        check(other, stages)


def _models_of(given: Sequence[Part], stage: str) -> set[str]:
    return {name for part in given if part.stage == stage and part.keys for name, _ in part.work}


def _check_data(setup: Setup) -> None:
    """Read the prompts of every task that has sets to decode, and cut the windows of real text."""
    reading = (
        case for case in setup.cases if setup.reads_data(case.task) and missing_keys(setup, answers(setup, case))
    )
    for task, count in {case.task: case.units for case in sorted(reading, key=lambda case: case.units)}.items():
        try:
            setup.task(task, count)
        except D5P4Error as reason:
            hint = "" if "--data" in str(reason) else f" (--data {task.partition(':')[0]}=FILE)"
            raise D5P4Error(f"{reason}{hint}") from reason
    for source in setup.experiment.sources(setup):
        if source.early and (keys := missing_keys(setup, source)):
            source.make(keys)


def check_outside(setup: Setup, scorer: str) -> None:
    """Open the config, the tokenizer and the names of the weight files of a judge or an encoder."""
    from ..scoring.encoder import Encoder
    from ..scoring.perplexity import CausalJudge

    kind, _, name = scorer.partition(":")
    with _explaining(name, "--set encoder=FOLDER" if kind == "cos" else "--set 'judges=[\"FOLDER\"]'"):
        if kind == "cos":
            Encoder.check(name, bool(setup.settings.get("remote_code")))
        else:
            CausalJudge.check(name)


@contextmanager
def _explaining(name: str, setting: str) -> Iterator[None]:
    """Add what to do to the error of a model that cannot be opened. `setting` is how to give a folder instead."""
    try:
        yield
    except D5P4Error as reason:
        text = str(reason).replace("give remote_code=True", "give --set remote_code=true")
        if type(reason.__cause__).__name__ == "GatedRepoError":
            text = f"{name!r} is gated: accept its licence at https://huggingface.co/{name} and run `hf auth login`"
            text += f", or give a folder: {setting}"
        elif "download from the hub failed" in text:
            text = f"{text}; check the network, or give a folder: {setting}"
        raise D5P4Error(text) from reason


def _check_writing(folder: Path) -> None:
    """Raise an error if the folder of results cannot be made or written, before models are fetched."""
    there = _existing(folder)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = "may not be written" if there.is_dir() else "is not a folder"
        raise D5P4Error(f"the results cannot go to {folder}, because {there} {reason}; give another --out")


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())
