"""The expansions of the log-determinant, and the experiment around them."""

import itertools

import numpy as np
import pytest

from d5p4_lab.paper.theory import ERRORS, look_at, orders, whitened
from tests.checkpoints import write_mdlm
from tests.lab.paper.smoke import smoke

TINY = dict(length=24, steps=8, k=3, w=2, units=2, looks=4, sets=8)


def hollow(size: int, seed: int) -> np.ndarray:
    """Symmetric with zeros on the diagonal and spectral norm 1."""
    noise = np.random.default_rng(seed).normal(size=(size, size))
    noise = np.triu(noise, 1) + np.triu(noise, 1).T
    return noise / np.abs(np.linalg.eigvalsh(noise)).max()


def test_errors_of_expansions_are_of_higher_order():
    for t, rho in itertools.product((0.3, 0.03, 0.003), (0.0, 0.3, 0.9)):
        k = (1 - rho) * np.eye(5) + rho + (1 - rho) * t * hollow(5, 1)
        h = whitened(k, rho)
        norm, terms = orders(h)
        assert norm <= t + 1e-12  # B is never smaller than (1-ρ) I
        base, exact = (float(np.linalg.slogdet(matrix)[1]) for matrix in ((1 - rho) * np.eye(5) + rho, k))
        left = np.abs(base + np.array(terms) - exact)
        # The error of log det(I + X) after n orders is at most Σ |x|^(n+1) / (n+1) / (1-|x|) over X's eigenvalues.
        size = np.abs(np.linalg.eigvalsh(h))
        bounds = [float((size ** (n + 1) / (n + 1) / (1 - size)).sum()) for n in (1, 2, 3)]
        assert (left <= np.array(bounds) + 1e-14).all(), (t, rho)
        if rho:
            values = look_at(k, rho)
            assert values is not None and values["base"] == pytest.approx(base)
            assert [values[name] for name in ERRORS[2:]] == pytest.approx(left, abs=1e-12)


def test_two_rows_by_hand():
    pair = look_at(np.array([[1, 0.6], [0.6, 1]]), 0.5)
    assert pair["exact"] == pytest.approx(np.log(0.64))
    assert pair["cosine"] == pair["‖C‖₂"] == pair["bound"] == pytest.approx(0.6)
    assert pair["weak, order 2"] == pair["weak, order 3"] == pytest.approx(abs(-0.36 - np.log(0.64)))
    assert pair["base"] == pytest.approx(np.log(0.75))  # B has 1.5 and 0.5, K has 1.6 and 0.4, so H 1/15 and -1/5
    assert pair["‖H‖₂"] == pytest.approx(0.2)
    assert pair["shared, order 1"] == pytest.approx(abs(np.log(0.75) + 1 / 15 - 1 / 5 - np.log(0.64)))
    assert look_at(np.ones((2, 2)), 0.5) is None  # sets with equal rows have no log det


def test_theory(tmp_path):
    model = str(write_mdlm(tmp_path / "tiny"))
    _, summary = smoke("theory", tmp_path / "out", TINY, model=model, gaps="reaches 1")
    assert len(summary["claims"]) >= 5
