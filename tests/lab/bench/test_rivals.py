"""The benchmark of rivals tunes on other problems, pairs problem by problem, and goes on from committed lines."""

from dataclasses import replace

import numpy as np
import pytest

import d5p4
from d5p4 import D5P4Error
from d5p4_lab.bench import rivals, solving
from d5p4_lab.bench.rivals import SMALL, TEST, TUNING, Sizes, Unit, plan
from d5p4_lab.bench.solving import DEFAULT, TREES
from d5p4_lab.bench.units import read_lines
from tests.checkpoints import write_llada
from tests.fake import FakeModel

FACTS = {"machine": "none", "weights": "none"}


def line(right, rows):
    """The line of a unit of len(right) problems: bit i of a hexadecimal digit is 1 if answer i is right."""
    marks = [[int(digit, 16) >> i & 1 for i in range(4)] for digit in right]
    means = {"pass@4": np.mean([digit != "0" for digit in right]), "different": 1.0, "rows": rows, "nfe": 5.0}
    return {"about": FACTS, "problems": {"right": marks, "different": [sum(row) for row in marks]}, **means}


def finish(sizes):
    """All units of a run with made-up lines."""
    lines = {}
    while new := [unit for unit in dict.fromkeys(plan(lines, sizes)) if unit not in lines]:
        lines |= {unit: line("10", 10.0) for unit in new}
    return lines


def test_every_method_is_tuned_with_at_most_seven_settings_and_then_tested():
    lines = finish(Sizes(tested=4, tuned=2, seeds=2))
    for subtask, (task, *_) in rivals.SUBTASKS.items():
        for name, method in rivals.methods_of(task).items():
            units = [u for u in lines if (u.task, u.method) == (subtask, name)]
            settings = [u for u in units if u.cases == TUNING]
            assert len(settings) <= 7 and {u.problems for u in settings} <= {2} and bool(settings) != bool(method.like)
            tests = [u for u in units if u.cases == TEST]
            assert tests and {u.problems for u in tests} == {4}
            assert {u.seed for u in tests if u.temperature} in (set(), {0, 1}), name
            if name in TREES.values():
                assert replace(settings[0], problems=4, cases=TEST, **DEFAULT) in tests


def test_the_options_of_all_units_are_accepted():
    solving.register_rule()
    model = FakeModel()
    for unit in finish(SMALL):
        d5p4.Settings.make(model, **unit.options())


@pytest.mark.parametrize("subtask", ["countdown-4", pytest.param("programs-3", marks=pytest.mark.full)])
def test_problems_for_tuning_are_not_those_of_the_test(subtask):
    tuning, tested = (
        set(rivals.problems_of(subtask, cases, count)[0]) for cases, count in ((TUNING, 200), (TEST, 1000))
    )
    assert len(tuning) >= 199 and not tuning & tested


def test_differences_are_paired_and_name_the_nearest_best_of_n():
    sizes = Sizes(tested=4, tuned=2, seeds=1)
    tree = Unit("countdown-4", TREES[8], 4, TEST, **DEFAULT)
    lines = {tree: line("1110", 100.0)}
    lines[Unit("countdown-4", "best-of-8", 4, TEST)] = line("0110", 40.0)
    lines[Unit("countdown-4", "best-of-16", 4, TEST)] = line("1100", 90.0)
    lines[Unit("countdown-4", "d5p4", 4, TEST, knob=20.0)] = line("1111", 45.0)
    table = rivals.tables(lines, sizes)["countdown-4"]().splitlines()[2:]
    assert [row.split(" | ")[0] for row in table] == [
        "| best-of-8",
        "| d5p4",
        "| best-of-16",
        "| tree, K = 8 (default)",
    ]
    half = 1.96 * 0.25  # of the differences 1, 0, 0, 0
    assert table[1].endswith(f"| 45 | 5.0 | 25.0 ± {100 * half:.1f} | 50.0 ± {100 * 1.96 * 0.2887:.1f} (best-of-8) |")
    assert table[3].endswith(" | – | 25.0 ± 49.0 (best-of-16) |")
    assert rivals.tables({}, sizes)["programs-3"]() == "not measured yet"


def test_a_run_is_committed_and_goes_on_from_its_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rivals, "SUBTASKS", {"countdown-4": rivals.SUBTASKS["countdown-4"]})
    names = (TREES[4], "independent")
    methods = {name: replace(rivals.methods_of("countdown")[name], values=(None,), knob="") for name in names}
    methods = {name: replace(method, heats={"top": (0.7,)}) for name, method in methods.items()}
    monkeypatch.setattr(rivals, "methods_of", lambda task: methods)
    monkeypatch.setitem(rivals.WINDOW, 4, 3)  # short and quick; all answers are wrong anyway
    out, results = tmp_path / "lines.jsonl", tmp_path / "rivals.jsonl.xz"
    command = ["--small", "--device", "cpu", "--out", str(out), "--results", str(results)]
    command += ["--model", f"countdown={write_llada(tmp_path / 'model')}"]
    rivals.main(command)
    whole = read_lines(Unit, [out])
    assert len(whole) == 5
    rivals.main([*command, "--draw"])
    assert "| independent | top, T 0.7 | 0.0 ± 0.0 | " in capsys.readouterr().out
    kept = rivals.committed(results)
    assert kept.keys() == whole.keys() and all(("problems" in kept[u]) == (u.cases == TEST) for u in whole)
    size = results.stat().st_size
    out.unlink()
    rivals.main(command)
    assert "5 units are finished, 0 failed" in capsys.readouterr().out and not read_lines(Unit, [out])
    rivals.main([*command, "--draw"])
    assert results.stat().st_size == size and str(tmp_path) not in str(kept)
    with pytest.raises(D5P4Error, match="other weights"):
        rivals.main([*command, "--model", f"countdown={write_llada(tmp_path / 'other', seed=1)}"])
