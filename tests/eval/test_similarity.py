"""Cosines, and embeddings from a model of sentence-transformers."""

import itertools
import sys

import numpy as np
import pytest

from d5p4.eval.report import sentence_encoder
from d5p4.eval.stats import average_cosine
from tests.refusals import refusal


def test_what_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    assert "cannot be read as a sentence encoder" in refusal(sentence_encoder, tmp_path, "cpu")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install 'd5p4[eval]'" in refusal(sentence_encoder, tmp_path)
    for vectors in ([[1.0, np.inf]], [1.0, 2.0]):
        assert "finite numbers of shape" in refusal(average_cosine, vectors)


def test_average_cosine_is_the_mean_over_pairs():
    rows = np.random.default_rng(0).normal(size=(7, 5)) + 0.5
    pairs = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in itertools.permutations(rows, 2)]
    assert average_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert average_cosine([[2.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-1)
    assert average_cosine([[1.0, 0.0], [0.0, 0.0]]) == 0  # nothing has no direction
    assert average_cosine([[1.0, 2.0]]) == average_cosine(np.zeros((0, 4))) == 0
