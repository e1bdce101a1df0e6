"""Ranks share decoding and scoring. Their number changes no row, and neither does the death of a rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from d5p4.distributed import connect
from d5p4.distributed import mesh as mesh_module
from d5p4.jobs.rows import RowStore
from d5p4_lab.paper import answers, run
from d5p4_lab.paper.drawing import Drawing
from d5p4_lab.paper.rows import Row
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.setup import Case, Digest, Experiment, Setup
from d5p4_lab.tables import Table
from tests.checkpoints import write_llada
from tests.distributed.ranks import finish, results, start
from tests.lab.paper.smoke import write_gsm8k

UNITS = 2
WORK = "tests.lab.paper.test_ranks:work"


def cases(setup: Setup) -> list[Case]:
    ways = {"independent": {"method": "independent", "k": 3}, "d5p4": {"method": "d5p4", "k": 2, "w": 2, "beta": 10.0}}
    return [Case(name, {"gen_length": 6, "steps": 3} | ways[name], setup["units"], "gsm8k") for name in ways]


def draw(setup: Setup) -> Drawing:
    rows = [[case.name, str(len(answers.numbers_of(setup, case)))] for case in setup.cases]
    return Drawing([Table("Sets", ("case", "count"), rows)])


SHARED = Experiment(
    name="shared",
    title="Shared",
    paper="nowhere",
    settings={"box": {"model": "given", "units": UNITS, "judges": ("smollm2",)}},
    draw=draw,
    cases=cases,
    digest=Digest("shared", lambda setup, case, unit, row, scores: {"nats": scores["ppl:smollm2"]["nats"]}),
    scorers=("ppl",),
    sources=lambda setup: [setup.source("own", ["0"], lambda keys: {key: {"rank": setup.mesh.rank} for key in keys})],
)


def score_letters(sets: Sequence[Row]) -> list[Row]:
    """Replaces a judge."""
    return [{"nats": [len(text) / 4 for text in row["texts"]]} for row in sets]


def shared(given: Path, out: Path, **words: Any) -> Setup:
    """Run the experiment on the model and questions of a folder, in float64, in which batches change no digit."""
    run.experiment, answers.make_scorer = lambda name: SHARED, lambda *_: score_letters
    model, data = str(given / "model"), given / "test.jsonl"
    return reproduce("shared", out=out, model=model, data=data, device="cpu", dtype="float64", **words)


def work(given: str, out: str, meets: bool = False, dies: int | None = None) -> dict[str, Any]:
    """One rank that runs the experiment. Returns how many times the rank decoded.

    meets    ranks wait for each other, so that every rank gets something to decode
    dies     the rank that is killed in the middle of its second line, while the others wait at theirs
    """
    mesh = connect(timeout=60)
    mesh_module.PATIENCE = 1.0
    generate, append, calls, writes = answers.generate, RowStore.append, 0, 0

    def decode(*args: Any, **words: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1 and meets:
            mesh.meet()
        return generate(*args, **words)

    def write(store: RowStore, start: int, rank: int, lines: list[bytes]) -> None:
        nonlocal writes
        writes += "own" not in store.output.name
        if writes == 2 and dies is not None:
            while rank != dies or mesh.count("written") < mesh.world:
                time.sleep(0.01)
                mesh.beat()
            append(store, start, rank, [lines[0][:-9]])
            os.kill(os.getpid(), signal.SIGKILL)
        append(store, start, rank, lines)
        mesh.count("written", int(writes == 1))

    answers.generate, RowStore.append = decode, write
    answers.AT_ONCE = (1, 1)
    shared(Path(given), Path(out), mesh=mesh)
    mesh.close()
    return {"calls": calls}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_llada(folder / "model", chat=True)
    write_gsm8k(folder / "test.jsonl", UNITS)
    return folder


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory) -> dict[str, list[Any]]:
    """The rows that one process decodes."""
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "experiment", run.experiment)
        patch.setattr(answers, "make_scorer", answers.make_scorer)
        shared(given, out)
    assert "ranks" not in json.loads((out / "shared" / "config.json").read_text())["stages"]["decode"][0]
    return rows(out)


@pytest.fixture(autouse=True)
def _own_experiment(monkeypatch):
    monkeypatch.setattr(run, "experiment", run.experiment)
    monkeypatch.setattr(answers, "make_scorer", answers.make_scorer)


def rows(out: Path) -> dict[str, list[Any]]:
    """Header and rows of every case's file, without times, and its scores. There must be no other file."""
    by_file: dict[str, list[Any]] = {}
    for file in sorted((out / "scores" / "ppl-smollm2").iterdir()):
        by_file[f"scores of {file.name}"] = [file.read_bytes()]
    for file in sorted((out / "rows").iterdir()):
        assert file.suffix == ".jsonl", file
        head, *lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        assert [line["key"] for line in lines] == [str(unit) for unit in range(UNITS)]
        by_file[file.name] = [head, *({n: v for n, v in line.items() if n != "seconds"} for line in lines)]
    assert len(by_file) == 4
    return by_file


def test_another_number_of_ranks_can_continue_a_run(tmp_path, given, alone):
    """Two ranks are killed in the middle of a line, then three continue. Two sets are left, so one rank is idle."""
    out = tmp_path / "out"
    ranks = start(WORK, 2, tmp_path / "killed", given=str(given), out=str(out), dies=1, meets=True)
    assert ranks[1].wait() == -signal.SIGKILL, ranks[1].output.read_text()
    ranks[0].kill()
    finish(ranks)
    shutil.copytree(out, tmp_path / "copy")
    ended = results(WORK, 3, tmp_path / "ranks", given=str(given), out=str(out))
    assert rows(out) == alone
    assert sum(rank["calls"] for rank in ended) == 2  # no set is decoded twice
    assert "(3 ranks, torch " in (out / "shared" / "table.md").read_text(encoding="utf-8")
    shared(given, tmp_path / "copy")  # a single process can continue, too
    assert rows(tmp_path / "copy") == alone
