"""The plain numbers of one prompt's answers."""

import dataclasses

import pytest
import torch

import d5p4
from d5p4.result import Answers
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def answers_with(texts, similarity):
    result = d5p4.generate(FakeModel(), ["abc"], k=len(texts), gen_length=6, seed=1)
    return Answers(dataclasses.replace(result, texts=[texts], similarity=torch.tensor([similarity])), 0)


def test_distance_is_one_minus_the_largest_similarity_to_another_answer():
    answers = answers_with(["one", "two", "three"], [[1.0, 0.25, 0.5], [0.25, 1.0, 0.75], [0.5, 0.75, 1.0]])
    assert answers.distance == pytest.approx([0.5, 0.25, 0.25])


def test_equal_texts_have_distance_zero_whatever_follows_their_end():
    answers = answers_with(["same", "other", "same"], [[1.0, 0.25, 0.844], [0.25, 1.0, 0.5], [0.844, 0.5, 1.0]])
    assert answers.distance == pytest.approx([0.0, 0.5, 0.0])


def test_one_answer_has_no_distance():
    assert answers_with(["alone"], [[1.0]]).distance == [None]
