import itertools

import numpy as np
import pytest

from d5p4_lab.paper import experiment, mathematics
from d5p4_lab.paper.mathematics import WAYS, ways
from d5p4_lab.paper.rows import Row
from d5p4_lab.paper.setup import Setup
from tests.checkpoints import write_llada
from tests.lab.paper.smoke import smoke, write_gsm8k, write_numbers

UNITS, CLOSE, K, W = 12, 20, 3, 2
SEARCHES = ("greedy beam", "diverse beam, α 20", "D5P4+, β 25", "k-DPP sample")


@pytest.fixture
def marks() -> dict[str, np.ndarray]:
    return {}


@pytest.fixture
def fake(tmp_path, monkeypatch, marks) -> Setup:
    """Random answers and perplexities for the first order; the share of right answers grows with the unit."""
    monkeypatch.setattr(Setup, "weights", "none")
    changes = {"judges": ["one"], "k": K, "w": W, "units": UNITS, "units_close": CLOSE, "passes": 2}
    data = write_gsm8k(tmp_path / "test.jsonl", CLOSE)
    setup = Setup(experiment("math"), "paper", tmp_path, "given", data, changes=changes)
    random = np.random.default_rng(0)
    numbers: dict[str, list[Row]] = {}
    for case in setup.cases[:5]:
        examples = setup.task("gsm8k", case.units).examples
        marks[case.name] = random.random((2, case.units, case.options["k"])) < np.arange(case.units)[:, None] / CLOSE
        for unit, right in enumerate(marks[case.name].reshape(-1, case.options["k"])):
            gold = int(examples[unit % case.units].references[0].split("####")[1])
            texts = [f"so it is {gold}." if good else f"{gold + 1 + i} it is" for i, good in enumerate(right)]
            nats = {"ppl:one": {"nats": random.integers(0, 3, len(texts)).tolist()}}
            made = mathematics._reduce(setup, case, unit % case.units, {"texts": texts}, nats)
            numbers.setdefault(case.name, []).append(made)
    write_numbers(setup, numbers)
    return setup


def test_pass_at_n_and_best_of_n_against_all_subsets(fake, marks):
    """pass@n is a mean over all choices of n answers, and over the two passes. Best of n takes k of the same pool."""
    by_way = ways(fake, "confidence")
    assert list(by_way) == [*WAYS[:3], *SEARCHES, WAYS[3]]
    pool = marks["confidence: pool"]  # [passes, P, k·w]
    assert pool.shape == (2, UNITS, K * W)
    for n in range(1, K + 1):
        alone = [pool[..., list(some)].any(-1) for some in itertools.combinations(range(K * W), n)]
        first = [pool[..., list(some)].any(-1) for some in itertools.combinations(range(K), n)]
        assert by_way["independent"][f"pass@{n}"] == pytest.approx(np.mean(alone, axis=(0, 1)), abs=1e-12)
        assert by_way["best of n, internal"][f"pass@{n}"] == pytest.approx(np.mean(first, axis=(0, 1)), abs=1e-12)
    oracle = by_way[WAYS[3]]
    assert oracle[f"pass@{K}"] == pytest.approx(pool.any(-1).mean(0))  # solved if any answer of the pool is right
    assert oracle["pass@1"] == pytest.approx((np.minimum(pool.sum(-1), K) / K).mean(0))
    ours = by_way["D5P4+, β 25"]
    assert ours["forms"] == pytest.approx(marks["confidence: D5P4+, β 25"].any(-1).mean(0))  # one number is right
    for m in by_way.values():  # GSM8K has references
        assert {"F1", "F1@k", "BLEU@k", "EAD", "D1", "S-BLEU", "entropy"} <= set(m)
        assert (m["F1"] <= m["F1@k"] + 0.001).all()


def test_math(tmp_path):
    """An untrained model, two problems and few steps."""
    changes = {"judges": ["judge"], "k": 2, "w": 2, "gen_length": 6, "steps": 3, "units": 2, "units_close": 3}
    changes |= {"beta": [25.0], "alpha": [20.0]}
    _, summary = smoke("math", tmp_path / "out", changes, model=str(write_llada(tmp_path / "model")))
    assert len(summary["figures"]) == 3 * 7 + 1 and "ours: tree" in summary["figures"]
    for values in summary["figures"].values():
        named = {"pass@1", "pass@2", "S-BLEU", "different right", "entropy", "D1", "D2", "D3", "D1-3"}
        assert set(values) == named  # countdown has no references
        assert 0 <= values["pass@1"][0] <= values["pass@2"][0] <= 100
    claims = [claim["claim"] for claim in summary["claims"]]
    for part in ("pass@2", "greedy beam search (pass@2)", "best of n by perplexity (pass@2)", "Ours: the tree"):
        assert any(part in claim for claim in claims), part
