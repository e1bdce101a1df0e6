"""The page's own arithmetic, in the browser that runs it: differences, characters of several tokens, damaged files."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from d5p4 import view
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """A file with one trace in it; its scripts can be called."""
    file = tmp_path_factory.mktemp("page") / "trace.html"
    view.write_html(file, [view.trace(FakeModel(), "ab", method="d5p4", k=3, w=2, gen_length=5, seed=1)])
    page = browser.new_page()
    page.goto(file.as_uri())
    yield page
    page.close()


def common(own: tuple, other: tuple) -> int:
    """Length of the longest common subsequence without masks (None)."""

    @cache
    def longest(i: int, j: int) -> int:
        if i == len(own) or j == len(other):
            return 0
        if own[i] is not None and own[i] == other[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    return longest(0, 0)


def test_differences_leave_the_longest_common_part(page):
    draw = random.Random(0)
    pairs = [[draw.choices(["a", "b", "c", None], k=draw.randrange(9)) for _ in range(2)] for _ in range(300)]
    all_marks = page.evaluate("(pairs) => pairs.map(([own, other]) => D5P4.diff.differing(own, other))", pairs)
    for (own, other), marks in zip(pairs, all_marks, strict=True):
        shared = [text for text, marked in zip(own, marks, strict=True) if not marked and text is not None]
        rest = iter(other)
        assert all(text in rest for text in shared)  # in order
        assert len(shared) == common(tuple(own), tuple(other))
        assert not any(marked for text, marked in zip(own, marks, strict=True) if text is None)


PLANT = """(trace) => {
  const [replay] = D5P4.trace.read(trace);
  const at = (node) => node && [node.step, node.row];
  const plain = (node) => ({ ...node, at: at(node), parent: at(node.parent), children: node.children.map(at) });
  return replay.tree.all.map(plain);
}"""


def test_beams_part_where_their_tokens_do(page):
    trace = view.trace(FakeModel(), "ab", method="tree", temperature=0, k=3, spare=2, gen_length=5, diversity=1.0)
    nodes = {tuple(node["at"]): node for node in page.evaluate(PLANT, trace)}
    everyone = [(t, row) for t, pool in enumerate(trace["pools"]) for row in range(len(pool["group"]))]
    assert set(nodes) == {*everyone, *((trace["steps"], row) for row in range(len(trace["final"]["parents"])))}
    assert len({(node["step"], node["lane"]) for node in nodes.values()}) == len(nodes)  # no two lines meet
    parted = 0
    for (step, row), node in nodes.items():
        siblings = nodes[tuple(node["parent"])]["children"] if node["parent"] else []
        assert (node["label"] is not None) == (len(siblings) > 1)  # accepted tokens are no branches
        if node["label"]:
            parted += 1
            changes = (trace["pools"] + [trace["final"]])[step]["changes"][row]
            texts = ["end" if piece in trace["end"] else text for piece, text in enumerate(trace["pieces"])]
            chances = {texts[piece]: math.exp(logprob) for _, piece, logprob in changes}
            assert node["label"]["chance"] == pytest.approx(chances[node["label"]["text"]])
    assert parted > 3
    leaves = [node["ranks"] for node in nodes.values() if node["step"] == trace["steps"]]
    assert sorted(sum(leaves, [])) == [0, 1, 2]
