"""Helpers for tests of experiments: small runs, and checks that every run must pass."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from d5p4.distributed import Mesh
from d5p4_lab.figures import pyplot
from d5p4_lab.paper import answers, drawing, experiment, fidelity, plan, run
from d5p4_lab.paper.rows import Row, fill
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scoring import pack
from d5p4_lab.paper.setup import Experiment, Setup

DRAWN = ("table.md", "summary.json")
WORDS = "the old house stood by a long river where people came in summer and went home late with bread and wine"


def write_text(file: Path, documents: int = 3, paragraphs: int = 24) -> Path:
    """Write random prose, in paragraphs that can be continued."""
    source = random.Random(0)

    def sentence() -> str:
        return " ".join(source.choice(WORDS.split()) for _ in range(10)).capitalize() + "."

    texts = ["\n".join(" ".join(sentence() for _ in range(8)) for _ in range(paragraphs)) for _ in range(documents)]
    file.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return file


def write_truthfulqa(file: Path, count: int = 4) -> Path:
    records = [{"question": f"what is {i}?", "best_answer": f"it is {i}", "correct_answers": []} for i in range(count)]
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return file


def write_arc(file: Path, count: int = 4) -> Path:
    """Questions with choices, in the layout of ARC-Challenge and CommonsenseQA."""
    choices = {"label": ["A", "B", "C"], "text": ["red", "blue", "old"]}
    records = [{"id": str(i), "question": f"what is {i}?", "choices": choices, "answerKey": "B"} for i in range(count)]
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return file


def write_gsm8k(file: Path, count: int = 4) -> Path:
    lines = [{"question": f"what is {i} and one?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(count)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def own_experiments(patch: pytest.MonkeyPatch, *own: Experiment) -> None:
    """Make `reproduce` know the experiments of a test by their names."""
    by_name = {one.name: one for one in own}
    patch.setattr(run, "experiment", lambda name: by_name.get(name) or experiment(name))


def files(root: Path) -> dict[str, bytes]:
    """Every file that a run wrote, except config.json, which contains times."""
    written = (file for file in root.rglob("*") if file.is_file() and file.name != "config.json")
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in written}


def write_numbers(setup: Setup, numbers: Mapping[str, Sequence[Row]]) -> None:
    """Write the numbers of some cases as if their sets had been decoded and scored."""
    cases = [case for case in setup.cases if case.name in numbers]
    rows: dict[str, Row] = {}
    for case in cases:
        rows |= zip(answers.numbers(setup, [case]).keys, numbers[case.name], strict=True)
    source = replace(answers.numbers(setup, cases), make=lambda keys: {key: rows[key] for key in keys})
    assert fill(setup, [source], Mesh())


def clone(here: Path, there: Path) -> Path:
    """Copy the files of a folder of results that are committed and needed for drawing."""
    for file in (*here.rglob("*.xz"), *here.rglob("config.json")):
        (there / file.relative_to(here)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there / file.relative_to(here))
    return there


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number of a summary with its place; None stands for a number that is not finite."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from numbers(item, f"{place}/{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from numbers(item, f"{place}/{i}")
    else:
        yield place, value


def check(setup: Setup, gaps: str | None = None) -> dict[str, Any]:
    """Check the files of a finished run. Returns its summary."""
    config = json.loads((setup.folder / "config.json").read_text(encoding="utf-8"))
    stages = {"decode", "draw"} | ({"score"} if setup.experiment.scorers else set())
    assert {stage for stage, runs in config["stages"].items() if runs} == stages
    assert config["experiment"] == setup.experiment.name and config["scale"] == setup.scale
    assert [case["name"] for case in config["cases"]] == [case.name for case in setup.cases]
    text = (setup.folder / "table.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {setup.experiment.title}\n") and re.search("(decoded|measured) on", text)
    assert not re.search(r"\bnan\b", text), [line for line in text.splitlines() if re.search(r"\bnan\b", line)]
    summary = json.loads((setup.folder / "summary.json").read_text(encoding="utf-8"))
    figures = {place: x for place, x in numbers(summary["figures"]) if gaps is None or not re.search(gaps, place)}
    assert figures and summary["claims"]
    for place, x in figures.items():
        assert isinstance(x, (int, float)) and math.isfinite(x), place
    for claim in summary["claims"]:
        assert claim["verdict"] in get_args(drawing.Verdict) and claim["claim"] and claim["ours"]
        assert not re.search(r"\bnan\b", claim["ours"]), claim
    places = [place for place in (setup.root, *setup.settings.get("judges", ())) if "/" in str(place)]
    assert not any(str(place) in text + json.dumps([config, summary]) for place in places)
    return summary


def _vector(text: str, size: int) -> np.ndarray:
    vector = np.random.default_rng(zlib.crc32(text.encode())).normal(size=size)
    return vector / np.linalg.norm(vector)


def _scorer(name: str, *_: object) -> Any:
    """Replaces a judge or an encoder: its numbers depend on each text alone."""

    def score(rows: Sequence[Row]) -> list[Row]:
        scored = []
        for row in rows:
            vectors = np.stack([_vector(text, 8) for text in row["texts"]])
            nats = [3 + vector[0] for vector in vectors.tolist()]
            references = np.stack([_vector(text, 8) for text in row.get("references") or [""]])
            cosines = {"gram": (vectors @ vectors.T).tolist(), "reference": (vectors @ references.T).max(1).tolist()}
            scored.append({"ppl": {"nats": nats}, "cos": cosines, "features": pack(vectors)}[name.partition(":")[0]])
        return scored

    return score


def _save(figure: Any, file: Path, **_: object) -> None:
    file.write_bytes(b"not drawn" * 99)


@contextmanager
def cheap() -> Iterator[None]:
    """Load no outside model and draw no figure, because these take longer than everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "make_scorer", _scorer)
        patch.setattr(plan, "check_outside", lambda *_: None)
        patch.setattr(
            fidelity, "feature_reader", lambda *_: lambda texts: np.stack([_vector(text, 8) for text in texts])
        )
        patch.setattr("matplotlib.figure.Figure.savefig", _save)
        yield


def smoke(
    name: str,
    out: Path,
    changes: Mapping[str, Any],
    grown: Mapping[str, Any] | None = None,
    real: bool = False,
    gaps: str | None = None,
    **words: Any,
) -> tuple[Setup, dict[str, Any]]:
    """Run an experiment, then draw it again from its committed files alone, without data. Returns setup and summary.

    grown  changes with which the run continues, once from its committed files and once from all files; both must give
           the same numbers
    real   whether judges and figures are real
    gaps   a pattern of the figures that may be missing
    """
    there = out.with_name(f"{out.name}-clone")
    words["device"] = "cpu"
    with nullcontext() if real else cheap():
        setup = reproduce(name, out=out, changes=changes, **words)
        summary = check(setup, gaps)
        clone(out, there)
        if grown is not None:
            longer = {}
            for folder in (out, there):
                more = reproduce(name, out=folder, changes={**changes, **grown}, stages=["decode", "score"], **words)
                assert fill(more, run.sources(more, "draw"), Mesh())
                longer[folder] = {case.name: answers.numbers_of(more, case) for case in more.cases}
            assert longer[out] == longer[there]
    again = Setup(setup.experiment, setup.scale, there, setup.model_name, changes=changes, decoding=False)
    drawn = again.experiment.draw(again)
    assert json.loads(json.dumps(drawing.plain(drawn.figures))) == summary["figures"]
    assert [claim.record() for claim in drawn.claims] == summary["claims"]
    text = (setup.folder / "table.md").read_text(encoding="utf-8")
    assert all(table.markdown() in text for table in drawn.tables)
    pyplot().close("all")
    return setup, summary
