"""`reproduce`: its stages, its commands and their errors; drawings."""

import json
from collections.abc import Sequence

import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.figures import pyplot
from d5p4_lab.paper.drawing import Claim, Drawing, decided
from d5p4_lab.paper.rows import Row, Source, complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.setup import Experiment, Setup
from d5p4_lab.statistics import figure
from d5p4_lab.tables import Table, shown
from tests.lab.paper.smoke import files, own_experiments


def powers(setup: Setup) -> Source:
    def make(keys: Sequence[str]) -> dict[str, Row]:
        return {key: {"value": int(key) ** setup["power"]} for key in keys}

    return setup.source("rows", [str(number) for number in range(setup["count"])], make, power=setup["power"])


def drawn(setup: Setup) -> Drawing:
    values = [row["value"] for row in complete(setup, powers(setup))]
    plot, axis = pyplot().subplots(figsize=(3, 2))
    axis.plot(values)
    mean = figure(values)
    claim = Claim("grows | always", "yes", shown(mean), decided(figure([value + 5 for value in values])))
    table = Table("Squares", ("n", "n²"), [[str(n), str(x)] for n, x in enumerate(values)])
    return Drawing([table], plot, {"mean": mean}, [claim])


SETTINGS = {"box": {"count": 4, "power": 2}}
SQUARES = Experiment("squares", "Squares of numbers", "nowhere", SETTINGS, drawn, sources=lambda setup: [powers(setup)])


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    own_experiments(monkeypatch, SQUARES)


def test_all_stages_write_their_files_and_a_second_run_changes_nothing(tmp_path):
    reproduce("squares", out=tmp_path, device="cpu")
    folder = tmp_path / "squares"
    before = files(folder)
    assert set(before) == {"rows.jsonl.xz", "table.md", "figure.png", "summary.json"}
    assert before["figure.png"].startswith(b"\x89PNG")
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"] == {"count": 4, "power": 2} and (config["scale"], config["seed"]) == ("box", 0)
    assert set(config["stages"]) == {"decode", "draw"}  # there is nothing to score
    assert len(config["stages"]["decode"]) == 1
    table = before["table.md"].decode()
    assert "| 3 | 9 |" in table and "`python -m d5p4_lab reproduce squares --scale box`" in table
    assert json.loads(before["summary.json"])["claims"][0]["verdict"] == "holds"
    reproduce("squares", out=tmp_path, device="cpu")
    assert files(folder) == before
    for words, difference in (
        ({"changes": {"power": 3}}, "power was 2 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
    ):
        with pytest.raises(D5P4Error, match=rf"rows.jsonl.xz was made with other settings: {difference}"):
            reproduce("squares", out=tmp_path, device="cpu", **words)
    assert files(folder) == before


REFUSED = [
    (["nothing"], "no experiment 'nothing'; choose one of pareto, fidelity"),
    (["squares", "--set", "sise=4"], "squares has no setting sise (it has: count, power)"),
    (["squares", "--set", "count"], "must be a name and a value"),
    (["squares", "--stage", "paint"], "stage='paint' is not known; use one of decode, score, draw"),
    (["scaling", "--scale", "huge"], "scale='huge' is not known; use one of box, paper"),
    (["math", "--set", "units=abc"], "units='abc' must be a number, such as 1000"),
    (["math", "--set", "beta=abc"], "beta=['abc'] must be a list in which every item is a number"),
    (["math", "--set", "solver=magic"], "solver='magic' must be one of full-search, local-search, one-start, k-starts"),
    (["qa", "--data", "novels=x"], "data names the task 'novels', which does not exist; use one of truthfulqa, arc-"),
    (["qa", "--data", "a", "--data", "books=b"], "--data 'a' does not say whose data it is: write TASK=a"),
    (["all", "--set", "sise=4"], "no experiment has a setting sise"),
    (
        ["all"],
        "error: fidelity needs a text file: give --data text=FILE; qa needs a text file: give --data books=FILE; ",
    ),
]


def test_wrong_arguments_are_refused_before_anything_is_written(fails, tmp_path):
    for words, message in REFUSED:
        assert message in fails("reproduce", *words, "--out", tmp_path), words
    assert not list(tmp_path.iterdir())
