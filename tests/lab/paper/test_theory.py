"""The expansions of the log-determinant, and the experiment around them."""

import json

import numpy as np
import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.theory import (
    common_share,
    look_at,
    shared_orders,
    transversals,
    weak_orders,
    whitened,
)
from tests.checkpoints import write_llada, write_mdlm

TINY = dict(length=24, steps=8, k=3, w=2, units=2, looks=4, sets=8)


def hollow(size: int, seed: int) -> np.ndarray:
    """Symmetric with zeros on the diagonal and spectral norm 1."""
    noise = np.random.default_rng(seed).normal(size=(size, size))
    noise = np.triu(noise, 1) + np.triu(noise, 1).T
    return noise / np.abs(np.linalg.eigvalsh(noise)).max()


def exact(k: np.ndarray) -> float:
    return float(np.linalg.slogdet(k)[1])


def remainders(values: np.ndarray, orders: list[int]) -> list[float]:
    """What may be left of log det(I + X) after n orders: Σ |x|^(n+1) / (n+1) / (1-|x|) over the eigenvalues of X."""
    size = np.abs(values)
    return [float((size ** (n + 1) / (n + 1) / (1 - size)).sum()) for n in orders]


@pytest.mark.parametrize("t", [0.3, 0.03, 0.003])
@pytest.mark.parametrize("seed", range(4))
def test_weak_expansion_leaves_only_higher_orders(seed, t):
    c = t * hollow(5, seed)
    norm, orders = weak_orders(np.eye(5) + c)
    assert norm == pytest.approx(t)
    left = np.abs(np.array(orders) - exact(np.eye(5) + c))
    assert (left <= np.array(remainders(np.linalg.eigvalsh(c), [2, 3])) + 1e-15).all()


@pytest.mark.parametrize("t", [0.3, 0.03, 0.003])
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_shared_expansion_leaves_only_higher_orders(rho, t):
    k = (1 - rho) * np.eye(5) + rho + (1 - rho) * t * hollow(5, 1)
    _, norm, orders = shared_orders(k, rho)
    assert norm <= t + 1e-12  # B is never smaller than (1-ρ) I
    left = np.abs(np.array(orders) - exact(k))
    assert (left <= np.array(remainders(np.linalg.eigvalsh(whitened(k, rho)), [1, 2, 3])) + 1e-14).all()


def test_shared_expansion_without_a_share_is_the_weak_one():
    k = np.eye(4) + 0.3 * hollow(4, 2)
    norm, (second, third) = weak_orders(k)
    base, shared_norm, (first, *rest) = shared_orders(k, 0.0)
    assert base == 0 and first == pytest.approx(0, abs=1e-12)
    assert shared_norm == pytest.approx(norm)
    assert rest == pytest.approx([second, third])


def test_whitening_undoes_the_base_and_its_trace_is_the_appendix_formula():
    k, rho, size = np.eye(4) + 0.5 * hollow(4, 3), 0.4, 4
    base = (1 - rho) * np.eye(size) + rho
    values, vectors = np.linalg.eigh(base)
    root = vectors * np.sqrt(values) @ vectors.T
    h = whitened(k, rho)
    np.testing.assert_allclose(root @ (np.eye(size) + h) @ root, k, atol=1e-12)
    residual = (k - base) / (1 - rho)
    above = residual[np.triu_indices(size, 1)].sum()
    assert np.trace(h) == pytest.approx(-2 * rho / (1 + (size - 1) * rho) * above)
    assert shared_orders(k, rho)[0] == pytest.approx(exact(base))


def test_equal_cosines_are_the_base_itself():
    k = 0.3 * np.eye(6) + 0.7
    base, norm, orders = shared_orders(k, 0.7)
    assert norm == pytest.approx(0, abs=1e-12)
    assert orders == pytest.approx([exact(k)] * 3) and base == pytest.approx(exact(k))


def test_two_rows_by_hand():
    found = look_at(np.array([[1, 0.6], [0.6, 1]]), 0.5)
    assert found.exact == pytest.approx(np.log(0.64))
    assert found.cosine == found.weak_norm == pytest.approx(0.6)
    assert found.weak == pytest.approx((-0.36, -0.36))  # C has eigenvalues 0.6 and -0.6
    assert found.bound == pytest.approx(0.6)  # of two rows the bound is the cosine
    assert found.base == pytest.approx(np.log(0.75))  # B has 1.5 and 0.5, K has 1.6 and 0.4, so H 1/15 and -1/5
    assert found.shared_norm == pytest.approx(0.2)
    assert found.shared[0] == pytest.approx(np.log(0.75) + 1 / 15 - 1 / 5)


def test_three_alike_rows_break_the_bound():
    found = look_at(0.5 * np.eye(3) + 0.5, 0.5)
    assert found.exact == pytest.approx(np.log(0.5))
    assert found.bound == pytest.approx((0.5 / 3) ** 0.5) and found.bound < found.cosine


def test_equal_rows_have_no_determinant():
    assert look_at(np.ones((2, 2)), 0.5) is None
    assert look_at(np.array([[1, 1, 0.1], [1, 1, 0.1], [0.1, 0.1, 1]]), 0.5) is None


@pytest.mark.parametrize("rho", [1.0, -0.1, np.nan])
def test_a_share_outside_its_range_is_an_error(rho):
    with pytest.raises(D5P4Error, match="rho="):
        shared_orders(np.eye(3), rho)


def test_sets_have_one_row_of_a_group_and_the_share_leaves_siblings_out():
    group = np.array([0, 0, 1, 1, 2, 2])
    found = list(transversals(group, 2, 50, np.random.default_rng(0)))
    assert all(len(set(group[rows])) == 2 for rows in found)
    assert {int(row) for rows in found for row in rows} == set(range(6))
    similarity = np.where(group[:, None] == group, 0.9, 0.2)
    assert common_share(similarity, group) == pytest.approx(0.2)
    assert common_share(-similarity, group) == 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theory")
    model = str(write_mdlm(folder / "tiny"))
    reproduce("theory", out=folder / "out", model=model, device="cpu", changes=TINY)
    return folder / "out" / "theory", model


def test_a_run_writes_its_files_with_finite_figures(ran):
    folder, _ = ran
    for name in ("config.json", "table.md", "figure.png", "figure.svg", "summary.json"):
        assert (folder / name).stat().st_size > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["claims"]) >= 5
    for name, value in summary["figures"].items():
        if "reaches 1" not in name:
            assert value[0] is not None and np.isfinite(value[0]), name
    assert summary["figures"]["d5p4: chosen set's log det above its pool's random sets"][0] >= 0


def test_a_second_run_adds_nothing_and_more_units_only_those(ran):
    folder, model = ran
    before = {name: (folder / f"{name}.jsonl").read_bytes() for name in ("d5p4", "independent")}
    reproduce("theory", out=folder.parent, model=model, device="cpu", changes=TINY, stages=["decode"])
    assert {name: (folder / f"{name}.jsonl").read_bytes() for name in before} == before
    with pytest.raises(D5P4Error, match="run 2 is missing"):
        reproduce("theory", out=folder.parent, model=model, changes=TINY | {"units": 3}, stages=["draw"])
    reproduce("theory", out=folder.parent, model=model, device="cpu", changes=TINY | {"units": 3}, stages=["decode"])
    for name, held in before.items():
        assert (folder / f"{name}.jsonl").read_bytes().startswith(held)
        assert len((folder / f"{name}.jsonl").read_bytes()) > len(held)


def test_the_paper_scale_on_the_other_layout(tmp_path):
    model = str(write_llada(tmp_path / "tiny-llada"))
    changes = TINY | {"steps": 99}  # more than positions: one a step
    reproduce("theory", scale="paper", out=tmp_path / "out", model=model, device="cpu", changes=changes)
    summary = json.loads((tmp_path / "out" / "theory" / "summary.json").read_text())
    assert summary["scale"] == "paper" and len(summary["claims"]) >= 5
