import itertools
import json

import numpy as np
import pytest

from d5p4_lab.paper import experiment
from d5p4_lab.paper.mathematics import ORDERS, Judged, ways
from d5p4_lab.paper.scoring import sets
from d5p4_lab.paper.setup import Setup
from tests.lab.paper.smoke import smoke, write_gsm8k

UNITS, K, W = 40, 3, 2


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Setup:
    """Answers and perplexities of the first order written by hand: unit u has any number of right ones."""
    monkeypatch.setattr(Setup, "weights", "none")
    changes = {"judges": ["one"], "task": "gsm8k", "k": K, "w": W, "units": UNITS, "beta": [25.0], "alpha": [20.0]}
    data = write_gsm8k(tmp_path / "test.jsonl", UNITS)
    setup = Setup(experiment("math"), "box", tmp_path, "given", data, changes=changes)
    random = np.random.default_rng(0)
    examples = setup.task("gsm8k", UNITS).examples
    for case in setup.cases:
        if case.group != "confidence":
            continue
        size = case.options["k"]
        rows = {}
        for unit, example in enumerate(examples):
            gold = int(example.references[0].split("####")[1])
            right = random.random(size) < unit / UNITS
            texts = [f"so it is {gold}." if good else f"{gold + 1 + i} it is" for i, good in enumerate(right)]
            rows[str(unit)] = {"texts": texts, "rows": 10 + unit}
        setup.rows(case).add_all(rows)
        setup.scores(case, "ppl-one").add_all({
            str(unit): {"nats": random.integers(0, 3, size).tolist()} for unit in range(UNITS)
        })  # fmt: skip
    return setup


def right_ones(setup: Setup, texts: list[str], unit: int) -> list[bool]:
    gold = setup.task("gsm8k", UNITS).examples[unit].references[0].split("####")[1].strip()
    return [text == f"so it is {gold}." for text in texts]


def test_pass_at_n_against_all_subsets(fake):
    pool = fake.cases[0]
    rows = sets(fake, pool)
    judged = Judged(fake, rows)
    assert judged.right.shape == (UNITS, K * W) and judged.k == K and judged.rows == np.mean([r["rows"] for r in rows])
    for unit, row in enumerate(rows):
        marks = right_ones(fake, row["texts"], unit)
        assert judged.right[unit].tolist() == marks
        assert judged.forms[unit] == int(any(marks))  # all right ones are one number
        for n in range(1, K * W + 1):
            brute = np.mean([any(some) for some in itertools.combinations(marks, n)])
            assert judged.solved(n)[unit] == pytest.approx(brute, abs=1e-12)


def test_some_answers_of_each_problem(fake):
    rows = sets(fake, fake.cases[0])
    keep = [[unit % 6, (unit + 1) % 6] for unit in range(UNITS)]
    judged = Judged(fake, rows, keep)
    for unit, (row, places) in enumerate(zip(rows, keep, strict=True)):
        marks = right_ones(fake, [row["texts"][i] for i in places], unit)
        assert judged.right[unit].tolist() == marks


def test_best_of_n_takes_from_one_pool(fake):
    found = ways(fake, "confidence")
    rows = sets(fake, fake.cases[0])
    marks = np.array([right_ones(fake, row["texts"], unit) for unit, row in enumerate(rows)])
    assert list(found) == ["independent", "best of n, perplexity", "best of n, internal", "greedy beam",
                           "diverse beam, α 20", "D5P4+, β 25", "best of n, oracle"]  # fmt: skip
    oracle = found["best of n, oracle"]
    assert oracle.right.shape == (UNITS, K)
    assert oracle.solved(K).tolist() == marks.any(1).astype(float).tolist()  # solved if any of the pool is right
    assert oracle.right.sum(1).tolist() == np.minimum(marks.sum(1), K).tolist()
    assert found["best of n, internal"].right.tolist() == marks[:, :K].tolist()
    alone = found["independent"]
    assert alone.right.tolist() == marks.tolist()
    brute = np.mean([marks[:, list(some)].any(1) for some in itertools.combinations(range(K * W), K)], axis=0)
    assert alone.solved(K) == pytest.approx(brute, abs=1e-12)
    for name, judged in found.items():
        assert (judged.solved(K) <= oracle.solved(K) + 1e-12).all() or name.startswith(("greedy", "diverse", "D5P4"))
        assert len(judged.same) == UNITS and (judged.forms <= 1).all()


def test_every_order_has_every_method(tmp_path):
    setup = Setup(experiment("math"), "box", tmp_path)
    assert len(setup.cases) == 3 * 6
    for order, rule in ORDERS.items():
        group = [case for case in setup.cases if case.group == order]
        assert [case.name.split(": ")[1] for case in group] == [
            "pool", "greedy beam", "diverse beam, α 20", "diverse beam, α 100", "D5P4+, β 25", "D5P4+, β 100",
        ]  # fmt: skip
        assert group[0].options["k"] == group[1].options["k"] * group[1].options["w"] == 16
        assert all(dict(rule).items() <= dict(case.options).items() for case in group)
        assert all(("order_temperature" in case.options) == (order != "confidence") for case in group)


def test_math(tmp_path):
    """The shipped countdown on very few problems, in few steps: what is solved says nothing."""
    changes = {"judges": ["judge"], "k": 2, "w": 2, "gen_length": 6, "steps": 3, "units": 2, "beta": [25.0],
               "alpha": [20.0]}  # fmt: skip
    setup = smoke("math", tmp_path, changes, {"units": 3})
    summary = json.loads((setup.folder / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["figures"]) == 3 * 7 and len(summary["claims"]) >= 6
    for each in summary["figures"].values():
        assert set(each) == {"pass@1", "pass@2", "S-BLEU", "different right"}
        assert 0 <= each["pass@1"][0] <= each["pass@2"][0] <= 100


@pytest.mark.full
def test_math_solves_problems(tmp_path):
    """All steps, three numbers: one answer is often right, two more often."""
    changes = {"judges": ["judge"], "task": "countdown:3", "gen_length": 24, "steps": 24, "units": 4, "k": 2, "w": 2,
               "beta": [100.0], "alpha": [20.0]}  # fmt: skip
    setup = smoke("math", tmp_path, changes, {"units": 5})
    figures = json.loads((setup.folder / "summary.json").read_text(encoding="utf-8"))["figures"]
    for order in ORDERS:
        alone, oracle = figures[f"{order}: independent"], figures[f"{order}: best of n, oracle"]
        assert 40 < alone["pass@1"][0] <= alone["pass@2"][0] <= oracle["pass@2"][0]
