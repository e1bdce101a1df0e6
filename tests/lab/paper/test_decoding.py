import json
import time
from pathlib import Path
from typing import Any

import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper import decoding
from d5p4_lab.paper.decoding import decode_cases, missing
from d5p4_lab.paper.drawing import Drawing
from d5p4_lab.paper.setup import Case, Experiment, Setup
from tests.checkpoints import write_llada, write_mdlm

SHORT = {"gen_length": 8, "steps": 4}


def cases(setup: Setup) -> list[Case]:
    ways = {"independent": {"method": "independent", "k": 3}, "d5p4": {"method": "d5p4", "k": 2, "w": 2, "beta": 10.0}}
    return [Case(name, SHORT | options, setup["units"], setup["task"]) for name, options in ways.items()]


EXPERIMENT = Experiment(
    "own", "Title", "nowhere", {"box": {"model": "given", "units": 4, "task": "open"}}, lambda setup: Drawing([]), cases
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"open": str(write_mdlm(folder / "mdlm")), "gsm8k": str(write_llada(folder / "llada", chat=True))}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    lines = [{"question": f"what is {i} and {'one ' * (i % 3)}?", "answer": f"it is #### {i}"} for i in range(9)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def make(root: Path, models: dict[str, str], questions: Path, task: str = "open", units: int = 4) -> Setup:
    # In float32 the last digit of a score may depend on what is decoded beside it.
    changes = {"units": units, "task": task}
    return Setup(EXPERIMENT, "box", root, models[task], questions, "cpu", "float64", changes=changes)


def rows(setup: Setup) -> list[list[dict[str, Any]]]:
    """By case and unit, without what a clock said."""
    found = [setup.rows(case).rows for case in setup.cases]
    return [[{n: v for n, v in each[str(u)].items() if n != "seconds"} for u in range(len(each))] for each in found]


@pytest.mark.parametrize("task", ["open", "gsm8k"])
def test_rows_depend_neither_on_batches_nor_on_resuming(tmp_path, models, questions, monkeypatch, task):
    whole = make(tmp_path / "whole", models, questions, task)
    assert decode_cases(whole)
    for case in whole.cases:
        assert list(whole.rows(case).rows) == ["0", "1", "2", "3"]
    for units in (1, 2, 3, 4):
        assert decode_cases(make(tmp_path / "resumed", models, questions, task, units))
    assert rows(make(tmp_path / "resumed", models, questions, task)) == rows(whole)
    monkeypatch.setattr(decoding, "_first_batch", lambda setup, case: 1)
    monkeypatch.setattr(decoding, "SECONDS", 0.0)  # so batches do not grow
    single = make(tmp_path / "single", models, questions, task)
    assert decode_cases(single)
    assert rows(single) == rows(whole)


def test_what_a_row_holds(tmp_path, models, questions):
    setup = make(tmp_path, models, questions, "gsm8k", 2)
    assert decode_cases(setup)
    task = setup.task("gsm8k", 2)
    for case, k, nominal in zip(setup.cases, (3, 2), (3, 4), strict=True):
        for unit, example in enumerate(task.examples):
            row = setup.rows(case).rows[str(unit)]
            assert len(row["texts"]) == len(row["score"]) == k and row["score"] == sorted(row["score"], reverse=True)
            assert row["distinct"] == len(set(row["texts"])) <= k and row["nfe"] == 4
            assert 0 < row["rows"] <= row["nominal"] == 4 * nominal and row["seconds"] >= 0
            assert (row["id"], row["prompt"]) == (example.id, example.prompt)
            assert row["references"] == list(example.references)
    opened = make(tmp_path, models, questions, "open", 1)
    assert decode_cases(opened) and "prompt" not in opened.rows(opened.cases[0]).rows["0"]


def test_a_deadline_that_has_passed_starts_nothing_and_the_next_run_goes_on(tmp_path, models, questions):
    setup = make(tmp_path, models, questions)
    assert missing(setup) == {"independent": [0, 1, 2, 3], "d5p4": [0, 1, 2, 3]}
    assert decode_cases(setup, deadline=time.monotonic()) is False
    assert missing(setup) == {"independent": [0, 1, 2, 3], "d5p4": [0, 1, 2, 3]}
    assert decode_cases(setup, deadline=time.monotonic() + 600) is True
    assert missing(setup) == {}
    assert decode_cases(setup, deadline=time.monotonic() - 1) is True  # nothing is left to do


def test_broken_off_between_two_batches(tmp_path, models, questions, monkeypatch):
    whole = make(tmp_path / "whole", models, questions)
    decode_cases(whole)
    monkeypatch.setattr(decoding, "_first_batch", lambda setup, case: 3)
    monkeypatch.setattr(decoding, "SECONDS", 0.0)
    broken = make(tmp_path / "broken", models, questions)
    now = iter([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])  # checked, begun, ... and so long a batch took
    clock = time.monotonic
    monkeypatch.setattr(decoding.time, "monotonic", lambda: next(now, 99.0))
    assert decode_cases(broken, deadline=50.0) is False
    monkeypatch.setattr(decoding.time, "monotonic", clock)
    left = missing(make(tmp_path / "broken", models, questions))
    assert left and sum(map(len, left.values())) < 8
    assert decode_cases(make(tmp_path / "broken", models, questions))
    assert rows(make(tmp_path / "broken", models, questions)) == rows(whole)


def test_progress_ends_at_one(tmp_path, models, questions):
    setup = make(tmp_path, models, questions)
    told: list[float] = []
    setup.progress = lambda share, text: told.append(share)
    decode_cases(setup)
    assert told[0] == 0 and told == sorted(told) and told[-1] == 1


def test_a_case_that_shares_its_options_shares_its_rows(tmp_path, models, questions):
    setup = make(tmp_path, models, questions)
    decode_cases(setup)
    case = setup.cases[0]
    renamed = Case("another name", case.options, 2)
    assert setup.rows(renamed).path == setup.rows(case).path
    for changed in (Case("x", dict(case.options) | {"k": 4}, 4), Case("x", case.options, 4, "gsm8k")):
        assert setup.rows(changed).path != setup.rows(case).path
    other = make(tmp_path, models, questions)
    other.seed = 1
    assert other.rows(case).path != setup.rows(case).path
    assert str(tmp_path) not in setup.rows(case).path.read_text(encoding="utf-8")


def test_rows_made_from_other_data_are_refused(tmp_path, models, questions):
    assert decode_cases(make(tmp_path, models, questions, "gsm8k", 2))
    lines = questions.read_text(encoding="utf-8").split("\n")
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(line.replace("what is", "how much is") for line in lines), encoding="utf-8")
    before = {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()}
    said = r"rows\S* was made from other data \(unit 0 asks .*what is.* how much is .*--out"
    with pytest.raises(D5P4Error, match=said):
        decode_cases(make(tmp_path, models, other, "gsm8k", 3))
    with pytest.raises(D5P4Error, match="was made from other data"):
        make(tmp_path, models, other, "gsm8k", 2).task("gsm8k", 2)  # as a drawing does that grades answers
    assert {file.name: file.read_bytes() for file in (tmp_path / "rows").iterdir()} == before
    assert decode_cases(make(tmp_path, models, questions, "gsm8k", 3))


def test_too_few_prompts_are_named(tmp_path, models, questions):
    with pytest.raises(D5P4Error, match="gsm8k has 9 prompts in .*test.jsonl, 10 are asked for"):
        decode_cases(make(tmp_path, models, questions, "gsm8k", 10))
