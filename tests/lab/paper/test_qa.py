"""Answers to prompts: ways to choose from a pool, and the experiments qa and guidance."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as reference

from d5p4.errors import D5P4Error
from d5p4_lab.paper import experiment
from d5p4_lab.paper.answers import answers
from d5p4_lab.paper.qa import (
    BY_JUDGE,
    BY_MODEL,
    WAYS,
    by_chance,
    choices,
    lowest,
)
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.setup import Setup
from tests.checkpoints import write_llada
from tests.lab.paper.smoke import smoke, write_text

SMALL = {"judges": ["judge"], "k": 2, "w": 2, "gen_length": 8, "steps": 4, "units": 2, "tree_temperature": [1.0]}
TREE = "tree (ours), T 1"


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


def test_best_of_n_against_brute_force(setup):
    """By perplexity and by an oracle. Among equal values the first wins, also if all answers are empty."""
    values = np.random.default_rng(0).integers(0, 4, size=(50, 6)).astype(float)  # with many equal values
    values[0] = 15
    subsets = list(itertools.combinations(range(6), 3))  # in lexicographic order
    for row in values.tolist():
        best = list(min(subsets, key=lambda places, row=row: sum(row[place] for place in places)))
        ways = choices(setup, 0, {"texts": ["answer"] * 6}, {"ppl:one": {"nats": row}})
        assert lowest(row, 3) == ways[BY_JUDGE] == best and ways[BY_MODEL] == [0, 1, 2]


def test_qa(tmp_path, model, text):
    _, summary = smoke("qa", tmp_path / "out", SMALL, {"units": 3}, model=model, data=text)
    metrics = summary["figures"]["books"]
    names = [*WAYS[:3], "greedy beam", "diverse beam", "D5P4+", "D5P4^P", TREE, WAYS[3]]
    assert list(metrics) == names
    # From the same pool, the oracle picks the best F1, and the judge picks the lowest perplexity.
    assert metrics[WAYS[3]]["F1"][0] == max(metrics[name]["F1"][0] for name in WAYS)
    assert metrics[WAYS[1]]["PPL, judge"][0] == min(metrics[name]["PPL, judge"][0] for name in WAYS)


def test_guidance(tmp_path, model, text):
    out = tmp_path / "out"
    setup, summary = smoke("guidance", out, SMALL | {"guidances": [1, 2]}, model=model, data=text)
    assert list(summary["figures"]) == [*WAYS[:3], "greedy beam", "D5P4+", TREE]
    for by_strength in summary["figures"].values():
        assert list(by_strength) == ["1", "2"] and {"BLEU", "entropy", "D3", "EAD", "R-COS"} <= set(by_strength["2"])
    texts = {case.name: [row["texts"] for row in complete(setup, answers(setup, case))] for case in setup.cases}
    assert texts["D5P4+, g 1"] != texts["D5P4+, g 2"]
    with pytest.raises(D5P4Error, match="guidance has one task"):
        Setup(experiment("guidance"), "box", out, changes={"tasks": ["books", "truthfulqa"]}).cases  # noqa: B018
