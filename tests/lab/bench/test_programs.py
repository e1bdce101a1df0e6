"""The programs benchmark judges by hidden examples, averages over seeds and continues after a stop."""

import json

import pytest

from d5p4 import D5P4Error
from d5p4.eval.programs import Task
from d5p4_lab.bench import programs as benchmark
from d5p4_lab.bench.countdown import judge
from d5p4_lab.bench.programs import NAMES, TEST, Unit, plan, tasks_of
from d5p4_lab.bench.units import read_lines
from d5p4_lab.train.loop import Budget, train
from tests.lab.train.test_recipes import CPU, SmallPrograms

PROMPT = "3 1 2>2 3|5 4 9>5 6|1 1 0>1 2:"
RIGHT, VISIBLE_ONLY, WRONG = "sort take 2 map +1", "sort reverse drop 1 sort map +1", "sort"


def test_answers_are_judged_by_hidden_examples_and_counted_by_form():
    texts = [[RIGHT, VISIBLE_ONLY, "map +1 sort take 2", WRONG]] * 2
    judged = judge("programs", [PROMPT] * 2, texts, [None, "9 8 7 1>2 8"])
    assert judged == {"right": "75", "different": "21", "texts": "44"}


def test_every_method_is_tuned_and_then_tested_with_every_seed():
    """The plan goes on as lines arrive. The settings with the best pass@4 on other tasks are tested."""
    lines = {}
    while new := [unit for unit in plan(lines, (3, 4), 5, 2, 2) if unit not in lines]:
        for unit in new:
            lines[unit] = {"pass@4": float(unit.temperature == 1), "different": 0.0}
    tested = [unit for unit in lines if unit.cases == TEST]
    defaults = [unit for unit in tested if unit.method == "tree, K = 4" and unit.temperature == 0]
    assert [(unit.operations, unit.seed) for unit in defaults] == [(3, 0), (4, 0)]
    tested = [unit for unit in tested if unit not in defaults]
    assert {unit.method for unit in tested} == set(NAMES)
    assert all(unit.temperature == 1 and unit.tasks == 5 for unit in tested)
    assert len(tested) == 2 * 2 * len(NAMES) and {unit.seed for unit in tested} == {0, 1}
    assert {unit.options()["method"] for unit in lines} == {"independent", "best-of-n", "diverse-beam", "d5p4", "tree"}
    tuning = {task.prompt for task in tasks_of("tuning", 3, 30)}
    assert len(tuning) == 30 and not tuning & {task.prompt for task in tasks_of(TEST, 3, 1000)}


def test_a_stopped_benchmark_continues_and_writes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SmallPrograms, "validate", lambda recipe, folder: {})
    train(SmallPrograms(CPU, 0, toy=True), tmp_path / "model", Budget(steps=1), say=lambda line: None)
    out, results = tmp_path / "lines.jsonl", tmp_path / "results.json"
    command = ["--model", str(tmp_path / "model"), "--device", "cpu", "--tasks", "2", "--operations", "3"]
    command += ["--out", str(out), "--results", str(results), "--tune", "2", "--seeds"]
    monkeypatch.setattr(benchmark, "NAMES", ("independent", "tree, K = 4"))
    benchmark.main([*command, "1"])
    first = read_lines(Unit, [out])
    assert {unit.method for unit in first if unit.cases == TEST} == {"independent", "tree, K = 4"}
    assert all(isinstance(task, Task) and task.hidden for task in tasks_of(TEST, 3, 2))
    benchmark.main([*command, "2"])
    lines = read_lines(Unit, [out])
    assert len(lines) > len(first) and all(lines[unit] == entry for unit, entry in first.items())
    assert f"{len(lines)} units are finished, 0 failed" in capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads(results.read_text())["rows"]}
    assert rows["independent"]["seeds"] == 2 and rows["tree, K = 4"]["tasks"] == 2
    shown = benchmark.tables({"rows": list(rows.values())})["table"]()
    assert shown.count("\n") == 3 and "| 3 | tree, K = 4 | top, T " in shown and "different right programs" in shown
    assert benchmark.table({}) == "not measured yet"
    for bad in (["--tasks", "1"], ["--operations", "9"]):
        with pytest.raises(D5P4Error, match=bad[1]):
            benchmark.main([*command, "1", *bad])
