import itertools

import numpy as np
import pytest

from d5p4_lab.paper import experiment, mathematics
from d5p4_lab.paper.answers import numbers_of
from d5p4_lab.paper.mathematics import ORDERS, ways
from d5p4_lab.paper.rows import Row
from d5p4_lab.paper.setup import Setup
from tests.checkpoints import write_llada
from tests.lab.paper.smoke import smoke, write_gsm8k, write_numbers

UNITS, K, W = 20, 3, 2


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Setup:
    """Random answers and perplexities for the first order; the share of right answers grows with the unit."""
    monkeypatch.setattr(Setup, "weights", "none")
    changes = {"judges": ["one"], "task": "gsm8k", "k": K, "w": W, "units": UNITS, "beta": [25.0], "alpha": [20.0]}
    data = write_gsm8k(tmp_path / "test.jsonl", UNITS)
    setup = Setup(experiment("math"), "box", tmp_path, "given", data, changes=changes)
    random = np.random.default_rng(0)
    numbers: dict[str, list[Row]] = {}
    for case in setup.cases[:4]:
        for unit in range(UNITS):
            right = random.random(case.options["k"]) < unit / UNITS
            gold = int(setup.task("gsm8k", UNITS).examples[unit].references[0].split("####")[1])
            texts = [f"so it is {gold}." if good else f"{gold + 1 + i} it is" for i, good in enumerate(right)]
            scores = {"ppl:one": {"nats": random.integers(0, 3, len(texts)).tolist()}}
            made = mathematics._reduce(setup, case, unit, {"texts": texts}, scores)
            assert made["right"] == "".join(str(int(mark)) for mark in right)
            numbers.setdefault(case.name, []).append(made)
    write_numbers(setup, numbers)
    return setup


def test_pass_at_n_and_best_of_n_against_all_subsets(fake):
    by_way = ways(fake, "confidence")
    names = ["independent", "best of n, perplexity", "best of n, internal", "greedy beam"]
    assert list(by_way) == [*names, "diverse beam, α 20", "D5P4+, β 25", "best of n, oracle"]
    marks = np.array([[mark == "1" for mark in row["right"]] for row in numbers_of(fake, fake.cases[0])])
    alone, oracle = by_way["independent"], by_way["best of n, oracle"]
    assert alone.right.tolist() == marks.tolist() and marks.shape == (UNITS, K * W)
    for n in range(1, K * W + 1):
        brute = np.mean([marks[:, list(some)].any(1) for some in itertools.combinations(range(K * W), n)], axis=0)
        assert alone.solved(n) == pytest.approx(brute, abs=1e-12)
    assert oracle.right.shape == (UNITS, K) and by_way["best of n, internal"].right.tolist() == marks[:, :K].tolist()
    assert oracle.solved(K).tolist() == marks.any(1).astype(float).tolist()  # solved if any of the pool is right
    assert oracle.right.sum(1).tolist() == np.minimum(marks.sum(1), K).tolist()
    for name, judged in by_way.items():
        assert (judged.solved(K) <= oracle.solved(K) + 1e-12).all() or name.startswith(("greedy", "diverse", "D5P4"))
        assert len(judged.same) == UNITS and (judged.forms <= 1).all()  # all right answers are the same number
    assert by_way["D5P4+, β 25"].forms.tolist() == by_way["D5P4+, β 25"].right.any(1).tolist()


def test_every_order_has_every_method(tmp_path):
    setup = Setup(experiment("math"), "box", tmp_path)
    assert len(setup.cases) == 3 * 6
    for order, rule in ORDERS.items():
        group = [case for case in setup.cases if case.group == order]
        names = ["pool", "greedy beam", "diverse beam, α 20", "diverse beam, α 100", "D5P4+, β 25", "D5P4+, β 100"]
        assert [case.name.split(": ")[1] for case in group] == names
        assert group[0].options["k"] == group[1].options["k"] * group[1].options["w"] == 16
        assert all(dict(rule).items() <= dict(case.options).items() for case in group)
        assert all(("order_temperature" in case.options) == (order != "confidence") for case in group)


def test_math(tmp_path):
    """An untrained model, two problems and few steps."""
    changes = {"judges": ["judge"], "k": 2, "w": 2, "gen_length": 6, "steps": 3, "units": 2}
    changes |= {"beta": [25.0], "alpha": [20.0]}
    _, summary = smoke("math", tmp_path / "out", changes, model=str(write_llada(tmp_path / "model")))
    assert len(summary["figures"]) == 3 * 7 and len(summary["claims"]) >= 6
    for values in summary["figures"].values():
        assert set(values) == {"pass@1", "pass@2", "S-BLEU", "different right"}
        assert 0 <= values["pass@1"][0] <= values["pass@2"][0] <= 100


@pytest.mark.full
def test_math_solves_problems(tmp_path):
    """The countdown model on three numbers: one answer is often right, one of two even more often."""
    changes = {"judges": ["judge"], "task": "countdown:3", "gen_length": 24, "steps": 24, "units": 4, "k": 2, "w": 2}
    changes |= {"beta": [100.0], "alpha": [20.0]}
    _, summary = smoke("math", tmp_path / "out", changes)
    for order in ORDERS:
        alone, oracle = (summary["figures"][f"{order}: {name}"] for name in ("independent", "best of n, oracle"))
        assert 40 < alone["pass@1"][0] <= alone["pass@2"][0] <= oracle["pass@2"][0]
