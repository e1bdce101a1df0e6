"""The shipped model behind a server: n = 4 gives four different answers."""

import pytest

import d5p4
from d5p4.eval.countdown import is_right, problems
from tests.serve.running import running, together


def shares(server, puzzles, clients, **extra):
    """(share of puzzles with four different texts, share of right answers, mean of different right ones)"""
    client = server.client(timeout=3600)
    rows = []

    def work(mine):
        for number in mine:
            answer = client.completions.create(
                model="countdown", prompt=puzzles[number].prompt, n=4, seed=number, extra_body=extra
            )
            texts = {choice.text for choice in answer.choices}
            assert len(answer.choices) == 4 and answer.d5p4["distinct"] == len(texts)
            right = [choice.d5p4["right"] for choice in answer.choices]
            assert right == [is_right(puzzles[number], choice.text) for choice in answer.choices]
            rows.append((len(texts) == 4, sum(right) / 4, answer.d5p4["right"]))

    done = together(*(lambda i=i: work(range(i, len(puzzles), clients)) for i in range(clients)))
    assert done == [None] * clients, done
    return [sum(column) / len(puzzles) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.full)])
def test_four_different_answers(count):
    model, limits = d5p4.load("countdown", dtype="float32"), {"timeout": 3600.0}  # however busy the machine is
    with running(model, name="countdown", limits=limits) as server:
        puzzles = problems(count)
        few = {} if count > 1 else {"steps": 6, "spare": 0}
        four, right, ways = shares(server, puzzles, min(count, 8), **few)
        print(f"{count} puzzles: four different texts on {four:.0%}, {right:.1%} right, {ways:.2f} different right")
        if count > 1:
            drawn = shares(server, puzzles, 8, method="d5p4")[0]
            print(f"with method d5p4, four different texts on {drawn:.0%}")
        assert four == 1
