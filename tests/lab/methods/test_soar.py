"""SOAR against a plain computation of its rule, step for step."""

from __future__ import annotations

import itertools

import pytest
import torch

import d5p4
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
LENGTH = 8


def search(model, prompts="ab", **options):
    return d5p4.generate(model, prompts, **dict(method="soar", gen_length=LENGTH, seed=0, eos="free") | options)


def top_chances(model, row):
    """The probability and the token of the most probable token at each position."""
    states = model.body(torch.tensor([[0, 1, *row]])).states[0, 2:]
    logits = (states @ model.head.weight.T + model.head.bias).masked_fill(model.head.banned, -torch.inf)
    chance, token = torch.softmax(logits, -1).max(-1)
    return chance.tolist(), token.tolist()


def shown(model, row):
    """The row with masks behind its end."""
    return tuple(token if model.eos_ids[0] not in row[:i] else model.mask_id for i, token in enumerate(row))


def plain_search(model, width, tau, block, shrink):
    """Return the beams after each step, {shown row: score}, and the number of rows that were run."""
    mask, end = model.mask_id, model.eos_ids[0]

    def opened(row):
        return [i for i in range(row.index(end) if end in row else LENGTH) if row[i] == mask]

    beams, history, count = [([mask] * LENGTH, 0.0)], [], 0
    while any(opened(row) for row, _ in beams):
        place = min(min(opened(row)) for row, _ in beams if opened(row)) // block
        children = []
        for row, score in beams:
            here = [i for i in opened(row) if i // block == place]
            count += bool(here)
            chance, token = top_chances(model, row) if here else ([], [])
            sure = [i for i in here if chance[i] > tau]
            best = sorted(here, key=lambda i: (-round(chance[i], 9), i))[:width]
            for new in [sure] if sure else [[i] for i in best] or [[]]:
                child = [token[i] if i in new else t for i, t in enumerate(row)]
                gain = sum(chance[i] for i in new) / max(1, len(new))
                children.append((score + gain, child, bool(sure)))
        children.sort(key=lambda child: -child[0])
        keep = 1 if shrink and children[0][2] else width
        beams, merged = [], {}
        for score, row, _ in children:
            if shown(model, row) not in merged and len(beams) < keep:
                merged[shown(model, row)] = score
                beams.append((row, score))
        history.append(merged)
    return history, count


CASES = [(3, 0.6, LENGTH, True), (4, 0.8, 3, False), (2, 1.0, LENGTH, True)]
FULL = itertools.product((1, 2, 5), (0.3, 0.7, 0.95), (3, LENGTH), (True, False))


@pytest.mark.parametrize(
    "width, tau, block, shrink", [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
)
def test_the_beams_of_every_step_are_those_of_the_rule(width, tau, block, shrink):
    sizes = set()
    for seed in range(4):
        model, beams = FakeModel(vocabulary=7, scale=1.4, seed=seed), []

        def look(shot, model=model, beams=beams):
            beams.append({shown(model, row) for row in shot.next_tokens[0][shot.next_awake[0]].tolist()})

        options = dict(tau=tau, block_length=block, shrink=shrink)
        result = search(model, k=width, callback=look, **options)
        history, count = plain_search(model, width, tau, block, shrink)
        assert beams == [set(step) for step in history]
        last = sorted(history[-1].items(), key=lambda beam: -beam[1])
        texts = [row[: row.index(model.eos_ids[0])] if model.eos_ids[0] in row else row for row, _ in last]
        assert result.answers[0] == [list(text) for text in dict.fromkeys(texts)]
        scores = result.score[0][: len(result.answers[0])]
        torch.testing.assert_close(scores, torch.tensor([score for _, score in last[: len(scores)]]).double())
        assert result.rows.tolist() == result.rows_nominal.tolist() == [count]
        sizes |= {len(step) for step in history}
    assert len(sizes) > 1 or width == 1 or tau < 0.5


def test_it_returns_the_beams_that_are_left_and_says_if_they_are_few():
    model = FakeModel(scale=3.0)
    with pytest.warns(d5p4.DuplicateAnswers, match="only 1 different text for 3 answers; try method='tree'"):
        result = search(model, k=3, tau=0.2)
    assert len(result.texts[0]) == 1 and result.rows.tolist() == [1] and result.distinct.tolist() == [1]
    assert "SOAR" in result.score_kind and result.settings.params["tau"] == 0.2
    settings = search(FakeModel(), k=1, spare=1).settings  # the paper's K = 2
    assert settings.params == {"shrink": True, "tau": 0.95} and settings.temperature == 0
