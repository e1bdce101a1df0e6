"""The countdown benchmark counts right answers, tunes on separate problems and can continue; the demo shows figures."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

import d5p4
from d5p4 import D5P4Error
from d5p4.eval.countdown import Problem, canonical
from d5p4.models.load import find
from d5p4_lab.bench import RESULTS
from d5p4_lab.bench import countdown as benchmark
from d5p4_lab.bench.countdown import Book, Method, Record, Run
from examples import demo
from tests.checkpoints import write_llada

PUZZLE = Problem.parse("86,28,13,31:96")
RIGHT = "86+28=114,31-13=18,114-18=96"
REORDERED = "31-13=18,28+86=114,114-18=96"
OTHER = "86+28=114,114-31=83,83+13=96"
WRONG = "86+28=114,31-13=18,114-18=95"
INDEPENDENT, D5P4 = benchmark.METHODS[:2]


def record(run, right, distinct=None, rows=1.0):
    return Record(run.identity(), {}, 0, right, distinct or "a" * len(right), rows, 16.0, 1.0)


def pretend(run):
    """A record of the right size for a run that was not done."""
    digits = np.random.default_rng(run.seed).integers(0, 16, run.problems)
    return replace(record(run, "".join(f"{d:x}" for d in digits)), settings={"gen_length": 36, "params": {"beta": 1.0}})


def test_answers_are_counted_by_text_and_by_form():
    right, distinct = benchmark.judge([PUZZLE, PUZZLE], [[RIGHT, WRONG, REORDERED, OTHER], [WRONG, RIGHT, RIGHT, ""]])
    result = record(Run("test", INDEPENDENT, 4, 2, 0), right, distinct)
    assert result.right_answers().tolist() == [[True, False, True, True], [False, True, True, False]]
    assert result.different(canonical=False).tolist() == [3, 1]
    assert canonical(RIGHT) == canonical(REORDERED) and result.different(canonical=True).tolist() == [2, 1]
    assert result.solved(1).tolist() == [0.75, 0.5] and result.solved(4).tolist() == [1, 1]


def test_tuning_problems_are_no_test_problems():
    def keys(role, count):
        return {(*sorted(p.numbers), p.target) for p in benchmark.cases(role, count, 3)}

    tune = keys("tune", 300)
    assert len(tune) == 300 and not tune & keys("test", 1000)


def test_the_plan_sweeps_before_it_tests_and_fits_a_small_file(tmp_path):
    book = Book(tmp_path / "results.json")
    runs = []
    for run in benchmark.plan(book, benchmark.METHODS, [4, 5], 1000, 500, 3):
        runs.append(run)
        if book.find(run) is None:
            book.records.append(pretend(run))
    book.write()
    assert book.path.stat().st_size < 300_000
    test = [run for run in runs if run.role == "test"]
    assert len(test) == len(set(map(str, test))) == 3 * (2 * len(benchmark.METHODS) + 2 * len(benchmark.GUIDANCE))
    for run in test:
        sweep = ("tune", run.method, run.numbers)
        tuned = [r for r in runs[: runs.index(run)] if (r.role, r.method, r.numbers) == sweep]
        assert {r.value for r in tuned} == set(run.method.values)
    first_five = next(i for i, run in enumerate(runs) if run.numbers == 5)
    assert {run.method.name for run in runs[:first_five]} == {m.name for m in benchmark.METHODS if m.main}
    assert Book.open(book.path).records == book.records


def test_the_best_value_goes_to_the_test(tmp_path):
    book = Book(tmp_path / "results.json")
    scores = {1.0: "100f", 3.0: "0111", 10.0: "ff11", 30.0: "f111"}
    for run in benchmark.sweep(D5P4, 4, 4):
        book.records.append(record(run, scores.get(run.value, "0000")))
    assert book.best(D5P4, 4, 4) == 10.0
    assert "3: 75.0, **10: 100.0**, 30: 100.0" in benchmark.tables(book)["sweeps"]()
    del book.records[-1]
    with pytest.raises(D5P4Error, match="sweep of d5p4 at 4 numbers"):
        book.best(D5P4, 4, 4)


def test_figures_are_means_over_seeds_with_the_cut_of_the_unsolved():
    base = [record(Run("test", INDEPENDENT, 4, 4, s), right, rows=s + 1) for s, right in enumerate(("f000", "f100"))]
    ours = [record(Run("test", D5P4, 4, 4, s, 10.0), right, "gaaa") for s, right in enumerate(("f100", "f110"))]
    first, second = benchmark.summary(base + ours)
    assert first["pass@1"][0] == pytest.approx((1 + 1.25) / 8, abs=1e-5) and first["pass@4"][0] == 0.375
    assert first["rows"] == 1.5 and "unsolved_cut" not in first
    assert second["pass@4"][0] == 0.625 and second["unsolved_cut"][0] == pytest.approx(1 - 1.5 / 2.5)
    assert second["distinct_right"][0] == second["distinct_forms"][0] == 0.25 and second["value"] == 10


def test_a_stopped_benchmark_continues(tmp_path, monkeypatch, capsys):
    folder = write_llada(tmp_path / "model")
    few = (INDEPENDENT, Method("d5p4", {"method": "d5p4"}, "beta", (100.0,)))
    monkeypatch.setattr(benchmark, "METHODS", few)
    monkeypatch.setitem(benchmark.WINDOW, 3, 3)  # short and quick; all answers are wrong anyway
    out = tmp_path / "results.json"
    sizes = "--device cpu --problems 2 --tune 2 --seeds 1 --numbers 3"
    command = ["--model", str(folder), *sizes.split(), "--out", str(out)]
    benchmark.main(command)
    whole = Book.open(out)
    assert [(r.run["role"], r.run["value"]) for r in whole.records] == [("test", None), ("tune", 100), ("test", 100)]
    assert whole.records[2].rows_nominal == 16 and 1 < whole.records[2].rows <= 16
    assert str(tmp_path) not in out.read_text()  # not even in the path of the model
    assert whole.sessions[0]["command"].startswith("python -m d5p4_lab bench countdown --model model --device cpu")

    book = Book.open(out)
    del book.records[2:]
    book.write()
    benchmark.main(command)
    again = Book.open(out)
    assert [r.session for r in again.records] == [0, 0, 1]
    plain = dict(session=0, seconds=0)
    assert [replace(r, **plain) for r in again.records] == [replace(r, **plain) for r in whole.records]

    capsys.readouterr()
    del book.records[1:]
    book.write()
    benchmark.main([*command, "--minutes", "0"])
    assert "there is no time left for tune 3 numbers: d5p4, beta 100" in capsys.readouterr().out
    assert len(Book.open(out).records) == 1

    other = write_llada(tmp_path / "other", seed=1)
    with pytest.raises(D5P4Error, match="other weights"):
        benchmark.main(["--model", str(other), *command[2:]])
    for text in ('{"model": "x"}', "[]", "{"):
        out.write_text(text)
        with pytest.raises(D5P4Error, match="is not a results file"):
            Book.open(out)


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


def test_a_run_today_has_the_settings_of_the_committed_results():
    """The committed results are of the shipped weights, so the benchmark can continue them."""
    book, methods = Book.open(RESULTS / "countdown.json"), {method.name: method for method in benchmark.METHODS}
    assert book.weights == benchmark.weights_hash(find("countdown"))
    model = d5p4.load("countdown", device="cpu")
    for result in book.records:
        identity = {name: value for name, value in result.run.items() if name != "knob"}
        run = Run(**identity | {"method": methods[identity["method"]]})
        assert run.identity() == result.run
        assert benchmark.resolved(run, model) == result.settings, identity
