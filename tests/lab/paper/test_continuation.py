"""Answers to prompts: ways to choose from a pool, and the experiments qa and guidance."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as reference

from d5p4.eval.lexical import f1
from d5p4_lab.paper import experiment
from d5p4_lab.paper.answers import answers
from d5p4_lab.paper.continuation import best_internal, best_perplexity, by_chance, lowest, measures, pool, search
from d5p4_lab.paper.rows import complete
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
def setup(tmp_path) -> Setup:
    changes = {"judges": ["one"], "encoder": "coder", "k": 3, "w": 2}
    return Setup(experiment("qa"), "box", tmp_path, "given", changes=changes)


def test_k_independent_answers_are_a_uniform_choice(setup):
    row, units = {"texts": ["answer"] * 4}, 6000
    setup.settings["k"] = 2
    places = [by_chance(setup, unit, row) for unit in range(units)]
    assert places == [by_chance(setup, unit, row) for unit in range(units)]  # repeatable
    counts = [places.count(list(pair)) for pair in itertools.permutations(range(4), 2)]
    assert sum(counts) == units and reference.chisquare(counts).pvalue > 1e-4
    again = replace(setup, seed=1)
    again.settings["k"] = 2
    same = sum(by_chance(again, unit, row) == places[unit] for unit in range(units))
    assert reference.binomtest(same, units, 1 / 12).pvalue > 1e-4  # another seed gives another choice


def test_best_of_n_against_brute_force(setup):
    """By perplexity and by an oracle. Among equal values the first wins, also if all answers are empty."""
    assert best_internal(setup) == [0, 1, 2]
    values = np.random.default_rng(0).integers(0, 4, size=(50, 6)).astype(float)  # with many equal values
    values[0] = 15
    subsets = list(itertools.combinations(range(6), 3))  # in lexicographic order
    for row in values.tolist():
        best = list(min(subsets, key=lambda places, row=row: sum(row[place] for place in places)))
        assert lowest(row, 3) == best_perplexity(setup, {"ppl:one": {"nats": row}}) == best


def test_measures_use_the_scores_of_the_chosen_answers(setup):
    gram = np.random.default_rng(2).random((4, 4)).round(3)
    row = {"texts": ["answer one", "x", "answer", "x"], "references": ["answer two"]}
    scores = {"ppl:one": {"nats": [7.0, 6.0, 5.0, 3.0]}}
    scores["cos:coder"] = {"gram": gram.tolist(), "reference": [0.1, 0.2, 0.3, 0.4]}
    values = measures(setup, row, scores, [2, 3])
    assert values["nats one"] == 4 and values["R-COS"] == 0.4
    nearness = f1("answer", row["references"])
    assert (values["F1"], values["F1@k"]) == pytest.approx((nearness / 2, nearness), abs=1e-6)
    assert values["S-COS"] == pytest.approx((gram[2, 3] + gram[3, 2]) / 2)


def test_the_pool_has_as_many_answers_as_a_search_has_candidates(tmp_path):
    setup = Setup(experiment("qa"), "box", tmp_path)
    alone, beam = pool(setup, 2), search(setup, "D5P4+", {"method": "d5p4", "beta": 20.0}, 2)
    assert alone.options["k"] == beam.options["k"] * beam.options["w"] == 9
    same = ("gen_length", "steps", "eos", "temperature", "order", "guidance")
    assert all(alone.options[name] == beam.options[name] for name in same) and alone.options["guidance"] == 2.0
    assert alone.units == beam.units and alone.task == beam.task == "books"


def test_qa(tmp_path, model, text):
    _, summary = smoke("qa", tmp_path / "out", SMALL, {"units": 3}, model=model, data=text)
    metrics, k = summary["figures"]["metrics"], SMALL["k"]
    names = ["k independent", "best of n, perplexity", "best of n, internal"]
    names += ["greedy beam", "diverse beam", "D5P4+", "D5P4^P", "best of n, F1 oracle"]
    assert list(metrics) == names and len(summary["claims"]) >= 8
    for values in metrics.values():
        assert {"PPL, judge", "entropy", "F1", f"F1@{k}", "BLEU", "R-COS", "D1", "EAD", "S-BLEU", "S-COS"} <= set(
            values
        )
        assert values["F1"][0] <= values[f"F1@{k}"][0] + 1e-9
    # From the same pool, the oracle picks the best F1, and the judge picks the lowest perplexity.
    from_pool = [names[0], *names[1:3], names[-1]]
    assert metrics["best of n, F1 oracle"]["F1"][0] == max(metrics[name]["F1"][0] for name in from_pool)
    lowest = min(metrics[name]["PPL, judge"][0] for name in from_pool)
    assert metrics["best of n, perplexity"]["PPL, judge"][0] == lowest


def test_guidance(tmp_path, model, text):
    setup, summary = smoke("guidance", tmp_path / "out", SMALL | {"guidances": [1, 2]}, model=model, data=text)
    assert set(summary["figures"]) == {"independent", "best of n", "greedy beam", "D5P4+"}
    assert (
        all(set(by_strength) == {"1", "2"} for by_strength in summary["figures"].values())
        and len(summary["claims"]) >= 4
    )
    texts = {case.name: [row["texts"] for row in complete(setup, answers(setup, case))] for case in setup.cases}
    assert texts["D5P4+, g 1"] != texts["D5P4+, g 2"]
