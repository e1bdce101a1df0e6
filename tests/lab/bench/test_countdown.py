"""The countdown benchmark tunes on other puzzles, counts right answers and can continue; the demo shows figures."""

import io
import json
import re
import zlib
from dataclasses import asdict, replace

import numpy as np
import pytest
from rich.console import Console

from d5p4 import D5P4Error
from d5p4_lab.bench import RESULTS, read, solving, write
from d5p4_lab.bench import countdown as benchmark
from d5p4_lab.bench.countdown import Unit
from d5p4_lab.bench.solving import AS_TREE, DEFAULT, SURE
from d5p4_lab.bench.units import read_lines
from d5p4_lab.puzzles import problems
from examples import demo
from tests.checkpoints import write_llada

FACTS = {"machine": "none", "weights": "none"}


def line(right, different=None, rows=10, nfe=36):
    """The line of a unit of len(right) puzzles: bit i of a hexadecimal digit of `right` is 1 if answer i is right."""
    size, marks = len(right), [[int(digit, 16) >> i & 1 for i in range(4)] for digit in right]
    made = {"right": marks, "different": [*map(int, different or "0" * size)], "texts": [4] * size}
    made |= {"rows": [rows] * size, "nfe": [nfe] * size}
    means = {name: float(values.mean()) for name, values in solving.measures(made).items()}
    return {"about": FACTS, "problems": made} | means


def pretend(unit):
    digits = np.random.default_rng(zlib.crc32(str(unit).encode())).integers(0, 16, unit.puzzles)
    return line("".join(f"{digit:x}" for digit in digits), rows=int(digits.sum()))


def finish(puzzles, tune):
    """All units of a benchmark with made-up lines, in the order in which one process would run them."""
    lines = {}
    while units := [u for u in dict.fromkeys(benchmark.plan(lines, puzzles, tune)) if u not in lines]:
        lines |= {unit: pretend(unit) for unit in units}
    return lines


def test_answers_are_counted_by_form():
    right, other = "86+28=114,31-13=18,114-18=96", "86+28=114,114-31=83,83+13=96"
    reordered, wrong = "31-13=18,28+86=114,114-18=96", "86+28=114,31-13=18,114-18=95"
    texts = [[right, wrong, reordered, other], [wrong, right, right]]
    judged = solving.judge("countdown", ["86,28,13,31:96"] * 2, texts)
    assert judged == {"right": [[1, 0, 1, 1], [0, 1, 1, 0]], "different": [2, 1], "texts": [4, 2]}
    measured = {name: values.tolist() for name, values in solving.measures(judged).items()}
    assert measured == {"pass@1": [0.75, 0.5], "pass@4": [1, 1], "first": [1, 0], "different": [2, 1], "four": [1, 0]}


def test_the_sets_of_puzzles_are_disjoint():
    def keys(cases, count):
        return {(*sorted(p.numbers), p.target) for p in benchmark.puzzles_of(cases, count, 3)}

    sets = [keys(cases, 1000) for cases in benchmark.PUZZLE_SEEDS]
    assert [len(chosen) for chosen in sets] == [1000] * 3 and len(set.union(*sets)) == 3000
    assert benchmark.puzzles_of("committed", 5, 3) == problems(5, 3)


def test_every_method_is_tuned_before_it_is_tested(tmp_path):
    lines = finish(8, 4)
    tuned = {}
    for unit in lines:
        if unit.cases == "tuning" and unit.stage != "ablations":
            assert unit.puzzles == 4 and unit.seed == 0
            tuned.setdefault((unit.method, unit.numbers, unit.rule), []).append(unit)
    covered = [unit for unit in lines if unit.stage == "coverage"]
    for unit in covered:
        name = benchmark.METHODS[unit.method].like or unit.method
        best = solving.choose(lines, tuned[name, benchmark.SWEPT[unit.numbers], unit.rule])
        settings = [{field: getattr(u, field) for field in DEFAULT} for u in (unit, best)]
        if unit.method in benchmark.RIVALS.values() and unit.cases == "committed" and unit.seed == 0:
            settings[0]["temperature"] = best.temperature  # rivals are also shown with the temperatures beside it
        assert unit.puzzles == 8 and (settings[0] == settings[1] or settings[0] == DEFAULT)
    assert {u.method for u in covered} == set(benchmark.METHODS)
    assert {(u.numbers, u.cases) for u in covered} == {(n, c) for n in (3, 4, 5) for c in ("committed", "fresh")}
    seeds = {heat: {u.seed for u in covered if bool(u.temperature) is heat} for heat in (True, False)}
    assert seeds == {True: {0, 1, 2}, False: {0}}

    path = tmp_path / "results.jsonl"
    report = benchmark.draw(lines, 8, 4, path)
    assert path.stat().st_size < 400_000 and benchmark.UNMEASURED not in report
    assert re.search(r"\| 5 \| fresh \| tree, K = 32 \| ", report)
    assert all("**" not in row for row in report.splitlines() if "[seeds" in row)  # tuned methods have all seeds
    benchmark.figure(read(path), tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    part = {unit: entry for unit, entry in lines.items() if unit.stage != "coverage"}
    assert benchmark.draw(part, 8, 4, path) == report  # what has no lines keeps its figures


def test_trees_are_compared_with_rivals_at_equal_rows_puzzle_by_puzzle(monkeypatch):
    tree = Unit("coverage", "tree, K = 4", 4, SURE, 4, "committed", 0.0, 1.0, "top")
    rivals = [
        Unit("coverage", benchmark.RIVALS[size], 4, AS_TREE, 4, "committed", 1.0, None, "top", "", seed)
        for size in (4, 8)
        for seed in (0, 1)
    ]
    rights = ("1000", "1100", "1110", "1110")
    lines = {tree: line("3330", "1110", rows=20)}
    lines |= {
        unit: line(right, rows=10 * (unit.method == benchmark.RIVALS[8]) * 3 + 10)
        for unit, right in zip(rivals, rights, strict=True)
    }
    base = Unit("ablations", benchmark.BASE, 4, SURE, 4, **DEFAULT)
    lines |= {base: line("1100"), replace(base, order="left"): line("1010", rows=7)}
    monkeypatch.setattr(benchmark, "plan", lambda lines, *_: list(lines))
    monkeypatch.setattr(benchmark, "tuned_in", lambda *_: lambda unit: True)
    facts, *rows = results = benchmark.summary(lines, 4, 4)
    row = rows[0]
    # 20 rows are half-way between 10 and 40 in the logarithm: puzzle by puzzle 1, 3/4, 1/2, 0
    assert row["pass@4"][0] == 0.75 and row["rival"]["pass@4"][0] == pytest.approx(0.75 - 2.25 / 4)
    assert row["rival"]["rows"][0] == pytest.approx(20 - 25) and rows[1]["seeds"] == 2 and facts["about"] == [FACTS]
    changed = rows[-1]
    assert changed["base"]["pass@4"][0] == 0 and changed["base"]["pass@4"][2] > 0 and "base" not in rows[-2]
    drawn = benchmark.tables(results)
    assert "| 4 | tree, K = 4 | 75.0 | 75.0 | 0.75 | 20 |" in drawn["readme"]()
    assert "| 4 | committed | tree, K = 4 | 20 ± 0 | 75.0 ± " in drawn["rivals"]()
    assert drawn["ablation-order"]().count("\n") == 3 and drawn["ablation-rule"]().count("\n") == 2


def test_a_stopped_benchmark_continues(tmp_path, monkeypatch, capsys):
    folder = write_llada(tmp_path / "model")
    methods = {name: replace(benchmark.METHODS[name], values=(1.0,)) for name in (benchmark.BASE, "d5p4")}
    methods[benchmark.BASE] = replace(methods[benchmark.BASE], heats={"top": (1.0,)})
    methods["d5p4"] = replace(methods["d5p4"], heats={"confidence": (1.0,)})
    ablations = [
        changes[-1]
        for name, changes in benchmark.ABLATIONS.items()
        if name in ("temperature", "rule", "spare", "children")
    ]
    changes = {"NUMBERS": {3: "three"}, "SWEPT": {3: 3}, "SEEDS": 1, "METHODS": methods, "ABLATIONS": {"": ablations}}
    for name, value in changes.items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setitem(benchmark.WINDOW, 3, 3)  # short and quick; all answers are wrong anyway
    out = tmp_path / "lines.jsonl"
    command = ["--model", str(folder), "--device", "cpu", "--puzzles", "2", "--tune", "2", "--out", str(out)]
    benchmark.main(command)
    whole, text = read_lines(Unit, [out]), out.read_text()
    stages = (("sweep", 2), ("coverage", 3), ("ablations", 5), ("coverage", 3))
    assert [unit.stage for unit in whole] == [stage for stage, count in stages for _ in range(count)]
    assert all(line["four"] == 1 for unit, line in whole.items() if unit.method == benchmark.BASE and not unit.change)
    assert str(tmp_path) not in text  # not even in the path of the model

    out.write_text("".join(text.splitlines(keepends=True)[:3]) + text.splitlines()[3][:40])  # a kill cut the last line
    benchmark.main([*command, "--stages", "sweep,coverage"])
    assert len(read_lines(Unit, [out])) == 8
    benchmark.main(command)
    again = read_lines(Unit, [out])
    assert {u: entry["problems"] for u, entry in again.items()} == {u: entry["problems"] for u, entry in whole.items()}
    assert "13 units are finished, 0 failed" in capsys.readouterr().out
    out.write_text(json.dumps({"unit": asdict(next(iter(again))) | {"speed": 1}}) + "\n")
    with pytest.raises(D5P4Error, match="a line that is no line of this benchmark"):
        benchmark.main(command)


def shown(part, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(part)
    return console.export_text()


def test_the_demo_shows_the_committed_result(tmp_path):
    path = tmp_path / "countdown.jsonl.xz"
    assert "No figures: countdown.jsonl.xz is missing or incomplete" in shown(demo.committed_figures(path))
    results = read(RESULTS / "countdown.jsonl.xz")
    text = shown(demo.committed_figures(RESULTS / "countdown.jsonl.xz"))
    assert "1,000 held-out puzzles, each method at its best, NVIDIA H200" in text
    row = benchmark.named_rows(results, 4)[benchmark.BASE]
    assert text.splitlines()[-1].startswith("tree") and f"{row['different'][0]:.2f}" in text
    write(path, [row for row in results if row.get("method") != benchmark.BASE])
    assert "incomplete" in shown(demo.committed_figures(path))
