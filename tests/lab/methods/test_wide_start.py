"""The wide start against trees, enumeration and plain samples; samples that cool down; the first token of a block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import d5p4
from d5p4_lab.methods.wide_start import best_set, centred, pooled_states
from tests.fake import FakeModel, block_model

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
PROMPTS = ["abc", "abcdefg", "d"]


def answers(model, prompts=PROMPTS, **options):
    return d5p4.generate(model, prompts, **{"gen_length": 12, "seed": 3, "method": "wide-start"} | options)


def test_without_a_cut_it_is_the_tree_and_one_beam_is_a_sample():
    model = block_model(shifted=True)
    tree = answers(model, method="tree", order="left", k=3, spare=2)
    assert answers(model, k=3, spare=2, cuts=0).answers == tree.answers
    one = answers(model, method="tree", order="left", k=1)
    for cut in (1, 5, 12):  # the law of a tree with one beam is that of samples
        assert answers(model, k=1, cut=cut).answers == one.answers


def test_behind_the_cut_rows_are_plain_samples():
    """The second token of each answer is drawn from the model's own distribution, given the first one."""
    model, count = FakeModel(vocabulary=6, seed=2), 3000
    drawn = answers(model, [[0]] * count, k=2, spare=1, cut=1, gen_length=2, eos="never").sequences[..., -2:]
    for first in drawn[..., 0].unique().tolist():
        states = model.body(torch.tensor([[0, first, model.mask_id]])).states[0, -1]
        logits = (model.head.weight @ states + model.head.bias).masked_fill(model.head.banned, -torch.inf)
        logits[list(model.eos_ids)] = -torch.inf
        chance = logits.softmax(-1)
        seconds = drawn[..., 1][drawn[..., 0] == first]
        seen, expected = seconds.bincount(minlength=6), chance * len(seconds)
        kept = expected > 5
        chi = float(((seen - expected)[kept] ** 2 / expected[kept]).sum())
        assert len(seconds) > 100 and chi < 20 and not seen[chance == 0].any()  # P(chi > 20) < 0.0005 for 3 dimensions


def similarity_of(vectors, ridge):
    x = vectors - vectors.mean(0)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return (1 - ridge) * x @ x.T + ridge * np.eye(len(x))


def best_of_all(kernel, gain, k):
    def value(chosen):
        return np.linalg.slogdet(kernel[np.ix_(chosen, chosen)])[1] + gain[list(chosen)].sum()

    return list(max(itertools.combinations(range(len(kernel)), k), key=value))


def chosen_set(vectors, gain, k, ridge, tie, exists):
    return best_set(centred(vectors, ridge, exists), gain, k, tie, exists)


def test_the_set_is_the_best_of_all():
    draw = np.random.default_rng(0)
    vectors, gain = draw.normal(size=(5, 9, 4)), draw.normal(size=(5, 9))
    tie = torch.arange(9).expand(5, 9)
    for k, ridge in ((2, 0.1), (4, 0.3)):
        chosen = chosen_set(torch.tensor(vectors), torch.tensor(gain), k, ridge, tie, tie >= 0)
        assert chosen.tolist() == [
            best_of_all(similarity_of(v, ridge), g, k) for v, g in zip(vectors, gain, strict=True)
        ]
        exists = tie < 7  # rows that do not exist count for nothing, also not in the mean
        chosen = chosen_set(torch.tensor(vectors), torch.tensor(gain), k, ridge, tie, exists)
        assert chosen.tolist() == [
            best_of_all(similarity_of(v[:7], ridge), g[:7], k) for v, g in zip(vectors, gain, strict=True)
        ]
    assert chosen_set(torch.tensor(vectors), torch.tensor(gain), 3, 0.1, tie, tie < 2).tolist() == [[0, 1, 2]] * 5


@pytest.mark.parametrize("compared", ["states", "product", "d5p4"])
def test_a_cut_keeps_the_best_set_of_the_rows_that_ran(compared):
    model, cut, seen = block_model(shifted=True), 5, {}

    def watch(shot):
        if shot.step == cut:
            view = shot.view
            seen.update(tokens=shot.tokens, parents=shot.choice.parents, path=view.path, awake=shot.awake)
            seen.update(quality=view.quality, similarity=view.similarity)

    options = {"k": 3, "spare": 4, "cut": cut, "tilt": 2.0, "compared": compared, "beta": 5.0}
    answers(model, "abc", **options, callback=watch, eos="never")
    rows = seen["awake"][0].nonzero()[:, 0]
    tokens = seen["tokens"][0, rows]
    assert len(rows) == 7 and ((tokens != model.mask_id).sum(-1) == cut).all()
    states = model.body(torch.cat([torch.tensor([[0, 1, 2]]).expand(7, -1), tokens], 1)).features[:, 3 : 3 + cut]
    gain = 2 * 2.0 * seen["path"][0, rows].numpy() / cut
    kernel = similarity_of(states.mean(1).numpy(), 0.1)
    if compared == "product":
        counts = torch.nn.functional.one_hot(tokens[:, :cut]).sum(1).numpy()
        lengths = np.linalg.norm(counts, axis=1)
        kernel = kernel * (counts @ counts.T / np.outer(lengths, lengths))
    elif compared == "d5p4":
        inside = seen["similarity"][0, rows][:, rows].numpy()
        kernel = np.diag(seen["quality"][0, rows].numpy()) + 5.0 * inside
    assert rows[best_of_all(kernel, gain, 3)].tolist() == seen["parents"][0].tolist()


@pytest.mark.parametrize("cut", [1, 4])
def test_even_children_are_enumerated_and_each_row_that_is_kept_has_as_many(cut):
    """All rows differ at every step, and each cut gives three rows two children."""
    shots = []
    options = {"k": 3, "spare": 3, "cut": cut, "cuts": 11 // cut, "even": True, "compared": "d5p4", "eos": "never"}
    result = answers(block_model(shifted=True), "abc", callback=shots.append, **options)
    for shot, after in itertools.pairwise(shots):
        rows = [tuple(row) for row in after.tokens[0][after.awake[0]].tolist()]
        assert len(rows) == len(set(rows))
        if shot.step >= cut:
            parents = shot.choice.parents[0].tolist()
            before = [tuple(shot.tokens[0, i].tolist()) for i in parents]
            mask = [t == shot.tokens.max() for t in shot.tokens[0, parents[0]].tolist()]
            open_at = mask.index(True)
            families = [row[:open_at] for row in rows]
            children = 2 if shot.step % cut == 0 and shot.step < cut * (11 // cut) else 1
            assert [families.count(row[:open_at]) for row in before] == [children] * len(before)
    assert result.distinct.tolist() == [3]
    with pytest.raises(d5p4.D5P4Error, match="spare"):
        answers(block_model(), "a", k=3, spare=2, even=True)


def test_rows_are_those_of_k_samples_and_a_wide_start():
    model = FakeModel(vocabulary=24)
    for k, spare, cut, cuts in ((3, 6, 4, 1), (2, 3, 3, 2), (2, 0, 4, 1)):
        result = answers(model, "ab", k=k, spare=spare, cut=cut, cuts=cuts, eos="never")
        assert result.rows.tolist() == [1 + (k + spare) * cut * cuts + k * (11 - cut * cuts)]
        assert result.distinct.tolist() == [k]


def test_features_of_an_inner_layer_and_of_the_block():
    model, padded = block_model(), torch.tensor([[0, 0, 1, 2, 3, 11], [5, 4, 1, 2, 3, 11]])
    real = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    weight = torch.tensor([[False, False, False, True, True, False]] * 2)
    whole = pooled_states(model, padded, real, weight)
    torch.testing.assert_close(whole[1], model.body(padded[1:]).features[0, 3:5].mean(0))
    half = pooled_states(model, padded, real, weight, layer=0.5)
    torch.testing.assert_close(half[:1], pooled_states(model, padded[:1, 2:], real[:1, 2:], weight[:1, 2:], layer=0.5))
    next(model.parts()[1][1].parameters()).add_(1.0)  # the second of two layers is above the half
    torch.testing.assert_close(half, pooled_states(model, padded, real, weight, layer=0.5, most=1))
    assert not torch.allclose(whole, pooled_states(model, padded, real, weight))
    for options in ({"layer": 0.5}, {"pooled": "block"}, {"cuts": 2}, {"cool": 0.3}):
        own = answers(model, k=3, spare=3, cut=4, **options)
        alone = answers(model, PROMPTS[1], k=3, spare=3, cut=4, **options)  # a prompt does not depend on the others
        assert own.answers[1] == alone.answers[0] and own.distinct.tolist() == [3, 3, 3]


def test_samples_cool_down():
    model = block_model(shifted=True)
    warm, cold = (answers(model, method="independent", order="left", temperature=t) for t in (1.5, 0.2))
    cool = {"method": "cooling", "order": "left", "temperature": 1.5, "cool": 0.2}
    assert answers(model, **cool, hot=12).answers == warm.answers
    assert answers(model, **cool, hot=0).answers == cold.answers
    mixed = answers(model, **cool, hot=5)
    starts = [sorted(map(tuple, rows.tolist())) for result in (mixed, warm) for rows in result.sequences[..., -12:-7]]
    assert starts[:3] == starts[3:] and mixed.answers != warm.answers  # sorted, because scores order the answers
