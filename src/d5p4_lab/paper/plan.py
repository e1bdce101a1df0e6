"""What a run needs: rows, models and data. `plan` names what is missing, and `check` opens it before decoding."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from d5p4.errors import D5P4Error
from d5p4.models.load import find, locate, shipped_models
from d5p4.options import Settings

from ..scoring.encoder import DEFAULT as MINILM
from ..scoring.encoder import Encoder
from ..scoring.perplexity import SMOLLM2, CausalJudge
from ..tables import markdown
from .answers import answers, case_options, scores
from .rows import missing_keys
from .scoring import models_of, scorer_names
from .setup import TEXTS, Setup
from .tasks import SOURCES


class Part(NamedTuple):
    """Missing rows of one source, and the models that make them."""

    stage: str
    path: str
    keys: list[str]
    models: Sequence[str]


def parts(setup: Setup, stages: Sequence[str]) -> Iterator[Part]:
    """The rows that the stages have to make."""
    if "decode" in stages:
        for source in setup.experiment.sources(setup):
            yield Part("decode", source.path, missing_keys(setup, source), source.models)
        for source in (answers(setup, case) for case in setup.cases):
            yield Part("decode", source.path, missing_keys(setup, source), [setup.named])
    for scorer in scorer_names(setup) if "score" in stages else ():
        for case in filter(setup.experiment.scored, setup.cases):
            done, source = scores(setup, case, scorer), answers(setup, case)
            keys = [key for key in source.keys if key not in setup.rows(done) and not source.elsewhere(key)]
            yield Part("score", done.path, keys, [scorer.partition(":")[2]])


# ---- printing a plan


def plan(setups: Sequence[Setup], stages: Sequence[str], command: str) -> str:
    """Describe what the experiments need, as text. No weights are read, and nothing is fetched."""
    work = [(setup, list(parts(setup, stages))) for setup in setups]
    rows, total = list[tuple[str, str]](), set[tuple[str, str]]()
    for setup, given in work:
        own = {(str(setup.root / part.path), key) for part in given if part.stage == "decode" for key in part.keys}
        variant = f", {setup.scale}" * (setup.scale != work[0][0].scale)
        rows.append((setup.experiment.name + variant, f"{len(own):,}"))
        total |= own
    if len(setups) > 1:
        rows.append(("all, shared rows once", f"{len(total):,}"))
    text = [
        f"Plan of `{command}`: the missing rows. A row is one set of answers or one measurement.",
        "",
        markdown(("experiment", "rows"), rows),
        "",
        *_models(work),
        *_data(work),
        "To make fewer rows, use --set, for example --set units=8. A finished run can be extended with a larger value.",
    ]
    return "\n".join(text)


def _models(work: Sequence[tuple[Setup, Sequence[Part]]]) -> list[str]:
    users: dict[str, list[str]] = {}
    for setup, given in work:
        for name in dict.fromkeys(name for part in given if part.keys for name in part.models):
            users.setdefault(name, []).append(setup.experiment.name)
    users, lines = {name: list(dict.fromkeys(used)) for name, used in users.items()}, []
    for name, experiments in users.items():
        inside = name in (SMOLLM2, MINILM) or name in shipped_models() or Path(name).expanduser().is_dir()
        where = "on this machine" if inside else "fetched from the hub unless it was before"
        lines.append(f"  {name}: {where}; for {', '.join(experiments)}")
    return ["Models:", *lines, ""] if lines else []


def _data(work: Sequence[tuple[Setup, Sequence[Part]]]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for setup, given in work:
        busy = any(part.keys for part in given if part.stage == "decode")
        for task in setup.readers if busy else ():
            source = str(setup.data_of(task) or "")
            if not source and task in TEXTS:
                source = f"give --data {task}=FILE, a text on which the model was not trained (the paper used FineWeb)"
            elif not source:
                source = f"{SOURCES[task].hub_id} from the hub, or give --data {task}=FILE"
            lines.setdefault(f"  {task}: {source}", []).append(setup.experiment.name)
    listed = [f"{line}; for {', '.join(dict.fromkeys(names))}" for line, names in lines.items()]
    return ["Data:", *listed, ""] if lines else []


# ---- opening everything before the first decode


def check(setup: Setup, stages: Sequence[str]) -> None:
    """Open or check everything that the stages need, and fetch what is on the hub. Nothing is written."""
    there = next(place for place in (setup.root, *setup.root.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = "may not be written" if there.is_dir() else "is not a folder"
        raise D5P4Error(f"the results cannot go to {setup.root}, because {there} {reason}; give another --out")
    decoded = setup.named if "model" in setup.settings else None
    if setup.decoding and decoded:
        with _explaining(decoded, "--model FOLDER"):
            find(decoded)  # the hash of its weights tells which rows are missing
    needed: dict[str, set[str]] = {"decode": set(), "score": set()}  # the models of each stage that have work
    for part in parts(setup, stages):
        needed[part.stage] |= set(part.models) if part.keys else set()
    if not any(needed.values()):
        return
    if decoded in needed["decode"]:
        with _explaining(setup.named, "--model FOLDER"):
            locate(setup.named).files()
            outline = setup.outline
        for case in setup.cases:
            Settings.make(outline, **case_options(case))
    if "decode" in stages:
        _check_data(setup)
    kinds = {"decode": models_of(setup, setup.experiment.measured_by), "score": scorer_names(setup)}
    for scorer in (scorer for stage, scorers in kinds.items() for scorer in scorers if stage in stages):
        if scorer.partition(":")[2] in needed["decode"] | needed["score"]:
            check_outside(setup, scorer)


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
    kind, _, name = scorer.partition(":")
    with _explaining(name, "--set encoder=FOLDER" if kind == "cos" else "--set 'judges=[\"FOLDER\"]'"):
        if kind == "cos":
            Encoder.check(name)
        else:
            CausalJudge.check(name)


@contextmanager
def _explaining(name: str, setting: str) -> Iterator[None]:
    """Add what to do to the error of a model that cannot be opened. `setting` is how to give a folder instead."""
    try:
        yield
    except D5P4Error as reason:
        text = str(reason)
        if type(reason.__cause__).__name__ == "GatedRepoError":
            text = f"{name!r} is gated: accept its licence at https://huggingface.co/{name} and run `hf auth login`"
            text += f", or give a folder: {setting}"
        elif "download from the hub failed" in text:
            text = f"{text}; check the network, or give a folder: {setting}"
        raise D5P4Error(text) from reason
