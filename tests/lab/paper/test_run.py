import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from d5p4_lab.paper.store import write_json
from typer.testing import CliRunner

from d5p4.cli import app
from d5p4.errors import D5P4Error
from d5p4.eval.stats import Figure, figure
from d5p4_lab.__main__ import _change, _Teller
from d5p4_lab.paper import EXPERIMENTS, experiment, run
from d5p4_lab.paper.claims import write_claims
from d5p4_lab.paper.drawing import (
    Claim,
    Drawing,
    Table,
    agreed,
    decided,
    every,
    plain,
    pyplot,
    shown,
)
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scoring import sets
from d5p4_lab.paper.setup import Case, Experiment, Setup
from tests.checkpoints import write_mdlm


def squares(setup: Setup) -> None:
    lines = setup.measured("rows", power=setup["power"])
    for number in range(setup["count"]):
        if number not in lines:
            setup.progress(number / setup["count"], f"number {number}")
            lines.add(number, {"value": number ** setup["power"]})


def drawn(setup: Setup) -> Drawing:
    values = [row["value"] for row in setup.measured("rows", power=setup["power"])]
    plot, axis = pyplot().subplots(figsize=(3, 2))
    axis.plot(values)
    mean = figure(values)
    claim = Claim("grows | always", "yes", shown(mean), decided(figure([value + 5 for value in values])))
    return Drawing([Table("Squares", ("n", "n²"), [[str(n), str(x)] for n, x in enumerate(values)])], plot,
                   {"mean": mean}, [claim])  # fmt: skip


SQUARES = Experiment("squares", "Squares of numbers", "nowhere", {"box": {"count": 4, "power": 2}}, drawn,
                     measure=squares)  # fmt: skip
DECODED = Experiment(
    "decoded", "Two ways", "nowhere", {"box": {"model": "given", "units": 3}}, lambda setup: Drawing([]),
    cases=lambda setup: [
        Case(name, {"method": name, "k": 2, "gen_length": 6, "steps": 3}, setup["units"])
        for name in ("independent", "d5p4")
    ],
)  # fmt: skip


@pytest.fixture
def own(monkeypatch):
    """Experiments of this file, found by name."""
    held = {each.name: each for each in (SQUARES, DECODED)}
    monkeypatch.setattr(run, "experiment", lambda name: held.get(name) or experiment(name))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_mdlm(tmp_path_factory.mktemp("model")))


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def cli(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_every_name_has_its_file():
    for name in EXPERIMENTS:
        found = experiment(name)
        assert found.name == name and found.title and found.paper and set(found.settings) == {"box", "paper"}
    with pytest.raises(D5P4Error, match="no experiment 'paretto'; choose one of pareto, fidelity"):
        experiment("paretto")


def test_all_stages_write_their_files(own, tmp_path):
    told = []
    reproduce("squares", out=tmp_path, device="cpu", progress=lambda share, text: told.append((share, text)))
    folder = tmp_path / "squares"
    assert set(files(folder)) == {"rows.jsonl", "config.json", "table.md", "figure.png", "figure.svg", "summary.json"}
    assert told == [(0, "number 0"), (0.25, "number 1"), (0.5, "number 2"), (0.75, "number 3")]
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"] == {"count": 4, "power": 2} and (config["scale"], config["seed"]) == ("box", 0)
    assert set(config["stages"]) == {"decode", "draw"}  # there is nothing to score
    assert config["stages"]["decode"][-1]["finished"] is True
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert "| 3 | 9 |" in table and "measured on" in table and "scored" not in table
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["figures"]["mean"][0] == 3.5 and summary["title"] == "Squares of numbers"
    assert summary["claims"][0]["verdict"] == "holds"


def test_a_second_run_changes_nothing_but_goes_further_when_asked(own, tmp_path):
    reproduce("squares", out=tmp_path, device="cpu")
    before = files(tmp_path)
    reproduce("squares", out=tmp_path, device="cpu")
    after = files(tmp_path)
    for name in ("rows.jsonl", "table.md", "summary.json", "figure.svg"):
        assert after[f"squares/{name}"] == before[f"squares/{name}"], name
    reproduce("squares", out=tmp_path, device="cpu", changes={"count": 6})
    grown = files(tmp_path)["squares/rows.jsonl"]
    assert grown.startswith(before["squares/rows.jsonl"]) and grown.count(b"\n") == 7
    with pytest.raises(D5P4Error, match="power was 2 and is 3"):
        reproduce("squares", out=tmp_path, device="cpu", changes={"power": 3})
    with pytest.raises(D5P4Error, match="seed was 0 and is 1"):
        reproduce("squares", out=tmp_path, device="cpu", seed=1)


def test_stages_run_alone_and_elsewhere(own, tmp_path):
    reproduce("squares", out=tmp_path / "here", stages=["decode"], device="cpu")
    assert set(files(tmp_path / "here" / "squares")) == {"rows.jsonl", "config.json"}
    (tmp_path / "here").rename(tmp_path / "there")
    reproduce("squares", out=tmp_path / "there", stages=["draw"], device="cpu")
    assert (tmp_path / "there" / "squares" / "summary.json").exists()


def test_what_is_not_known_is_named(own, tmp_path):
    with pytest.raises(D5P4Error, match="stage='paint' is not known; use one of decode, score, draw"):
        reproduce("squares", out=tmp_path, stages=["paint"])
    with pytest.raises(D5P4Error, match="no experiment 'cubes'"):
        reproduce("cubes", out=tmp_path)
    with pytest.raises(D5P4Error, match=re.escape("squares has no setting sise (it has: count, power)")):
        reproduce("squares", out=tmp_path, changes={"sise": 3})
    with pytest.raises(D5P4Error, match="scale='huge' is not known; use one of box"):
        reproduce("squares", scale="huge", out=tmp_path)
    assert not files(tmp_path)


def test_cases_are_decoded_once_whatever_the_batch(own, tmp_path, tiny):
    words = {"model": tiny, "device": "cpu", "stages": ["decode"]}
    setup = reproduce("decoded", out=tmp_path / "whole", **words)
    texts = [[row["texts"] for row in setup.rows(case)] for case in setup.cases]
    assert [len(each) for each in texts] == [3, 3] and all(len(each) == 2 for rows in texts for each in rows)
    for units in (1, 3):
        part = reproduce("decoded", out=tmp_path / "parts", changes={"units": units}, **words)
    assert [[row["texts"] for row in part.rows(case)] for case in part.cases] == texts
    before = files(tmp_path / "parts" / "rows")
    reproduce("decoded", out=tmp_path / "parts", **words)
    assert files(tmp_path / "parts" / "rows") == before
    config = json.loads((tmp_path / "parts" / "decoded" / "config.json").read_text())
    assert [case["name"] for case in config["cases"]] == ["independent", "d5p4"] and config["cases"][0]["units"] == 3
    assert str(tmp_path) not in json.dumps(config)


def shown_rows(setup: Setup) -> Drawing:
    """Reads answers and measured rows alike."""
    texts = [row["texts"] for case in setup.cases for row in sets(setup, case)]
    held = list(setup.measured("own", model=setup.named.rsplit("/", 1)[-1], weights=setup.weights))
    return Drawing([Table("T", ("n", "held"), [[str(len(texts)), str(len(held))]])])


@pytest.fixture
def carried(monkeypatch, tmp_path, tiny):
    """An experiment decoded with a model of a folder, to be drawn where its own model, of the hub, is not."""
    def measure(setup):
        lines = setup.measured("own", model=setup.named.rsplit("/", 1)[-1], weights=setup.weights)
        if 0 not in lines:
            lines.add(0, {"value": 1})

    held = replace(DECODED, name="carried", settings={"box": {"model": "org/far-away", "units": 2}},
                   measure=measure, draw=shown_rows)  # fmt: skip
    monkeypatch.setattr(run, "experiment", lambda name: held)
    reproduce("carried", out=tmp_path, model=tiny, device="cpu", stages=["decode"])
    return held


def test_rows_are_drawn_where_the_model_is_not(carried, monkeypatch, tmp_path, tiny):
    loading = sys.modules["d5p4.models.load"]  # a function has its name too
    monkeypatch.setattr(loading, "download", lambda *given: pytest.fail("the model was fetched"))
    before = files(tmp_path / "rows")
    for model in (None, "elsewhere/" + Path(tiny).name, tiny):
        setup = reproduce("carried", out=tmp_path, model=model, device="cpu", stages=["score", "draw"])
        assert "| 4 | 1 |" in (setup.folder / "table.md").read_text(encoding="utf-8")
        assert setup.scores(setup.cases[0], "s").path.name == setup.rows(setup.cases[0]).path.name
        assert json.loads((setup.folder / "config.json").read_text())["model"] == Path(tiny).name
    assert files(tmp_path / "rows") == before
    with pytest.raises(D5P4Error, match="2 of 2 rows of 'independent' are missing; run --stage decode"):
        reproduce("carried", out=tmp_path, model="org/another", device="cpu", stages=["draw"])
    with pytest.raises(D5P4Error, match="2 of 2 rows of 'independent' are missing"):
        reproduce("carried", out=tmp_path, seed=1, device="cpu", stages=["draw"])


def test_rows_of_several_models_are_not_mixed(carried, tmp_path, tiny):
    other = str(write_mdlm(tmp_path / "another", seed=5))
    (tmp_path / "carried" / "own.jsonl").unlink()
    reproduce("carried", out=tmp_path, model=other, device="cpu", stages=["decode"])
    with pytest.raises(D5P4Error, match=r"several models made these rows: .*open-d5p4-.*; name one by --model, or"):
        reproduce("carried", out=tmp_path, device="cpu", stages=["draw"])
    setup = reproduce("carried", out=tmp_path, model="gone/another", device="cpu", stages=["draw"])
    assert setup.rows(setup.cases[0]).header["model"] == "another"


def test_no_time_left_decodes_nothing_and_says_so(own, tmp_path, tiny):
    setup = reproduce("decoded", out=tmp_path, model=tiny, device="cpu", minutes=0, changes={"units": 2})
    assert all(len(setup.rows(case)) == 0 for case in setup.cases)
    config = json.loads((setup.folder / "config.json").read_text())
    assert config["stages"]["decode"][-1]["finished"] is False and "draw" not in config["stages"]
    assert not (setup.folder / "summary.json").exists() and setup.finished is False


def test_a_run_that_is_not_finished_says_so(own, tmp_path, tiny):
    words = ("reproduce", "decoded", "--out", tmp_path, "--model", tiny, "--device", "cpu", "--quiet")
    found = cli(*words, "--minutes", 0)
    assert found.exit_code == 3 and found.stderr == ""
    assert found.stdout == "decoded: not finished, 6 sets left; run the same command again\n"
    found = cli(*words, "--minutes", 5)
    assert found.exit_code == 0 and found.stdout == f"decoded: {tmp_path / 'decoded'}\n"


def test_changes_on_the_command_line():
    assert _change("units=4") == ("units", 4)
    assert _change("betas=[1, 2.5]") == ("betas", [1, 2.5])
    assert _change("from_results=false") == ("from_results", False)
    assert _change("model=some/folder=x") == ("model", "some/folder=x")
    assert _change("name=") == ("name", "")
    for bad in ("units", "=4", ""):
        with pytest.raises(D5P4Error, match="must be a name and a value"):
            _change(bad)


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("math", "units=abc", "units='abc' must be a number, such as 1000"),
        ("math", "units=true", "units=True must be a number"),
        ("math", "units=0", "units=0 must be a whole number of at least 1"),
        ("math", "units=2.5", "units=2.5 must be a whole number"),
        ("pareto", "units_independent=-1", "units_independent=-1 must be a whole number"),
        ("math", "beta=abc", "beta=['abc'] must be a list of which each is a number, such as [25.0, 100.0]"),
        ("math", 'judges=["judge", 3]', "must be a list of which each is text"),
        ("math", "model=5", "model=5 must be text, such as 'countdown'"),
        ("math", "model=null", "model=None must be text"),
        ("math", "k=[4]", "k=[4] must be a number"),
        ("scaling", "trials=4", "trials=4 must be a mapping"),
        ("cost", "from_results=1", "from_results=1 must be true or false"),
        ("quality-signal", "samples=3", "samples=3 must be a list"),
        ("quality-signal", "samples=[1, 2]", "samples=[1, 2] must be a list of which each is a list"),
    ],
)
def test_settings_of_another_kind_are_refused(tmp_path, name, change, said):
    found = cli("reproduce", name, "--set", change, "--out", tmp_path)
    assert found.exit_code == 2 and said in found.stderr and found.stderr.count("\n") == 1, found.output
    assert not files(tmp_path)


def test_one_value_stands_for_a_list_of_it(tmp_path):
    changes = {"judges": "judge", "beta": 5, "alpha": (1, 2.5), "units": 2, "guidance": 2}
    setup = Setup(experiment("math"), "box", tmp_path, changes=changes)
    assert (setup["judges"], setup["beta"], setup["alpha"], setup["guidance"]) == (["judge"], [5], (1, 2.5), 2)
    assert Setup(experiment("quality-signal"), "box", tmp_path, changes={"samples": [], "start": ""})["samples"] == []
    assert Setup(experiment("pareto"), "box", tmp_path, changes={"encoder": None})["encoder"] is None


def test_the_command_runs_an_experiment(own, tmp_path):
    found = cli("reproduce", "squares", "--out", tmp_path, "--device", "cpu", "--set", "count=3")
    assert found.exit_code == 0, (found.output, found.exception)
    assert found.stdout == f"squares: {tmp_path / 'squares'}\n" and "squares   0 % number 0" in found.stderr
    assert (tmp_path / "squares" / "rows.jsonl").read_text().count("\n") == 4
    quiet = cli("reproduce", "squares", "--out", tmp_path, "--quiet", "--set", "count=3", "--stage", "draw")
    assert quiet.exit_code == 0 and quiet.stderr == ""


@pytest.mark.parametrize(
    "words, said",
    [
        (["nothing"], "no experiment 'nothing'"),
        (["scaling", "--set", "size=4"], "scaling has no setting size"),
        (["scaling", "--set", "sizes"], "must be a name and a value"),
        (["scaling", "--stage", "paint"], "stage='paint' is not known"),
        (["scaling", "--scale", "huge"], "scale='huge' is not known; use one of box, paper"),
        (["claims"], "holds no drawn experiment"),
    ],
)
def test_errors_of_the_command(tmp_path, words, said):
    found = cli("reproduce", *words, "--out", tmp_path)
    assert found.exit_code == 2 and found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
    assert said in found.stderr and not files(tmp_path)


def test_all_of_them_need_a_text_before_anything_is_decoded(tmp_path):
    found = cli("reproduce", "all", "--out", tmp_path)
    assert found.exit_code == 2 and not files(tmp_path)
    assert found.stderr == "error: fidelity, qa, guidance, quality-signal, features need a text file: give --data\n"
    found = cli("reproduce", "all", "--scale", "paper", "--out", tmp_path)
    assert "error: fidelity, quality-signal, features need a text file" in found.stderr and not files(tmp_path)
    for name in [each for each in EXPERIMENTS if "box" in experiment(each).needs_text][1:]:  # as if they had been drawn
        write_json(tmp_path / name / "summary.json", {})
    assert "error: fidelity needs a text file: give --data" in cli("reproduce", "all", "--out", tmp_path).stderr
    drawn = cli("reproduce", "all", "--out", tmp_path, "--stage", "draw", "--quiet")
    assert "rows of" in drawn.stderr and "--data" not in drawn.stderr  # pareto's are missing, and no text is asked for


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["box", "paper"])
def test_who_needs_a_text(tmp_path, name, scale):
    """Tasks made of one are on the list; the other names of it measure with one."""
    tasks = {case.task for case in Setup(experiment(name), scale, tmp_path).cases}
    measures = {"fidelity", "quality-signal", "features"}
    assert bool(tasks & {"books", "text"} or name in measures) == (scale in experiment(name).needs_text)
    if "books" in tasks:
        with pytest.raises(D5P4Error, match=f"{name} needs a text file: give --data"):
            Setup(experiment(name), scale, tmp_path).task("books", 2)


def test_progress_has_the_time_left(capsys, monkeypatch):
    now = iter([0.0, 10.0, 20.0, 21.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    tell = _Teller("scaling")
    for share in (0.0, 0.25, 0.3, 1.0):
        tell(share, "at work")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["scaling   0 % at work", "scaling  25 % at work, about 30 s left", "scaling 100 % at work"]


def summary(title: str, *claims: Claim) -> dict[str, Any]:
    return {"title": title, "paper": "Table 1", "made": "`d5p4 reproduce x`", "figures": {},
            "claims": [vars(claim) for claim in claims]}  # fmt: skip


def test_the_page_of_claims(tmp_path):
    folder, page = tmp_path / "results" / "box", tmp_path / "docs" / "claims.md"
    write_json(folder / "pareto" / "summary.json", summary(
        "The front", Claim("A beats B", "1 against 2", "3 [2, 4]", "holds", "of two | judges"),
        Claim("C peaks", "at 100", "at 30", "not clear"),
    ))  # fmt: skip
    write_json(folder / "scaling" / "summary.json", summary("Sizes", Claim("D is best", "", "it is", "holds")))
    (folder / "pareto" / "figure.svg").write_text("<svg/>")
    write_json(folder / "unknown" / "summary.json", {"not": "one of ours"})
    found = cli("reproduce", "claims", "--out", folder, "--page", page)
    assert found.exit_code == 0, found.output
    assert found.stdout == f"{page}: 2 holds, 1 not clear\n"
    text = page.read_text(encoding="utf-8")
    assert "3 claims: 2 holds, 1 not clear." in text and str(tmp_path) not in text.replace(folder.as_posix(), "")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 4  # with the head
    assert rows[1] == (
        r"| A beats B | 1 against 2 | 3 [2, 4] (of two \| judges) | **holds** | [pareto](#pareto) |"
    )
    assert "![The front](../results/box/pareto/figure.png)" in text and "## scaling" in text
    assert text.count("![") == 1 and "[Table](../results/box/scaling/table.md)" in text
    for target in re.findall(r"\]\((\.\./results[^)]*summary\.json)\)", text):
        assert (page.parent / target).resolve().exists()
    before = page.read_bytes()
    write_claims(folder, page)
    assert page.read_bytes() == before


def test_a_bar_in_a_cell_does_not_break_a_table():
    lines = Table("T", ("a", "b"), [["x | y", "two\nlines"]], "note").markdown().splitlines()
    assert lines[4] == r"| x \| y | two lines |" and lines[-1] == "note"


def test_figures_too_large_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("d5p4_lab.paper.drawing.LARGEST_FIGURE", 100)
    about = {"title": "T", "paper": "P", "made": "M"}
    with pytest.raises(D5P4Error, match="figure.png has .* bytes, more than 100"):
        Drawing([], pyplot().figure()).save(tmp_path, about)


def test_what_goes_into_json():
    import numpy as np

    assert plain(Figure(1 / 3, 0.1, -np.inf, 0.5, 4)) == [0.333333, None, 0.5]
    assert plain({1: np.float32(0.5), "n": np.int64(3), "x": np.array([[1.0, np.nan]])}) == {
        "1": 0.5, "n": 3, "x": [[1.0, None]],
    }  # fmt: skip
    assert plain((True, None, "a", 7)) == [True, None, "a", 7]
    assert shown(Figure(0.4123, 0, 0.39, 0.433, 9), 1, 100) == "41.2 [39.0, 43.3]"


def test_verdicts():
    assert [decided(Figure(x, 0, x - 1, x + 1, 9)) for x in (2, -2, 0.5)] == ["holds", "does not hold", "not clear"]
    assert decided(Figure(float("nan"), 0, float("nan"), float("nan"), 0)) == "not clear"
    assert decided(Figure(1, 0, 0, 2, 9)) == "not clear"  # an interval that touches 0 says nothing
    assert agreed(["holds", "holds"]) == "holds" and agreed(["holds", "does not hold"]) == "not clear"
    assert every(["holds", "not clear", "does not hold"]) == "does not hold"
    assert every(["holds", "not testable at this scale"]) == "not testable at this scale"
    assert every(["holds", "not clear"]) == "not clear" and every(["holds"]) == "holds"
