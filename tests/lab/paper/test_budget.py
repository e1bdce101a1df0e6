from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from d5p4_lab.paper import experiment
from d5p4_lab.paper.budget import LENGTHS, Spent, _same_rows, reduce_graded
from d5p4_lab.paper.setup import Setup
from d5p4_lab.statistics import figure
from tests.checkpoints import write_llada
from tests.lab.paper.smoke import smoke, write_gsm8k, write_numbers

SMALL = {"tasks": ["countdown:4"], "k": 2, "units": 2, "w": [2, 4], "more": [2, 4], "gen_length": 6}


def spent(rows: float, covered: list[float]) -> Any:
    return SimpleNamespace(rows=figure([rows, rows]), covered=np.array(covered))


def test_the_rival_has_the_nearest_rows(tmp_path):
    setup = Setup(experiment("budget"), "box", tmp_path, changes={"more": [2, 4, 6]})
    alone = {2: [0, 0, 0, 1], 4: [0, 0, 1, 1], 6: [0, 1, 1, 1]}
    # Fewer rows run than there are answers if some answers are equal.
    by_case = {f"t independent, {m} answers": spent(m - 0.25 * (m == 6), covered) for m, covered in alone.items()}
    for rows, nearest in ((1.0, 2), (2.9, 2), (3.1, 4), (5.2, 6), (99.0, 6)):
        rival, lead = _same_rows(setup, by_case, "t", spent(rows, [1, 1, 1, 1]))
        assert rival.startswith(f"{nearest} independent answers (") and f"against {rows:.2f})" in rival
        assert lead.value == 100 * (1 - np.mean(alone[nearest])) and lead.n == 4


def test_coverage_and_rows_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(Setup, "weights", "none")
    data = write_gsm8k(tmp_path / "test.jsonl", 3)
    setup = Setup(experiment("budget"), "box", tmp_path, "given", data, changes={"tasks": ["gsm8k"], "units": 3})
    case = setup.cases[0]
    gold = [example.references[0].split("#### ")[1] for example in setup.task("gsm8k", 3).examples]
    texts = [[f"it is {gold[0]}", f"#### {gold[0]}.0", "7000"], ["7000", "8000", ""], ["x", gold[2], "9000"]]
    rows = [{"texts": answers, "rows": 8 + 4 * u, "nominal": 12, "nfe": 4} for u, answers in enumerate(texts)]
    numbers = [reduce_graded(setup, case, unit, row, {}) for unit, row in enumerate(rows)]
    assert [row["right"] for row in numbers] == ["110", "000", "010"]
    write_numbers(setup, {case.name: numbers})
    measured = Spent(setup, case)
    assert measured.covered.tolist() == [1, 0, 1] and measured.forms.tolist() == [1, 0, 1]
    assert measured.rows.value == pytest.approx((2 + 3 + 4) / 3) and measured.nominal == 3


def test_cases(tmp_path):
    setup = Setup(experiment("budget"), "box", tmp_path)
    names = [case.name for case in setup.cases]
    assert len(names) == 2 * (len(setup["more"]) + 2 * len(setup["w"]))
    for case in setup.cases:
        assert case.options["gen_length"] == case.options["steps"] == LENGTHS[case.task]
    by_name = {case.name: case.options for case in setup.cases}
    plain, distinct = by_name["countdown:4 D5P4+, w 4"], by_name["countdown:4 distinct, w 4"]
    assert distinct == plain | {"distinct": True}
    assert by_name["countdown:5 independent, 24 answers"]["k"] == 24


def test_budget(tmp_path):
    """An untrained model, two problems and short answers."""
    _, summary = smoke("budget", tmp_path / "out", SMALL, model=str(write_llada(tmp_path / "model")))
    assert len(summary["figures"]) == 6 and len(summary["claims"]) >= 4
    for name, values in summary["figures"].items():
        assert values["pass@2"][0] <= values["covered"][0] + 1e-9 and values["rows"][0] <= values["nominal"]
        answers = int(name.split()[-2]) if "answers" in name else 2 * int(name.split()[-1])
        assert values["nominal"] == answers


@pytest.mark.full
def test_more_rows_cover_more(tmp_path):
    """The countdown model on problems with three numbers."""
    changes = {"tasks": ["countdown:3"], "gen_length": 24, "units": 8, "k": 2, "w": [2, 6], "more": [2, 8]}
    figures = smoke("budget", tmp_path / "out", changes)[1]["figures"]
    few, many = (figures[f"countdown:3 independent, {m} answers"] for m in (2, 8))
    assert 40 < few["covered"][0] <= many["covered"][0] and few["rows"][0] < many["rows"][0]
    for wide in (figures[f"countdown:3 {name}, w 6"] for name in ("D5P4+", "distinct")):
        assert wide["rows"][0] < wide["nominal"]
