"""The expansions of the log-determinant, and the experiment around them."""

import itertools

import numpy as np
import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.setup import Setup
from d5p4_lab.paper.theory import (
    EXPERIMENT,
    _options,
    brief,
    common_share,
    look_at,
    pools_of,
    shared_orders,
    transversals,
    weak_orders,
    whitened,
)
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
    for t, seed in itertools.product((0.3, 0.03, 0.003), range(4)):
        c = t * hollow(5, seed)
        norm, orders = weak_orders(np.eye(5) + c)
        assert norm == pytest.approx(t)
        left = np.abs(np.array(orders) - exact(np.eye(5) + c))
        assert (left <= np.array(remainders(np.linalg.eigvalsh(c), [2, 3])) + 1e-15).all(), (t, seed)
    for t, rho in itertools.product((0.3, 0.03, 0.003), (0.0, 0.3, 0.9)):
        k = (1 - rho) * np.eye(5) + rho + (1 - rho) * t * hollow(5, 1)
        _, norm, orders = shared_orders(k, rho)
        assert norm <= t + 1e-12  # B is never smaller than (1-ρ) I
        left = np.abs(np.array(orders) - exact(k))
        bounds = np.array(remainders(np.linalg.eigvalsh(whitened(k, rho)), [1, 2, 3]))
        assert (left <= bounds + 1e-14).all(), (t, rho)


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
    pair = look_at(np.array([[1, 0.6], [0.6, 1]]), 0.5)
    assert pair.exact == pytest.approx(np.log(0.64))
    assert pair.cosine == pair.weak_norm == pytest.approx(0.6)
    assert pair.weak == pytest.approx((-0.36, -0.36))  # C has eigenvalues 0.6 and -0.6
    assert pair.bound == pytest.approx(0.6)  # for two rows the bound is the cosine itself
    assert pair.base == pytest.approx(np.log(0.75))  # B has 1.5 and 0.5, K has 1.6 and 0.4, so H 1/15 and -1/5
    assert pair.shared_norm == pytest.approx(0.2)
    assert pair.shared[0] == pytest.approx(np.log(0.75) + 1 / 15 - 1 / 5)
    # Three similar rows break the bound; sets with equal rows are refused; ρ must be in its range.
    pair = look_at(0.5 * np.eye(3) + 0.5, 0.5)
    assert pair.exact == pytest.approx(np.log(0.5))
    assert pair.bound == pytest.approx((0.5 / 3) ** 0.5) and pair.bound < pair.cosine
    assert look_at(np.ones((2, 2)), 0.5) is None
    assert look_at(np.array([[1, 1, 0.1], [1, 1, 0.1], [0.1, 0.1, 1]]), 0.5) is None
    for rho in (1.0, -0.1, np.nan):
        with pytest.raises(D5P4Error, match="rho="):
            shared_orders(np.eye(3), rho)


def test_sets_have_one_row_per_group_and_the_share_leaves_siblings_out():
    group = np.array([0, 0, 1, 1, 2, 2])
    sets = list(transversals(group, 2, 50, np.random.default_rng(0)))
    assert all(len(set(group[rows])) == 2 for rows in sets)
    assert {int(row) for rows in sets for row in rows} == set(range(6))
    similarity = np.where(group[:, None] == group, 0.9, 0.2)
    assert common_share(similarity, group) == pytest.approx(0.2)
    assert common_share(-similarity, group) == 0


def test_stored_cosines_keep_four_digits_of_their_distance_from_one():
    stored = {0.123456: 0.1235, 0.987654321: 0.98765, 0.99999876543: 0.999998765, 1 - 1e-9: 1.0, 1.0: 1.0}
    assert {cosine: brief(cosine) for cosine in stored} == stored


def test_pools_are_decoded_with_the_solver_of_the_settings(tmp_path):
    setups = [Setup(EXPERIMENT, "box", tmp_path, changes=changes) for changes in ({}, {"solver": "n-starts"})]
    assert [_options(setup, "d5p4")["solver"] for setup in setups] == ["local-search", "n-starts"]
    assert ["solver" in pools_of(setup, "d5p4").made_with for setup in setups] == [False, True]
    assert Setup(EXPERIMENT, "paper", tmp_path)["solver"] == "n-starts"


def test_theory(tmp_path):
    model = str(write_mdlm(tmp_path / "tiny"))
    setup, summary = smoke("theory", tmp_path / "out", TINY, model=model, gaps="reaches 1")
    assert len(summary["claims"]) >= 5
    assert summary["figures"]["d5p4: chosen set's log det above its pool's random sets"][0] >= 0
    with pytest.raises(D5P4Error, match="1 of 3 rows of 'd5p4' are missing; run --stage decode"):
        reproduce("theory", out=tmp_path / "out", model=model, changes=TINY | {"units": 3}, stages=["draw"])
