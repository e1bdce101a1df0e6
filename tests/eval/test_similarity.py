"""Cosines, and embeddings from a model of sentence-transformers."""

import sys

import numpy as np
import pytest

from d5p4.eval.similarity import average_cosine, sentence_encoder
from tests.refusals import refusal


def test_what_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    assert "cannot be read as a sentence encoder" in refusal(sentence_encoder, tmp_path, "cpu")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install 'd5p4[eval]'" in refusal(sentence_encoder, tmp_path)


def test_average_cosine_is_the_mean_over_pairs():
    rows = np.random.default_rng(0).normal(size=(7, 5)) + 0.5
    pairs = [
        rows[i] @ rows[j] / (np.linalg.norm(rows[i]) * np.linalg.norm(rows[j]))
        for i in range(7)
        for j in range(7)
        if i != j
    ]
    assert average_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_average_cosine_by_hand():
    assert average_cosine([[2.0, 0.0], [5.0, 0.0]]) == pytest.approx(1)
    assert average_cosine([[2.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-1)
    assert average_cosine([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) == pytest.approx(2 * 0.5**0.5 / 3)
    assert average_cosine([[1.0, 0.0], [0.0, 0.0]]) == 0  # nothing has no direction
    assert average_cosine([[1.0, 2.0]]) == average_cosine(np.zeros((0, 4))) == 0


def test_vectors_of_another_shape_have_no_cosine():
    assert "NaN or infinite" in refusal(average_cosine, [[1.0, np.inf]])
    assert "shape" in refusal(average_cosine, [1.0, 2.0])
