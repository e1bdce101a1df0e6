"""The expansions of the log-determinant, and the experiment around them."""

import itertools

import numpy as np
import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.theory import ERRORS, common_share, look_at, orders, transversals, whitened
from tests.checkpoints import write_mdlm
from tests.lab.paper.smoke import smoke

TINY = dict(length=24, steps=8, k=3, w=2, units=2, looks=4, sets=8)


def hollow(size: int, seed: int) -> np.ndarray:
    """Symmetric with zeros on the diagonal and spectral norm 1."""
    noise = np.random.default_rng(seed).normal(size=(size, size))
    noise = np.triu(noise, 1) + np.triu(noise, 1).T
    return noise / np.abs(np.linalg.eigvalsh(noise)).max()


def exact(k: np.ndarray) -> float:
    return float(np.linalg.slogdet(k)[1])


def remainders(values: np.ndarray, orders: list[int]) -> list[float]:
    """Bounds of the error of log det(I + X) after n orders: Σ |x|^(n+1) / (n+1) / (1-|x|) over X's eigenvalues."""
    size = np.abs(values)
    return [float((size ** (n + 1) / (n + 1) / (1 - size)).sum()) for n in orders]


def test_errors_of_expansions_are_of_higher_order():
    for t, rho in itertools.product((0.3, 0.03, 0.003), (0.0, 0.3, 0.9)):
        k = (1 - rho) * np.eye(5) + rho + (1 - rho) * t * hollow(5, 1)
        h = whitened(k, rho)
        norm, terms = orders(h)
        assert norm <= t + 1e-12  # B is never smaller than (1-ρ) I
        base = exact((1 - rho) * np.eye(5) + rho)
        left = np.abs(base + np.array(terms) - exact(k))
        bounds = np.array(remainders(np.linalg.eigvalsh(h), [1, 2, 3]))
        assert (left <= bounds + 1e-14).all(), (t, rho)
        if rho:
            values = look_at(k, rho)
            assert values is not None and values["base"] == pytest.approx(base)
            assert [values[name] for name in ERRORS[2:]] == pytest.approx(left, abs=1e-12)


def test_whitening_undoes_the_base_and_its_trace_is_the_appendix_formula():
    k, rho, size = np.eye(4) + 0.5 * hollow(4, 3), 0.4, 4
    base = (1 - rho) * np.eye(size) + rho
    values, vectors = np.linalg.eigh(base)
    root = vectors * np.sqrt(values) @ vectors.T
    h = whitened(k, rho)
    np.testing.assert_allclose(root @ (np.eye(size) + h) @ root, k, atol=1e-12)
    above = ((k - base) / (1 - rho))[np.triu_indices(size, 1)].sum()
    assert np.trace(h) == pytest.approx(-2 * rho / (1 + (size - 1) * rho) * above)


def test_two_rows_by_hand():
    pair = look_at(np.array([[1, 0.6], [0.6, 1]]), 0.5)
    assert pair["exact"] == pytest.approx(np.log(0.64))
    assert pair["cosine"] == pair["‖C‖₂"] == pair["bound"] == pytest.approx(0.6)
    assert pair["weak, order 2"] == pair["weak, order 3"] == pytest.approx(abs(-0.36 - np.log(0.64)))
    assert pair["base"] == pytest.approx(np.log(0.75))  # B has 1.5 and 0.5, K has 1.6 and 0.4, so H 1/15 and -1/5
    assert pair["‖H‖₂"] == pytest.approx(0.2)
    assert pair["shared, order 1"] == pytest.approx(abs(np.log(0.75) + 1 / 15 - 1 / 5 - np.log(0.64)))
    # Three similar rows break the bound; sets with equal rows are refused; ρ must be in its range.
    three = look_at(0.5 * np.eye(3) + 0.5, 0.5)
    assert three["bound"] == pytest.approx((0.5 / 3) ** 0.5) and three["bound"] < three["cosine"]
    assert look_at(np.ones((2, 2)), 0.5) is None
    for rho in (1.0, -0.1, np.nan):
        with pytest.raises(D5P4Error, match="rho="):
            look_at(np.eye(3), rho)


def test_sets_have_one_row_per_group_and_the_share_leaves_siblings_out():
    group = np.array([0, 0, 1, 1, 2, 2])
    sets = list(transversals(group, 2, 50, np.random.default_rng(0)))
    assert all(len(set(group[rows])) == 2 for rows in sets)
    assert {int(row) for rows in sets for row in rows} == set(range(6))
    similarity = np.where(group[:, None] == group, 0.9, 0.2)
    assert common_share(similarity, group) == pytest.approx(0.2)
    assert common_share(-similarity, group) == 0


def test_theory(tmp_path):
    model = str(write_mdlm(tmp_path / "tiny"))
    setup, summary = smoke("theory", tmp_path / "out", TINY, model=model, gaps="reaches 1")
    assert len(summary["claims"]) >= 5
    assert summary["figures"]["d5p4: chosen set's log det above its pool's random sets"][0] >= 0
    with pytest.raises(D5P4Error, match="1 of 3 rows of 'd5p4' are missing; run --stage decode"):
        reproduce("theory", out=tmp_path / "out", model=model, changes=TINY | {"units": 3}, stages=["draw"])
