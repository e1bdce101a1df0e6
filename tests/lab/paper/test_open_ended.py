"""Experiments that write without a prompt: pareto, fidelity, control, partition."""

import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper.answers import numbers_of
from d5p4_lab.paper.open_ended import TREE, WARM
from d5p4_lab.paper.pareto import SEARCH, TREE_AT_1
from d5p4_lab.paper.partition import SMC
from d5p4_lab.paper.run import reproduce
from tests.checkpoints import write_mdlm
from tests.lab.paper.smoke import DRAWN, cheap, files, smoke, write_text

SHORT = {"judges": ["judge"], "gen_length": 6, "steps": 3}
SWEEPS = {"beta": [1, 10, 100], "beta_x": [0.01, 100], "alpha": [1, 10]}
SWEEPS |= {"score_temperature": [0.01, 9], "token_temperature": [1.02, 5], "tree_temperature": [0.7, 1]}
SWEEPS |= {"independent_temperature": [0.7]}
PLANE = SHORT | SWEEPS | {"k": 3, "w": 2, "units": 2, "units_front": 3, "units_independent": 3}
FIDELITY = SHORT | {"k": 3, "w": 2, "units_fidelity": 4, "beta_fidelity": [1, 10, 100], "mauve_seeds": 2}
PARTITION = SHORT | {"units": 2, "units_large": 2, "interval": [1, 2], "beta": [1, 12], "beta_large": [30]}
PARTITION |= {"large": [3, 2], "lam_textbook": [5, 50], "interval_textbook": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_mdlm(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "val.txt")


def test_pareto_and_control_share_their_rows(tmp_path, model):
    out = tmp_path / "out"
    _, summary = smoke("pareto", out, PLANE, model=model)
    assert set(summary["figures"]["area"]["judge"]) == {*SEARCH, TREE, WARM, TREE_AT_1} and len(summary["claims"]) >= 8
    before = files(out)
    with cheap():
        control = reproduce("control", out=out, model=model, device="cpu", changes=PLANE)
    after = files(out)
    assert {name: after[name] for name in before} == before  # nothing was decoded or scored again
    assert set(after) - set(before) == {f"control/{name}" for name in DRAWN}
    assert "decoded on" in (control.folder / "table.md").read_text(encoding="utf-8")  # pareto decoded them


def test_fidelity(tmp_path, model, text):
    """Clusters are stored instead of features."""
    _, summary = smoke("fidelity", tmp_path / "out", FIDELITY, model=model, data=text)
    assert len(summary["figures"]) == 4 and len(summary["claims"]) == 6
    for values in summary["figures"].values():
        assert all(0 <= low <= value <= high <= 1 for value, low, high in (values["mauve"], values["star"]))
    with pytest.raises(D5P4Error, match="needs a text file: give --data text=FILE"):
        reproduce("fidelity", changes=FIDELITY, out=tmp_path / "new", model=model, device="cpu")


def test_partition(tmp_path, model):
    setup, summary = smoke("partition", tmp_path / "out", PARTITION, model=model)
    particles = {row["texts"] for case in setup.cases if "E-SMC" in case.group for row in numbers_of(setup, case)}
    assert particles == {4}  # all k·w particles are kept
    assert {case.group for case in setup.cases} == {"D5P3", "D5P4+", "D5P3 3×2", "D5P4+ 3×2", *SMC}
    assert any("more alike" in claim["claim"] for claim in summary["claims"])  # both weights at λ 5, every 2 steps
