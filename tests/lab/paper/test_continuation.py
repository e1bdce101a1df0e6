"""Answers to prompts: best-of-n from one pool, and the experiments qa and guidance."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as reference

from d5p4.eval.lexical import f1
from d5p4_lab.paper import experiment
from d5p4_lab.paper.continuation import best_by, best_internal, best_perplexity, chosen, first, pool, search
from d5p4_lab.paper.qa import ways
from d5p4_lab.paper.setup import Setup
from tests.checkpoints import write_llada
from tests.lab.paper.smoke import smoke, write_text

SMALL = {"judges": ["judge"], "k": 2, "w": 2, "gen_length": 8, "steps": 4, "units": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_llada(tmp_path_factory.mktemp("model"), chat=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "val.txt")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(k, w, units, nats, texts)`: a qa whose pool is written by hand."""
    monkeypatch.setattr(Setup, "weights", "none")

    def make(k: int, w: int, units: int, nats: Any = None, texts: Any = None) -> Setup:
        changes = {"judges": ["one"], "encoder": "coder", "k": k, "w": w, "units": units}
        setup = Setup(experiment("qa"), "box", tmp_path, "given", changes=changes)
        case, size = setup.cases[0], k * w
        plain = [[f"answer {i}" for i in range(size)]] * units
        given = plain if texts is None else texts
        rows = {
            str(u): {"prompt": f"prompt {u}", "references": ["answer 1 two"], "texts": given[u]} for u in range(units)
        }
        setup.rows(case).add_all(rows)
        if nats is not None:
            setup.scores(case, "ppl-one").add_all({str(u): {"nats": list(nats[u])} for u in range(units)})
        return setup

    return make


def test_k_independent_answers_are_a_uniform_choice(fake):
    setup = fake(2, 2, 6000)
    places = first(setup, setup.cases[0])
    assert places == first(setup, setup.cases[0])  # the same each time
    assert all(len(set(each)) == 2 for each in places)
    pairs = list(itertools.permutations(range(4), 2))
    counts = [sum(tuple(each) == pair for each in places) for pair in pairs]
    assert reference.chisquare(counts).pvalue > 1e-4
    again = Setup(setup.experiment, "box", setup.root / "other", "given", seed=1, changes=setup.changes)
    again.rows(again.cases[0]).add_all({str(u): {"texts": ["a"] * 4} for u in range(6000)})
    other = first(again, again.cases[0])
    same = sum(a == b for a, b in zip(places, other, strict=True))
    assert reference.binomtest(same, 6000, 1 / 12).pvalue > 1e-4  # another seed chooses anew


def test_the_first_k_are_the_best_by_the_models_own_score(fake):
    setup = fake(3, 2, 4)
    assert best_internal(setup, setup.cases[0]) == [[0, 1, 2]] * 4


def test_the_best_by_perplexity_against_brute_force(fake):
    values = np.random.default_rng(0).integers(0, 4, size=(50, 6)).astype(float)  # with many equal ones
    values[0] = 15  # nothing but empty answers
    setup = fake(3, 2, 50, nats=values)
    for places, row in zip(best_perplexity(setup, setup.cases[0]), values, strict=True):
        subsets = list(itertools.combinations(range(6), 3))  # in order, so that of equal ones the first wins
        assert places == list(min(subsets, key=lambda s, row=row: sum(row[i] for i in s)))


def test_the_best_by_an_oracle_against_brute_force(fake):
    random = np.random.default_rng(1)
    texts = [[" ".join(random.choice(["answer", "1", "two", "x"], size=3)) for _ in range(6)] for _ in range(40)]
    setup = fake(3, 2, 40, texts=texts)
    found = best_by(lambda text, row: f1(text, row["references"]))(setup, setup.cases[0])
    for places, answers in zip(found, texts, strict=True):
        score = [f1(text, ["answer 1 two"]) for text in answers]
        subsets = list(itertools.combinations(range(6), 3))
        assert places == list(max(subsets, key=lambda s, score=score: round(sum(score[i] for i in s), 9)))


def test_what_is_chosen_keeps_its_scores(fake):
    values = np.arange(8.0).reshape(2, 4)[:, ::-1]  # the last is the best
    setup = fake(2, 2, 2, nats=values)
    grams = np.random.default_rng(2).random((2, 4, 4)).round(3)
    rows = {str(u): {"gram": grams[u].tolist(), "reference": [0.1, 0.2, 0.3, 0.4]} for u in range(2)}
    setup.scores(setup.cases[0], "cos-coder").add_all(rows)
    found = chosen(setup, setup.cases[0], best_perplexity)
    for unit, row in enumerate(found):
        assert row["texts"] == ["answer 2", "answer 3"] and row["reference"] == [0.3, 0.4]
        assert row["nats"]["one"].tolist() == values[unit, 2:].tolist() and row["prompt"] == f"prompt {unit}"
        assert row["S-COS"] == pytest.approx((grams[unit, 2, 3] + grams[unit, 3, 2]) / 2)
    whole = chosen(setup, setup.cases[0], None)
    assert len(whole[0]["texts"]) == 4 and whole[0]["nats"]["one"].tolist() == values[0].tolist()


def test_the_pool_has_as_many_answers_as_a_search_has_candidates(tmp_path):
    setup = Setup(experiment("qa"), "box", tmp_path)
    alone, beam = pool(setup, 2), search(setup, "D5P4+", {"method": "d5p4", "beta": 20.0}, 2)
    assert alone.options["k"] == beam.options["k"] * beam.options["w"] == 9
    same = ("gen_length", "steps", "eos", "temperature", "order", "guidance")
    assert all(alone.options[name] == beam.options[name] for name in same) and alone.options["guidance"] == 2.0
    assert alone.units == beam.units and alone.task == beam.task == "books"


def test_qa(tmp_path, model, text):
    setup = smoke("qa", tmp_path, SMALL, {"units": 3}, model=model, data=text)
    summary = json.loads((setup.folder / "summary.json").read_text(encoding="utf-8"))
    metrics, k = summary["figures"]["metrics"], SMALL["k"]
    names = ["k independent", "best of n, perplexity", "best of n, internal", "greedy beam", "diverse beam", "D5P4+",
             "D5P4^P", "best of n, F1 oracle"]  # fmt: skip
    assert list(metrics) == names and len(summary["claims"]) >= 8
    for each in metrics.values():
        assert {"PPL, judge", "entropy", "F1", f"F1@{k}", "BLEU", "R-COS", "D1", "EAD", "S-BLEU", "S-COS"} <= set(each)
        assert each["F1"][0] <= each[f"F1@{k}"][0] + 1e-9
    # Of the same pool: what an oracle picks has the best F1, what the judge picks the lowest perplexity.
    from_pool = [names[0], *names[1:3], names[-1]]
    assert metrics["best of n, F1 oracle"]["F1"][0] == max(metrics[name]["F1"][0] for name in from_pool)
    lowest = min(metrics[name]["PPL, judge"][0] for name in from_pool)
    assert metrics["best of n, perplexity"]["PPL, judge"][0] == lowest
    for rows in ways(setup).values():
        assert [len(row["texts"]) for row in rows] == [k, k]


def test_guidance(tmp_path, model, text):
    changes = SMALL | {"guidances": [1, 2]}
    setup = smoke("guidance", tmp_path, changes, {"units": 3}, model=model, data=text)
    summary = json.loads((setup.folder / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["figures"]) == {"independent", "best of n", "greedy beam", "D5P4+"}
    assert all(set(each) == {"1", "2"} for each in summary["figures"].values()) and len(summary["claims"]) >= 4
    texts = {case.name: [row["texts"] for row in setup.rows(case)] for case in setup.cases}
    assert texts["D5P4+, g 1"] != texts["D5P4+, g 2"]
