"""Pooling, CKA by Gram matrices, and the experiment around them."""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from d5p4_lab.paper import features
from d5p4_lab.paper.features import debiased_cka
from tests.checkpoints import write_mdlm
from tests.lab.paper.smoke import smoke
from tests.lab.paper.test_windows import write_texts

TINY = dict(length=24, together=6, batches=2, points=3)


def test_debiased_cka_against_the_sum_over_different_items():
    source = np.random.default_rng(1)
    a, b = (x @ x.T for x in (source.normal(size=(6, 4)), source.normal(size=(6, 2))))

    def hsic(k, m):
        terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(6), 4)]
        return np.mean(terms)

    expected = hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b))
    assert debiased_cka(a, b) == pytest.approx(expected)
    assert debiased_cka(np.ones((6, 6)), b) == 0


def test_features(tmp_path, monkeypatch):
    """An encoder that counts letters replaces the shipped one."""
    letters = SimpleNamespace(encode=lambda texts: np.array([[text.count(c) for c in "etaoin"] for text in texts]))
    monkeypatch.setattr(features, "_encoder", lambda setup: letters)
    model, data = str(write_mdlm(tmp_path / "tiny")), write_texts(tmp_path / "texts.txt")
    _, summary = smoke("features", tmp_path / "out", TINY, model=model, data=data, gaps="by ratio")
    assert summary["figures"]["cka masked by ratio"][0] is None  # no token is masked at ratio 0
