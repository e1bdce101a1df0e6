from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from d5p4_lab.paper import experiment
from d5p4_lab.paper.budget import Spent, _reduce, _same_rows, _tree_claim
from d5p4_lab.paper.setup import Setup
from d5p4_lab.statistics import figure
from tests.checkpoints import write_llada
from tests.lab.paper.smoke import smoke, write_gsm8k, write_numbers

SMALL = {"tasks": ["countdown:4"], "k": 2, "units": 2, "units_close": 3, "w": [2, 4], "more": [2, 4], "gen_length": 6}
SMALL |= {"tree": [2, 3]}


def spent(rows: float, covered: list[float], best: list[float] | None = None) -> Any:
    return SimpleNamespace(rows=figure([rows, rows]), covered=np.array(covered), best=np.array(best or covered))


def test_the_rival_has_the_nearest_rows(tmp_path):
    setup = Setup(experiment("budget"), "box", tmp_path, changes={"more": [2, 4, 6], "close": {"close": [2, 4]}})
    alone = {2: [0, 0, 0, 1], 4: [0, 0, 1, 1], 6: [0, 1, 1, 1]}
    # Fewer rows run than there are answers if some answers are equal.
    by_case = {
        f"{task} independent, {m} answers": spent(m - 0.25 * (m == 6), covered)
        for m, covered in alone.items()
        for task in ("t", "close")
    }
    for rows, nearest in ((1.0, 2), (2.9, 2), (3.1, 4), (5.2, 6), (99.0, 6)):
        rival, lead = _same_rows(setup, by_case, "t", spent(rows, [1, 1, 1, 1]))
        assert rival.startswith(f"{nearest} independent answers (") and f"against {rows:.0f})" in rival
        assert lead.value == 100 * (1 - np.mean(alone[nearest])) and lead.n == 4
        # If the setting "close" names cases, one of them is the rival. Both are compared on their common problems.
        rival, lead = _same_rows(setup, by_case, "close", spent(rows, [1, 1]))
        assert rival.startswith(f"{min(nearest, 4)} independent") and (lead.value, lead.n) == (100.0, 2)


def test_a_tree_is_compared_with_rivals_that_have_at_least_its_rows(tmp_path):
    changes = {"k": 2, "more": [2, 4, 6], "w": [2, 4]}
    setup = Setup(experiment("budget"), "box", tmp_path, changes=changes)
    zeros, ones = [0.0] * 8, [1.0] * 8
    by_case = {f"t independent, {m} answers": spent(10 * m, ones, zeros) for m in (2, 4, 6)}
    by_case |= {"t D5P4+, w 2": spent(15, ones), "t D5P4+, w 4": spent(35, zeros)}
    by_case["t tree (ours), K 3"] = spent(30, [1.0] * 7 + [0.0])
    record = _tree_claim(setup, by_case, "t", 2, 3).record()
    best = "the best 2 of 4 independent answers (40 rows): 87.5"
    rivals = ("4 independent answers (40 rows): -12.5", best, "D5P4, w 4 (35 rows): 87.5")
    assert all(rival in record["ours"] for rival in rivals) and record["ours"].startswith("at 30 rows, ")
    assert record["n"] == [8] and record["note"]


def test_coverage_and_rows_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(Setup, "weights", "none")
    data = write_gsm8k(tmp_path / "test.jsonl", 3)
    changes = {"tasks": ["gsm8k"], "units": 3, "k": 2, "more": [3]}
    setup = Setup(experiment("budget"), "box", tmp_path, "given", data, changes=changes)
    case = setup.cases[0]
    gold = [example.references[0].split("#### ")[1] for example in setup.task("gsm8k", 3).examples]
    texts = [[f"it is {gold[0]}", f"#### {gold[0]}.0", "7000"], ["7000", "8000", ""], ["x", "9000", gold[2]]]
    rows = [{"texts": answers, "rows": 8 + 4 * u, "nominal": 12, "nfe": 4} for u, answers in enumerate(texts)]
    write_numbers(setup, {case.name: [_reduce(setup, case, unit, row, {}) for unit, row in enumerate(rows)]})
    measured = Spent(setup, case)
    assert measured.covered.tolist() == [1, 0, 1] and measured.forms.tolist() == [1, 0, 1]
    assert measured.best.tolist() == [1, 0, 0]  # of the two best answers
    assert measured.at_k == pytest.approx([1, 0, 2 / 3])  # two of three answers
    assert measured.rows.value == pytest.approx(12) and (measured.nominal, measured.steps) == (12, 4)
    assert measured.share.value == pytest.approx(1)


def test_budget(tmp_path):
    """An untrained model, two problems and short answers."""
    _, summary = smoke("budget", tmp_path / "out", SMALL, model=str(write_llada(tmp_path / "model")))
    assert len(summary["figures"]) == 8 and sum("the tree with" in claim["claim"] for claim in summary["claims"]) == 2
    for name, values in summary["figures"].items():
        assert values["pass@2"][0] <= values["covered"][0] + 1e-9 and values["best 2"][0] <= values["covered"][0]
        assert "tree" in name or values["steps"] == 6
