"""Several ranks share what an experiment decodes: the same rows whatever their number, and whatever dies on the way."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from d5p4.distributed import connect
from d5p4.distributed import folder as shared_folder
from d5p4.errors import D5P4Error
from d5p4_lab.paper import decoding, run
from d5p4_lab.paper.drawing import Drawing, Table
from d5p4_lab.paper.parts import fold, part
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scoring import sets
from d5p4_lab.paper.setup import Case, Experiment, Setup
from d5p4_lab.paper.store import JsonLines
from tests.checkpoints import write_llada, write_mdlm
from tests.distributed.ranks import ROOT, finish, free_port, results, start

UNITS = 10
WORK = "tests.lab.paper.test_ranks:work"


def cases(setup: Setup) -> list[Case]:
    ways = {"independent": {"method": "independent", "k": 3}, "d5p4": {"method": "d5p4", "k": 2, "w": 2, "beta": 10.0}}
    return [Case(name, {"gen_length": 8, "steps": 4} | ways[name], setup["units"], "gsm8k") for name in ways]


def measure(setup: Setup) -> None:
    lines = setup.measured("own")
    if 0 not in lines:
        lines.add(0, {"rank": setup.mesh.rank})


def draw(setup: Setup) -> Drawing:
    rows = [[case.name, str(len(sets(setup, case)))] for case in setup.cases]
    return Drawing([Table("Sets", ("case", "count"), rows)])


SHARED = Experiment("shared", "Shared", "nowhere", {"box": {"model": "given", "units": UNITS}}, draw, cases, measure)


def shared(folder: Path, out: Path, **words: Any) -> Setup:
    """The experiment on the model and questions of a folder; in float64, where batches change no digit."""
    run.experiment = lambda name: SHARED
    model, data = str(folder / "model"), folder / "test.jsonl"
    return reproduce("shared", out=out, model=model, data=data, device="cpu", dtype="float64", **words)


def work(
    given: str, out: str, fails: int | None = None, dies: int | None = None, apart: bool = False
) -> dict[str, Any]:
    """What a rank does: first without time, then to the end. One rank may fail or be killed at its third call.
    `apart`: ranks do not see each other's files."""
    mesh = connect(timeout=60)
    shared_folder.PATIENCE = 1.0
    out = f"{out}-{mesh.rank}" if apart else out
    generate, made = decoding.generate, 0

    def watched(*args: Any, **words: Any) -> Any:
        nonlocal made
        if made == 0:
            mesh.meet()  # no rank is so quick that nothing is left for another
        made += 1
        if dies is not None and mesh.rank != dies and made > 1:
            time.sleep(0.3)
        if made == 3 and mesh.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if made == 3 and mesh.rank == fails:
            raise D5P4Error("the moon is full")
        return generate(*args, **words)

    decoding.generate = watched
    decoding.SECONDS = 0.0  # so batches do not grow
    told: list[float] = []
    words: dict[str, Any] = {"mesh": mesh, "progress": lambda share, text: told.append(share)}
    early = shared(Path(given), Path(out), minutes=0 if mesh.first else None, **words).finished
    late = shared(Path(given), Path(out), **words).finished
    mesh.close()
    return {"finished": [early, late], "told": told, "calls": made}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_llada(folder / "model", chat=True)
    lines = [{"question": f"what is {i} and {'one ' * (i % 3)}?", "answer": f"it is #### {i}"} for i in range(UNITS)]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory) -> dict[str, list[Any]]:
    """The rows that one process decodes."""
    out = tmp_path_factory.mktemp("alone")
    patch = pytest.MonkeyPatch()
    patch.setattr(run, "experiment", run.experiment)
    shared(given, out)
    patch.undo()
    config = json.loads((out / "shared" / "config.json").read_text())
    assert "ranks" not in config["stages"]["decode"][0]
    return rows(out)


@pytest.fixture(autouse=True)
def _own_experiment(monkeypatch):
    monkeypatch.setattr(run, "experiment", run.experiment)


def rows(out: Path) -> dict[str, list[Any]]:
    """Header and rows of every case's file, without what a clock said. No other file may be there, no row be twice."""
    found = {}
    for file in sorted((out / "rows").iterdir()):
        assert file.suffix == ".jsonl", file
        head, *lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
        units = sorted(int(line["key"]) for line in lines)
        assert units == list(range(UNITS)), units
        for line in lines:
            del line["seconds"]
        found[file.name] = [head, *sorted(lines, key=lambda line: int(line["key"]))]
    assert len(found) == 2
    return found


def parts(out: Path) -> list[Path]:
    return sorted((out / "rows").glob("*.part-*"))


def check(out: Path, found: list[dict[str, Any]], calls: int) -> None:
    """What ranks promise that have finished together, with so many sets that were left to decode."""
    world = len(found)
    assert [each["finished"] for each in found] == [[False, True]] * world  # the first rank's deadline counts
    assert sum(each["calls"] for each in found) == calls and all(each["calls"] for each in found)
    told = found[0]["told"]
    assert told == sorted(told) and told[-1] == 1 and [each["told"] for each in found[1:]] == [[]] * (world - 1)
    measured = (out / "shared" / "own.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in measured[1:]] == [{"key": "0", "rank": 0}]
    table = (out / "shared" / "table.md").read_text(encoding="utf-8")
    assert "| d5p4 | 10 |" in table and " ranks, torch " in table


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_decode_what_one_process_decodes(tmp_path, given, alone, world):
    out = tmp_path / "out"
    found = results(WORK, world, tmp_path / "ranks", given=str(given), out=str(out))
    assert rows(out) == alone
    check(out, found, 2 * UNITS)
    config = json.loads((out / "shared" / "config.json").read_text())
    assert config["stages"]["decode"][-1]["ranks"] == world


def killed(tmp_path: Path, given: Path, out: Path, victim: int = 1) -> None:
    """Two ranks of which one is killed in the middle, then the other as well; both have written something."""
    processes = start(WORK, 2, tmp_path / "killed", given=str(given), out=str(out), dies=victim)
    assert processes[victim].wait(100) == -signal.SIGKILL
    while not any(file.name.endswith(f"-{1 - victim}") for file in parts(out)) and processes[1 - victim].poll() is None:
        time.sleep(0.02)
    processes[1 - victim].kill()
    finish(processes)


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.full)])
def test_after_a_kill_another_number_of_ranks_goes_on(tmp_path, given, alone, world):
    out = tmp_path / "out"
    killed(tmp_path, given, out)
    left = parts(out)
    held = [line for file in left for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    assert len({file.name[-1] for file in left}) == 2 and 2 <= len(held) < 2 * UNITS - 2
    with left[0].open("ab") as file:
        file.write(b'{"key":"9","texts":["ha')
    shutil.copy(left[-1], left[-1].with_name(left[-1].name.rsplit("-", 2)[0] + "-0dead000-17"))  # of an older start
    shutil.copytree(out, tmp_path / "copy")
    found = results(WORK, world, tmp_path / "ranks", given=str(given), out=str(out))
    assert rows(out) == alone
    check(out, found, 2 * UNITS - len(held))  # nothing is decoded twice
    shared(given, tmp_path / "copy")  # one process can go on too
    assert rows(tmp_path / "copy") == alone


@pytest.mark.full
def test_a_rank_that_fails_says_why(tmp_path, given, alone):
    out = tmp_path / "out"
    ended = finish(start(WORK, 2, tmp_path / "ranks", given=str(given), out=str(out), fails=1))
    assert all(code != 0 for code, _ in ended)
    assert "rank 1 gave up: the moon is full" in ended[0][1] and "the moon is full" in ended[1][1]
    shared(given, out)
    assert rows(out) == alone


@pytest.mark.full
def test_ranks_that_do_not_share_a_folder_decode_nothing(tmp_path, given):
    ended = finish(start(WORK, 2, tmp_path / "ranks", given=str(given), out=str(tmp_path / "out"), apart=True))
    assert all(code != 0 for code, _ in ended)
    for _, said in ended:
        assert "rank 1 does not see what rank 0 writes into" in said and "all hosts share" in said
    assert not parts(tmp_path / "out-0") and not parts(tmp_path / "out-1")


def test_parts_are_folded_once(tmp_path):
    """Whatever was done before a kill: rows in the file already, a part without a whole line, a broken last line."""
    case = JsonLines(tmp_path / "case.jsonl", {"seed": 0})
    case.add(1, {"x": 1})
    part(case, "a", 0).add_all({"3": {"x": 3}, "1": {"x": 1}})
    part(case, "a", 1).add_all({"2": {"x": 2}, "10": {"x": 10}})
    part(case, "b", 0).add(2, {"x": 2})
    (tmp_path / "case.jsonl.part-c-0").write_bytes(b'{"header":{"se')
    with part(case, "a", 1).path.open("ab") as file:
        file.write(b'{"key":"4","x"')
    broken = part(case, "a", 1).path.read_bytes()
    assert list(part(case, "a", 1).rows) == ["2", "10"]
    assert part(case, "a", 1).path.read_bytes() == broken and not part(case, "c", 0).rows
    fold(case)
    again = JsonLines(case.path, {"seed": 0})
    assert [(row["key"], row["x"]) for row in again] == [("1", 1), ("2", 2), ("3", 3), ("10", 10)]
    assert [file.name for file in tmp_path.iterdir()] == ["case.jsonl"]
    before = case.path.read_bytes()
    fold(JsonLines(case.path, {"seed": 0}))
    assert case.path.read_bytes() == before


def test_parts_of_something_else_are_refused(tmp_path):
    case = JsonLines(tmp_path / "case.jsonl", {"seed": 0})
    part(JsonLines(case.path, {"seed": 1}), "a", 0).add(0, {})
    with pytest.raises(D5P4Error, match="seed was 1 and is 0"):
        fold(case)
    assert parts_in(tmp_path) == ["case.jsonl.part-a-0"]


def parts_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.full
def test_kills_at_random_moments(tmp_path, given, alone):
    source, out = random.Random(6), tmp_path / "out"
    deaths = 0
    for number in range(40):
        world = source.randint(1, 3)
        processes = start(WORK, world, tmp_path / f"{number}", given=str(given), out=str(out), dies=-1)
        try:
            processes[0].wait(source.uniform(3, 8))
        except subprocess.TimeoutExpired:
            deaths += 1
            for process in source.sample(processes, world):
                process.send_signal(signal.SIGKILL)
        if all(code == 0 for code, _ in finish(processes)):
            break
    assert deaths > 0 and rows(out) == alone


@pytest.mark.full
def test_the_command_under_torchrun(tmp_path):
    model, out = write_mdlm(tmp_path / "model"), tmp_path / "out"
    words = ["reproduce", "pareto", "--stage", "decode", "--model", str(model), "--device", "cpu", "--out", str(out)]
    for change in ("gen_length=8", "steps=4", "units=2", "k=2", "w=2"):
        words += ["--set", change]
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *launch, "d5p4", *words, *more]
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)

    short = call("--minutes", "0", "--quiet")
    assert short.returncode != 0 and re.fullmatch(r"pareto: not finished, \d+ sets left; run .*\n", short.stdout)
    whole = call()
    assert whole.returncode == 0 and whole.stdout == f"pareto: {out / 'pareto'}\n", whole.stderr
    told = [line for line in whole.stderr.splitlines() if line.startswith("pareto ")]
    assert told[-1] == "pareto 100 % decoded" and told.count(told[-1]) == 1
    config = json.loads((out / "pareto" / "config.json").read_text())
    assert config["stages"]["decode"][0]["ranks"] == 2
    files = {file.name: file.read_text(encoding="utf-8").splitlines()[1:] for file in (out / "rows").iterdir()}
    assert sum(map(len, files.values())) == sum(case["units"] for case in config["cases"])
