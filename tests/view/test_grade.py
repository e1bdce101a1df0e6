from __future__ import annotations

import pytest

import d5p4
from d5p4.view import grade, trace
from d5p4.view.trace import count_right
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")

RIGHT = "86+28=114,31-13=18,114-18=96"
SAME = "31-13=18,28+86=114,114-18=96"
WRONG = "86+28=114,31-13=18,114-18=97"


@pytest.fixture(scope="module")
def model():
    return d5p4.load("countdown", dtype="float32")


def test_answers_to_a_puzzle(model):
    texts = [RIGHT, SAME, WRONG, ""]
    right = grade(model, "86,28,13,31:96", texts)
    assert right == [True, True, False, False]
    assert count_right(model, texts, right) == 1


def test_what_is_no_puzzle_is_not_graded(model):
    for prompt in ("86,28", None, [1, 2], [{"role": "user", "content": "86,28,13,31:96"}]):
        assert grade(model, prompt, [RIGHT]) is None, prompt
    assert grade(FakeModel(), "86,28,13,31:96", [RIGHT]) is None  # nor what another model says
    assert trace(FakeModel(), "ab", k=2, gen_length=3, seed=1)["right"] is None
