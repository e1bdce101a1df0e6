"""Order-Token Search against a plain computation of its rule, token for token, and the law of its draws."""

import itertools
import math

import pytest
import torch

import d5p4
from d5p4.rng import ORDER, TOKEN, hash_tokens, mix, uniform
from tests.fake import FakeModel

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
LENGTH, SEED, KEY = 7, 5, 9


def search(model, prompts="ab", **options):
    return d5p4.generate(model, prompts, **dict(method="ots", gen_length=LENGTH, seed=SEED, eos="free") | options)


def log_chances(model, row):
    states = model.body(torch.tensor([[0, 1, *row]])).states[0, 2:]
    logits = (states @ model.head.weight.T + model.head.bias).masked_fill(model.head.banned, -torch.inf)
    return torch.log_softmax(logits, -1)


def hashed(row):
    return hash_tokens(torch.tensor(row), torch.arange(2, 2 + len(row)))


def plain_search(model, k, block, order, temperature, segment, eos):
    """Return the answers, their scores, and the rows after each step."""
    mask, blank = model.mask_id, [model.mask_id] * LENGTH
    beams = [(blank, 0.0, int(mix(hashed(blank), place))) for place in range(k)]  # tokens, score, tie
    size = segment or (block or math.ceil(LENGTH / 8))
    pools, began = [], None
    for step in range(LENGTH):
        start = step // (block or LENGTH) * (block or LENGTH)
        inside = [i for i in range(start, min(start + (block or LENGTH), LENGTH))]
        search_now, began = step // size != began, step // size
        children = []
        for row, score, tie in beams:
            number = sum(r == row and t < tie for r, _, t in beams)
            stream = mix(SEED, KEY, step, hashed(row), number)
            plain = log_chances(model, row)
            cdf = (plain / temperature).softmax(-1).cumsum(-1)
            for child in range(k if search_now and k > 1 else 1):
                u = uniform(mix(stream, TOKEN), torch.arange(2, 2 + LENGTH), child)
                token = [int(torch.searchsorted(cdf[i], u[i] * cdf[i, -1])) for i in range(LENGTH)]
                noise = uniform(mix(stream, ORDER), torch.arange(2, 2 + LENGTH), child)
                draft = [token[i] if row[i] == mask else row[i] for i in range(LENGTH)]
                chance = [float(plain[i, token[i]]) for i in range(LENGTH)]
                open_here = [i for i in inside if row[i] == mask]
                ends = [eos == "last" and t == model.eos_ids[0] for t in token]
                worth = {"confidence": [math.exp(x) for x in chance], "random": noise.tolist()}[order]
                worth = [0.0 if end else value for end, value in zip(ends, worth, strict=True)]
                first = max(open_here, key=lambda i: (round(worth[i], 9), -i))
                new = [draft[i] if i == first else row[i] for i in range(LENGTH)]
                gain = 0.0
                if search_now and k > 1:
                    hidden = sorted(open_here, key=lambda i: (-round(worth[i], 9), i))
                    hidden = hidden[:size] if segment or not block else hidden
                    masked = log_chances(model, [mask if i in hidden else draft[i] for i in range(LENGTH)])
                    gain = sum(float(masked[i, draft[i]]) for i in hidden)
                children.append((new, score + gain, int(mix(hashed(new), hashed(row), number, child))))
        if len(children) > k:
            best = sorted(range(len(children)), key=lambda c: (-round(children[c][1], 9), children[c][2]))
            children = [children[c] for c in sorted(best[:k])]
        beams = children
        pools.append([row for row, _, _ in beams])
    beams.sort(key=lambda beam: -round(beam[1], 9))
    return [row for row, _, _ in beams], [score for _, score, _ in beams], pools


@pytest.mark.parametrize(
    "k, block, order, temperature, segment, eos",
    [
        (3, 3, "confidence", 1.0, None, "free"),
        (2, None, "random", 1.7, None, "free"),
        (3, 4, "confidence", 1.4, 2, "last"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in itertools.product((2, 5), (None, 2), ("confidence", "random"), (1.3,), (None, 3), ("last",))
        ),
    ],
)
def test_scores_survivors_and_answers_are_those_of_the_rule(k, block, order, temperature, segment, eos):
    model, pools = FakeModel(scale=1.2, seed=3), []
    options = dict(k=k, block_length=block, order=order, temperature=temperature, segment=segment, eos=eos)
    result = search(model, keys=[KEY], callback=lambda shot: pools.append(shot.next_tokens[0].tolist()), **options)
    rows, scores, plain_pools = plain_search(model, k, block, order, temperature, segment, eos)
    assert pools == plain_pools and len({str(pool) for pool in pools}) == LENGTH
    torch.testing.assert_close(result.score[0], torch.tensor(scores, dtype=torch.float64))
    assert sorted(result.sequences[0, :, 2:].tolist()) == sorted(rows) and "drafts" in result.score_kind
    best = result.sequences[0, 0, 2:].tolist()
    assert best in [row for row, score in zip(rows, scores, strict=True) if score > scores[0] - 1e-9]


def test_rows_are_steps_times_beams_and_beams_squared_per_segment():
    """Without savings, S K + (L / B) K^2 rows, twice with guidance; with savings, what the model saw."""
    model = FakeModel(seed=3)
    for k, options, rows, forwards in (
        (3, {"block_length": 3}, 7 * 3 + 3 * 9, 7 + 3),
        (4, {"block_length": 3, "steps": 4}, 4 * 4 + 3 * 16, 4 + 3),
        (3, {"segment": 2, "guidance": 2.0}, 2 * (7 * 3 + 4 * 9), 7 + 4),
        (2, {"segment": 3, "select_window": (3, 5)}, 7 * 2 + 4, 7 + 1),
        (1, {"block_length": 3}, 7, 7),  # one beam has nothing to choose
    ):
        plain = search(model, ["ab", "cde"], k=k, savings=False, **options)
        assert plain.rows.tolist() == plain.rows_nominal.tolist() == [rows, rows], options
        assert plain.nfe.tolist() == [forwards, forwards], options
        model.rows_seen = 0
        saved = search(model, ["ab", "cde"], k=k, **options)
        assert saved.answers == plain.answers and saved.rows_nominal.tolist() == [rows, rows]
        assert model.rows_seen == int(saved.rows.sum()) < 2 * rows + (k == 1)
        assert saved.tokens_run.tolist() == [int(n) * t for n, t in zip(saved.rows, (2 + 7, 3 + 7), strict=True)]
