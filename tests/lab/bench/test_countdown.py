"""The countdown benchmark tunes on other puzzles, counts right answers and can continue; the demo shows figures."""

import io
import json
import re
import zlib
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from d5p4 import D5P4Error
from d5p4.eval.countdown import Problem, canonical
from d5p4_lab.bench import RESULTS
from d5p4_lab.bench import countdown as benchmark
from d5p4_lab.bench.countdown import SCHEDULE, SURE, Unit
from d5p4_lab.bench.units import read_lines
from examples import demo
from tests.checkpoints import write_llada

PUZZLE = Problem.parse("86,28,13,31:96")
RIGHT = "86+28=114,31-13=18,114-18=96"
REORDERED = "31-13=18,28+86=114,114-18=96"
OTHER = "86+28=114,114-31=83,83+13=96"
WRONG = "86+28=114,31-13=18,114-18=95"
FACTS = {"machine": "none", "weights": "none"}


def line(right, different=None, rows=10, nfe=36):
    """The line of a unit of len(right) puzzles."""
    size = len(right)
    made = {"right": right, "different": different or "0" * size, "rows": [rows] * size, "nfe": [nfe] * size}
    made = {"about": FACTS, "puzzles": made}
    return made | {name: float(values.mean()) for name, values in benchmark.measures(made).items()}


def pretend(unit):
    digits = np.random.default_rng(zlib.crc32(str(unit).encode())).integers(0, 16, unit.puzzles)
    return line("".join(f"{digit:x}" for digit in digits))


def finish(puzzles, tune):
    """All units of a benchmark with made-up lines, in the order in which one process would run them."""
    lines = {}
    while unit := next((u for u in benchmark.plan(lines, puzzles, tune) if u not in lines), None):
        lines[unit] = pretend(unit)
    return lines


def test_answers_are_counted_by_form():
    texts = [[RIGHT, WRONG, REORDERED, OTHER], [WRONG, RIGHT, RIGHT, ""]]
    right, different = benchmark.judge([PUZZLE, PUZZLE], texts)
    assert (right, different) == ("d6", "21") and canonical(RIGHT) == canonical(REORDERED)
    measured = benchmark.measures(line(right, different))
    assert measured["pass@1"].tolist() == [0.75, 0.5] and measured["pass@4"].tolist() == [1, 1]
    assert measured["first"].tolist() == [1, 0] and measured["different"].tolist() == [2, 1]


def test_tuning_puzzles_are_no_test_puzzles():
    def keys(tuning, count):
        return {(*sorted(p.numbers), p.target) for p in benchmark.cases(tuning, count, 3)}

    tune = keys(True, 300)
    assert len(tune) == 300 and not tune & keys(False, 1000)


def test_every_method_is_tuned_before_it_is_tested(tmp_path):
    lines = finish(8, 4)
    units = list(lines)
    settings = {"temperature", "knob"}
    for place, unit in enumerate(units):
        if unit.stage == "sweep":
            assert unit.puzzles == 4 and unit.seed == 0
            continue
        tuned_at = SURE if unit.rule.startswith("threshold") else unit.rule
        tuned = {u: lines[u] for u in units[:place] if u.stage == "sweep" and u.rule == tuned_at}
        same = [u for u in tuned if all(getattr(u, f) == getattr(unit, f) for f in ("method", "numbers", "order"))]
        best = benchmark.choose(lines, same)
        assert unit.puzzles == 8 and all(getattr(best, name) == getattr(unit, name) for name in settings)
    table = [unit for unit in units if unit.stage == "table"]
    assert {(u.method, u.numbers) for u in table} == {(m, n) for m in benchmark.METHODS for n in (4, 5)}
    seeds = {rule: {u.seed for u in table if u.rule.startswith(rule)} for rule in ("schedule", "threshold", "factor")}
    assert seeds == {"schedule": {0, 1, 2}, "threshold": {0, 1, 2}, "factor": {0}}
    assert [u.rule for u in table].index("threshold 0.9") > max(i for i, u in enumerate(table) if u.rule == SURE)
    assert sum(unit.stage == "positions" for unit in units) == 8 and sum(unit.stage == "orders" for unit in units) == 16

    path = tmp_path / "results.json"
    report = benchmark.draw(lines, 8, 4, path)
    results = json.loads(path.read_text())
    assert len(results["rows"]) == 10 * 6 + 8 + 16 and path.stat().st_size < 150_000
    assert sum(row["chosen"] for row in results["sweeps"]) == 10 * 4 + 16
    for start in (r"\| 4 \| schedule \| confidence \| diverse-beam \| (\*\*)?T 0.5: ", r"\| d5p4 \| (\*\*)?0.1: "):
        assert re.search(start, report)
    assert report.count("[seeds: 1]") == 20


def test_of_equal_settings_the_one_with_more_different_answers_is_chosen():
    first = Unit("sweep", "d5p4", 4, SCHEDULE, 4, knob=100.0)
    lines = {
        replace(first, temperature=1.0): line("ff00", "1100"),
        replace(first, temperature=2.0): line("1f00", "1300"),
    }
    units = [*lines, replace(first, temperature=3.0)]
    assert benchmark.choose(lines, units) is None
    lines[units[2]] = line("f000", "4000")
    assert benchmark.choose(lines, units).temperature == 2


def test_figures_are_means_over_seeds_and_rules_are_compared_puzzle_by_puzzle(monkeypatch):
    first = Unit("table", "independent", 4, SCHEDULE, 4)
    lines = {first: line("f000"), replace(first, seed=1): line("f100", "1100", rows=20)}
    lines |= {replace(first, rule=SURE, seed=seed): line("f010", nfe=12) for seed in (0, 1)}
    monkeypatch.setattr(benchmark, "plan", lambda lines, *_: list(lines))
    results = benchmark.summary(lines, 4, 4)
    schedule, sure = results["rows"]
    assert schedule["pass@1"][0] == pytest.approx((1 + 1.25) / 8, abs=1e-5) and schedule["pass@4"][0] == 0.375
    assert schedule["rows"] == [15, 15, 15] and schedule["different"][0] == 0.25 and schedule["seeds"] == 2
    assert sure["against_schedule"][0] == pytest.approx(0.5 - 0.375) and sure["nfe"][0] == 12
    assert "| 4 | independent | 37.5/50.0 | 0.25/0.00 | 15/10 | 36/12 |" in benchmark.tables(results)["readme"]()
    assert "| four numbers: solved | 28.1 ±" in benchmark.tables(results)["card"]()


def test_rules_become_options():
    unit = Unit("table", "best-of-16", 5, "entropy-bound 0.2", 4, 2.0, False, positions="masked")
    options = unit.options()
    assert options["reveal"] == "entropy-bound" and options["entropy_bound"] == 0.2 and options["repeats"] is False
    assert options["positions"] == "masked" and options["gen_length"] == 48 and options["temperature"] == 2
    assert not {"reveal", "positions"} & set(replace(unit, rule=SCHEDULE, positions="").options())


def test_a_stopped_benchmark_continues(tmp_path, monkeypatch, capsys):
    folder = write_llada(tmp_path / "model")
    for name, value in (("NUMBERS", (3,)), ("SEEDS", 1), ("VALUED", {}), ("ORDERS", ()), ("TEMPERATURES", (1.0,))):
        monkeypatch.setattr(benchmark, name, value)
    methods = {"d5p4": benchmark.Method({"method": "d5p4"}, "beta", (100.0, 20.0))}
    monkeypatch.setattr(benchmark, "METHODS", methods)
    monkeypatch.setitem(benchmark.WINDOW, 3, 3)  # short and quick; all answers are wrong anyway
    out = tmp_path / "lines.jsonl"
    command = ["--model", str(folder), "--device", "cpu", "--puzzles", "2", "--tune", "2", "--out", str(out)]
    benchmark.main(command)
    whole = read_lines(Unit, [out])
    assert [u.stage for u in whole] == ["sweep"] * 4 + ["positions"] * 4 + ["table"] * 4
    assert all(entry["nfe"] == 3 and 3 < entry["rows"] <= 1 + 2 * 16 for entry in whole.values())
    assert str(tmp_path) not in out.read_text()  # not even in the path of the model

    text = out.read_text()
    out.write_text("".join(text.splitlines(keepends=True)[:5]) + text.splitlines()[5][:40])  # a kill cut the last line
    benchmark.main([*command, "--stages", "sweep,positions"])
    assert len(read_lines(Unit, [out])) == 8
    benchmark.main(command)
    again = read_lines(Unit, [out])
    assert {u: entry["puzzles"] for u, entry in again.items()} == {u: entry["puzzles"] for u, entry in whole.items()}
    assert "12 units are finished, 0 failed" in capsys.readouterr().out

    other = write_llada(tmp_path / "other", seed=1)
    with pytest.raises(D5P4Error, match="other weights"):
        benchmark.main(["--model", str(other), *command[2:]])
    with pytest.raises(D5P4Error, match="no stage late"):
        benchmark.main([*command, "--stages", "late"])
    out.write_text(json.dumps({"unit": asdict(next(iter(again))) | {"speed": 1}}) + "\n")
    with pytest.raises(D5P4Error, match="line 1 is no line of this benchmark"):
        benchmark.main(command)


def shown(part, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(part)
    return console.export_text()


def test_the_demo_shows_the_committed_result(tmp_path):
    assert "No figures: spare.json is missing or incomplete" in shown(demo.committed_figures(tmp_path / "spare.json"))
    results = json.loads((RESULTS / "spare.json").read_text())
    text = shown(demo.committed_figures(RESULTS / "spare.json"))
    assert "500 puzzles on NVIDIA H200" in text
    row = next(row for row in results["rows"] if row["numbers"] == 4 and row["spare"] == 4 and row["method"] == "d5p4")
    assert text.splitlines()[-1].startswith("d5p4, distinct, spare 4") and f"{row['different'][0]:.1f} ±" in text
    results["rows"].remove(row)
    (tmp_path / "spare.json").write_text(json.dumps(results))
    assert "incomplete" in shown(demo.committed_figures(tmp_path / "spare.json"))


def test_the_demo_marks_each_answer():
    result = SimpleNamespace(texts=[[RIGHT, RIGHT, WRONG, OTHER]], rows=torch.tensor([98]))
    lines = demo.column(PUZZLE, result, 0, 70).plain.splitlines()
    assert lines[0] == f"✓ {RIGHT}" and lines[1] == f"✓ {RIGHT}  repeated"
    assert lines[2].startswith(f"✗ {WRONG}  ") and "96" in lines[2].removeprefix(f"✗ {WRONG}")
    assert lines[4] == "3 right, 2 different · 98 rows"
    narrow = demo.column(PUZZLE, result, 0, 36).plain.splitlines()
    assert narrow[2] == f"✗ {WRONG}"
