"""Order-Token Search against a plain computation of its rule, token for token, and the law of its draws."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

import d5p4
from d5p4.rng import ORDER, TOKEN, hash_tokens, mix, uniform
from d5p4_lab.methods import OrderTokenSearch
from tests.fake import FakeModel
from tests.methods.cases import chi_square
from tests.refusals import refusal

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


def plain_search(model, k, block, order, temperature, segment, eos, merge):
    """Return the answers, their scores, the rows after each step, and the scores added at each expansion."""
    mask, blank = model.mask_id, [model.mask_id] * LENGTH
    beams = [(blank, 0.0, int(mix(hashed(blank), place))) for place in range(k)]  # tokens, score, tie
    size = segment or (block or math.ceil(LENGTH / 8))
    pools, gained, began = [], [], None
    for step in range(LENGTH):
        start = step // (block or LENGTH) * (block or LENGTH)
        inside = [i for i in range(start, min(start + (block or LENGTH), LENGTH))]
        search_now, began = step // size != began, step // size
        children, gains = [], []
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
                gains.append(gain)
                children.append((new, score + gain, int(mix(hashed(new), hashed(row), number, child))))
        if len(children) > k:
            gained.append(gains)
            best = sorted(range(len(children)), key=lambda c: (-round(children[c][1], 9), children[c][2]))
            rows = [children[c][0] for c in best]
            best = [best[i] for i in sorted(range(len(best)), key=lambda i: merge and rows[i] in rows[:i])]
            children = [children[c] for c in sorted(best[:k])]
        beams = children
        pools.append([row for row, _, _ in beams])
    beams.sort(key=lambda beam: -round(beam[1], 9))
    return [row for row, _, _ in beams], [score for _, score, _ in beams], pools, gained


@pytest.mark.parametrize(
    "k, block, order, temperature, segment, eos, merge",
    [
        (3, 3, "confidence", 1.0, None, "free", False),
        (2, None, "random", 1.7, None, "free", True),
        (3, 4, "confidence", 1.4, 2, "last", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in itertools.product(
                (2, 5), (None, 2), ("confidence", "random"), (1.3,), (None, 3), ("last",), (False, True)
            )
        ),
    ],
)
def test_scores_survivors_and_answers_are_those_of_the_rule(
    monkeypatch, k, block, order, temperature, segment, eos, merge
):
    model, pools, gains = FakeModel(scale=1.2, seed=3), [], []
    rate = OrderTokenSearch.rate

    def spy(self, drafts):
        gains.append(rate(self, drafts))
        return gains[-1]

    monkeypatch.setattr(OrderTokenSearch, "rate", spy)
    options = dict(k=k, block_length=block, order=order, temperature=temperature, segment=segment, eos=eos, merge=merge)
    result = search(model, keys=[KEY], callback=lambda shot: pools.append(shot.next_tokens[0].tolist()), **options)
    rows, scores, plain_pools, plain_gains = plain_search(model, k, block, order, temperature, segment, eos, merge)
    assert pools == plain_pools and len({str(pool) for pool in pools}) == LENGTH
    torch.testing.assert_close(torch.cat(gains), torch.tensor(plain_gains, dtype=torch.float64))
    torch.testing.assert_close(result.score[0], torch.tensor(scores, dtype=torch.float64))
    assert sorted(result.sequences[0, :, 2:].tolist()) == sorted(rows) and "drafts" in result.score_kind
    best = result.sequences[0, 0, 2:].tolist()
    assert best in [row for row, score in zip(rows, scores, strict=True) if score > scores[0] - 1e-9]


def test_equal_children_take_all_places_unless_they_are_merged():
    model = FakeModel(scale=6.0, seed=3)
    prompts = ["ab", "cde", "f", "gg"]
    few, more = (search(model, prompts, k=4, block_length=3, merge=merge).distinct.tolist() for merge in (False, True))
    assert all(a <= b for a, b in zip(few, more, strict=True)) and sum(few) + 2 < sum(more)


def test_rows_are_steps_times_beams_and_beams_squared_per_segment():
    """Without savings, S K + (L / B) K^2 rows, twice with guidance; with savings, what the model saw."""
    model = FakeModel(seed=3)
    for k, options, rows, forwards in (
        (3, {"block_length": 3}, 7 * 3 + 3 * 9, 7 + 3),
        (4, {"block_length": 3, "steps": 4}, 4 * 4 + 3 * 16, 4 + 3),
        (3, {"segment": 2, "guidance": 2.0}, 2 * (7 * 3 + 4 * 9), 7 + 4),
        (2, {"segment": 99}, 7 * 2 + 4, 7 + 1),
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


def test_a_complete_beam_is_not_expanded():
    """A row that has ended has one child, costs nothing more, and never fills the places of other beams."""
    model = FakeModel(vocabulary=4, scale=1.0, seed=1)
    ended = []

    def look(shot):
        for before, after in zip(shot.tokens.tolist(), shot.next_tokens.tolist(), strict=True):
            done = [row for row in before if complete(model, row)]
            ended.append(len(done))
            assert all(after.count(row) <= before.count(row) for row in done)

    prompts = ["a", "b", "ab", "ba", "bb"]
    result = search(model, prompts, k=4, reveal="threshold", tau=0.6, segment=2, temperature=1.5, callback=look)
    assert sum(ended) > 0 and (result.score <= 0).all() and (result.score.diff(dim=-1) <= 0).all()
    one = [search(model, [p], k=4, reveal="threshold", tau=0.6, segment=2, temperature=1.5) for p in prompts]
    assert [r.answers[0] for r in one] == result.answers and [int(r.rows) for r in one] == result.rows.tolist()


def complete(model, row):
    end = row.index(model.eos_ids[0]) if model.eos_ids[0] in row else len(row)
    return model.mask_id not in row[:end]


def test_the_survivors_of_an_expansion_have_the_law_of_the_best_of_iid_draws():
    """Two beams of masks have four drafts with independent tokens. The two with the best scores survive."""
    model, draws = FakeModel(vocabulary=5, scale=1.0, seed=6), 4000
    mask, letters = model.mask_id, range(4)
    chances = log_chances(model, [mask, mask])
    drafts = {}
    for draft in itertools.product(letters, repeat=2):
        chance = [float(chances[i, draft[i]]) for i in (0, 1)]
        first = max((0, 1), key=lambda i: (round(chance[i], 9), -i))  # the order `confidence`
        row = tuple(draft[i] if i == first else mask for i in (0, 1))
        drafts[draft] = math.exp(sum(chance)), sum(chance), row  # the whole window is the block: its masks see nothing
    law: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for four in itertools.product(drafts.values(), repeat=4):
        best = sorted(four, key=lambda draft: -draft[1])[:2]
        law[tuple(sorted(row for _, _, row in best))] += math.prod(chance for chance, _, _ in four)
    seen: Counter[tuple[tuple[int, ...], ...]] = Counter()

    def look(shot):
        if shot.step == 0:
            seen.update(tuple(sorted(map(tuple, rows))) for rows in shot.next_tokens.tolist())

    search(model, ["ab"] * draws, k=2, gen_length=2, block_length=2, callback=look)
    outcomes = sorted(law)
    assert abs(sum(law.values()) - 1) < 1e-9 and set(seen) <= set(law) and len(outcomes) > 10
    counts = torch.tensor([seen[outcome] for outcome in outcomes])
    assert chi_square(counts, torch.tensor([law[outcome] for outcome in outcomes], dtype=torch.float64)) > 1e-3


def test_a_draft_agrees_with_its_child(monkeypatch):
    """At the positions that a step reveals, a child has the tokens of its draft: for every order and start."""
    drafted = []
    rate = OrderTokenSearch.rate
    monkeypatch.setattr(OrderTokenSearch, "rate", lambda self, drafts: drafted.append(drafts) or rate(self, drafts))
    model = FakeModel(scale=1.0)

    def fits(row, draft):
        return all(t in (d, model.mask_id) for t, d in zip(row, draft, strict=True))

    for options in ({}, {"order": "top", "reveal": "threshold", "tau": 0.3}, {"order": "ancestral", "steps": 3},
                    {"start": "entropy", "start_temperature": 3.0}, {"top_k": 2, "temperature": 2.0}):  # fmt: skip

        def look(shot):
            if drafted:
                drafts = drafted.pop()
                for p, parents in enumerate(shot.source.tolist()):
                    for row, parent in zip(shot.next_tokens[p].tolist(), parents, strict=True):
                        family = drafts.tokens[p, 3 * parent : 3 * parent + 3].tolist()
                        assert any(fits(row, draft) for draft in family)

        search(model, ["ab", "c"], k=3, segment=3, callback=look, **options)
        assert not drafted


def test_bad_input_is_named():
    model = FakeModel()
    for options, message in (
        ({"segment": 0}, "segment=0 must be a whole number of at least 1"),
        ({"segment": 1.5}, "segment=1.5"),
        ({"spare": 200}, "k=2 and spare=200 make 40804 children per search, more than 16384"),
        ({"distinct": True}, "distinct=True does not fit method ots"),
        ({"temperature": 0}, "temperature=0 with order='confidence' is deterministic"),
        ({"shrink": False}, "shrink"),
    ):
        assert message in refusal(search, model, k=2, **options), options


def test_one_beam_is_ordinary_decoding_with_its_score():
    """One beam has nothing to compare, so no draft is scored, and a score of 0 would claim certainty."""
    model = FakeModel(seed=3)
    one, ordinary = search(model, k=1), search(model, k=1, method="independent")
    assert one.texts == ordinary.texts and one.rows.tolist() == ordinary.rows.tolist()
    assert one.score.tolist() == ordinary.score.tolist() and one.score_kind == ordinary.score_kind
