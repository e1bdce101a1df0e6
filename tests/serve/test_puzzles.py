"""The shipped model behind a server: n = 4 gives four different answers, marked right or wrong."""

import pytest

import d5p4
from d5p4.eval.countdown import is_right, problems
from tests.serve.running import running, together


@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.full)])
def test_four_different_answers(count):
    puzzles, few = problems(count), {} if count > 1 else {"steps": 6, "spare": 0}
    model, limits = d5p4.load("countdown", dtype="float32"), {"timeout": 3600.0}  # however busy the machine is
    with running(model, name="countdown", limits=limits) as server:

        def ask(number):
            body = {"prompt": puzzles[number].prompt, "n": 4, "seed": number, "extra_body": few}
            reply = server.client(timeout=3600).completions.create(model="countdown", **body)
            texts = [choice.text for choice in reply.choices]
            assert len(texts) == len(set(texts)) == reply.d5p4["distinct"] == 4
            right = [is_right(puzzles[number], text) for text in texts]
            assert [choice.d5p4["right"] for choice in reply.choices] == right

        for start in range(0, count, 8):
            numbers = range(start, min(count, start + 8))
            assert together(*(lambda i=i: ask(i) for i in numbers)) == [None] * len(numbers)
