"""What `generate` promises its caller, on the fake model."""

import copy
import dataclasses
import gc
import json
import math
import pickle
import re
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch

import d5p4
from d5p4.decode.rows import RowRunner
from d5p4.eval import lexical
from d5p4.ops.vocab import logits_of
from tests.fake import FakeModel, fitting
from tests.history import History
from tests.refusals import refusal


def generate(model, prompts=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        return d5p4.generate(model, prompts, **fitting(dict(method="d5p4", k=3, w=3, gen_length=8, seed=5) | options))


@pytest.fixture(params=["tree", "d5p4"])
def decode(request):
    """`generate` with the default method and with the paper's, for promises that hold whatever the method is."""
    return partial(generate, method=request.param)


def test_fields_and_shapes(decode):
    model = FakeModel()
    r = decode(model, ["abc", "ahead"], logprobs=True)
    assert [len(a) for a in r.answers] == [3, 3] and [len(t) for t in r.texts] == [3, 3]
    assert r.sequences.shape == (2, 3, 13) and r.attention_mask.sum(-1).tolist() == [11, 13]
    assert r.score.shape == (2, 3) and (r.score.diff(dim=-1) <= 0).all()
    assert r.similarity.shape == (2, 3, 3) and r.logdet.shape == (2,)
    rows = {"tree": 1 + 7 * 3, "d5p4": 8 * 9}[r.settings.method]
    assert r.seed == 5 and r.nfe.tolist() == [8, 8] and r.rows_nominal.tolist() == [rows, rows]
    assert "entropy" in r.score_kind
    for p in range(2):
        assert r.distinct[p] == len({tuple(a) for a in r.answers[p]})
        for a, text, lp, reveal in zip(r.answers[p], r.texts[p], r.logprobs[p], r.reveal_step[p], strict=True):
            assert text == model.tokenizer.decode(a) and len(lp) == len(a) == len(reveal)
            assert all(x <= 0 for x in lp) and sorted(set(reveal)) == sorted(reveal)
        for i in range(3):
            sequence = r.sequences[p, i][r.attention_mask[p]].tolist()
            assert sequence[-8:][: len(r.answers[p][i])] == r.answers[p][i]
            assert model.mask_id not in sequence


def test_lineage_leads_back_through_history():
    kept = History()
    r, steps = generate(FakeModel(), "abc", callback=kept, temperature=2.0), kept[0]
    for i in range(3):
        path = r.lineage[0][i].tolist()
        for t in range(len(steps) - 1):
            ancestor, child = steps[t].tokens[path[t]], steps[t + 1].tokens[path[t + 1]]
            assert path[t] in steps[t].parents.tolist()
            known = ancestor != 11
            assert torch.equal(ancestor[known], child[known])
        final = r.sequences[0, i][-8:]
        known = steps[-1].tokens[path[-1]] != 11
        assert torch.equal(steps[-1].tokens[path[-1]][known], final[known])
    for step in steps:
        assert step.quality.shape == step.scores.shape == step.group.shape == (9,)
        assert step.similarity.shape == (9, 9) and (step.similarity.diagonal() == 1).all()
        assert step.group[step.parents].tolist() == [0, 1, 2]  # one of each group


def test_score_of_a_carrying_model_is_the_mean_log_probability_at_reveal(decode):
    model = FakeModel(carry_over=True)
    model.eos_ids = ()
    r = decode(model, "abc", logprobs=True, steps=5)
    for i in range(3):
        assert r.score[0, i].item() == pytest.approx(sum(r.logprobs[0][i]) / 8, abs=1e-9)


def test_logprob_is_the_models_own_at_the_reveal(decode):
    model = FakeModel()
    kept = History()
    r = decode(model, "abc", callback=kept, logprobs=True, temperature=3.0, eos="free")
    answer, reveal, logprob = r.answers[0][0], r.reveal_step[0][0], r.logprobs[0][0]
    for j, token in enumerate(answer):
        before = kept[0][reveal[j]].tokens[r.lineage[0][0, reveal[j]]]
        states = model.body(torch.cat([torch.tensor([0, 1, 2]), before])[None]).states[0, 3 + j]
        logits = logits_of(states[None], model.head.weight, model.head.bias, model.head.banned)
        assert logprob[j] == pytest.approx(logits.log_softmax(-1)[0, token].item(), abs=1e-9)


def test_same_seed_same_answers_and_a_fresh_one_is_returned(decode):
    model = FakeModel()
    a = decode(model, "abc", seed=None, temperature=2.0)
    b = decode(model, "abc", seed=None, temperature=2.0)
    assert a.seed != b.seed
    assert decode(model, "abc", seed=a.seed, temperature=2.0).answers == a.answers


def test_prompt_forms_agree(decode):
    model, ids = FakeModel(), [0, 1, 2]
    few = dict(k=1, w=2, gen_length=4, seed=7, keys=[4], temperature=1.5)
    expected = decode(model, "abc", **few).answers
    array = np.array(ids)
    for prompt in (["abc"], ids, [ids], torch.tensor(ids), torch.tensor([ids]), array, [array], list(array), ("abc",)):
        assert decode(model, prompt, **few).answers == expected, prompt
    numbers = dict(k=np.int64(1), seed=np.int64(7), keys=np.array([4]), temperature=np.float64(1.5))
    assert decode(model, "abc", **few | numbers).answers == expected


def test_a_selector_of_ones_own_is_told_what_is_wrong(monkeypatch):
    for parents, children, message in (
        ([[0, 1, 9]], 3, "outside the pool of 9"),
        ([[0, 1, -1]], 3, "outside the pool"),
        ([0, 1, 2], 3, "of shape (3,)"),
        ([[0, 1, 2]], 0, "0 children per parent"),
        ([[0.5, 1, 2]], 3, "must return a Choice of int64 parents"),
        ([[0, 1, 2, 3]], None, "4 x 1 rows where 3 are needed"),
    ):

        def select(pool, k, key, parents=parents, children=children):
            chosen = torch.tensor(parents)
            return pool.keep(chosen) if children is None else d5p4.Choice(chosen, children)

        method = d5p4.Method("mine", select)
        monkeypatch.setitem(d5p4.METHODS, "mine", method)
        assert message in refusal(generate, FakeModel(), "abc", method="mine"), parents
    assert "method 'mine' exists already" in refusal(d5p4.register, d5p4.METHODS["mine"])


def test_a_result_has_length_items_and_plain_data(decode):
    result = decode(FakeModel(), ["abc", "<b>"[1:2]], logprobs=True)
    assert len(result) == 2 and [answers.texts for answers in result] == result.texts
    assert result[-1].texts == result.texts[1] and result[0].distinct == int(result.distinct[0])
    for wrong in (2, -3, "texts"):
        with pytest.raises(IndexError, match="this result has 2"):
            result[wrong]
    assert [answers.place for answers in result[1:]] == [1] and list(result[0]) == result.texts[0]
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["seed"] == result.seed and plain["settings"]["k"] == result.settings.k
    assert [entry["answers"] for entry in plain["prompts"]] == result.texts and "reveal_step" in plain["prompts"][0]
    score, entry = result[0].score, plain["prompts"][0]
    assert entry["score"] == [float(f"{x:.6g}") for x in score] == pytest.approx(score, rel=1e-5)  # short in a file
    assert entry["logprobs"] == result.logprobs[0]


def test_extras_are_read_by_their_names(decode):
    """In every copy of a result, and with None for those that the call did not ask for."""
    plain, full = (decode(FakeModel(), ["abc", "<b>"[1:2]], logprobs=x) for x in (False, True))
    assert plain.extras.keys() == full.extras.keys() - {"window", "reveal_at", "logprob_at"}
    assert plain.stopped is plain.window is plain.logprobs is plain.reveal_step is None
    with pytest.raises(AttributeError, match="a result has no 'logprob'"):
        _ = plain.logprob
    steps = full.extras["reveal_at"][1][:, full.window[1]]
    for result in (full, copy.deepcopy(full), pickle.loads(pickle.dumps(full)), dataclasses.replace(full, seed=3)):
        assert result.logprobs == full.logprobs
        assert result.reveal_step[1] == [row[: len(a)].tolist() for row, a in zip(steps, full.answers[1], strict=True)]
    full.extras["votes"] = torch.ones(2)  # a method's own
    assert full.votes.tolist() == [1, 1]


def test_a_notebook_shows_facts_and_the_answers_to_the_first_prompts():
    result = dataclasses.replace(generate(FakeModel(), ["abc"] * 12), texts=[["<i>&"] * 3] * 12)
    page, single = result._repr_html_(), result[11]._repr_html_()
    assert f"12 prompts · {int(result.distinct.sum())} of 36 answers are distinct" in page and "<i>" not in page
    assert page.count("&lt;i&gt;&amp;") == 30 and single.count("&lt;i&gt;&amp;") == 3


def test_a_tokenizers_output_is_a_prompt(decode):
    """Also a padded batch, and a list of them; padding on either side is not part of a prompt."""
    expected = decode(FakeModel(), [[0, 1, 2], [3]]).answers
    batch = {"input_ids": torch.tensor([[0, 1, 2], [9, 9, 3]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 1]])}
    assert decode(FakeModel(), batch).answers == expected
    single = [{"input_ids": [0, 1, 2]}, {"input_ids": [3, 9], "attention_mask": [1, 0]}]
    assert decode(FakeModel(), single).answers == expected
    assert "needs 'input_ids'" in refusal(decode, FakeModel(), {"ids": [1]})


def test_chat_is_applied_where_there_is_a_template(decode):
    chatty = FakeModel(template=True)
    expected = decode(chatty, [0, 1, 1]).answers  # the template adds b
    assert decode(chatty, "ab").answers == expected
    assert decode(chatty, [{"role": "user", "content": "ab"}]).answers == expected
    plain = FakeModel()  # without a template, one message of the user's is the prompt
    assert decode(plain, [{"role": "user", "content": "ab"}]).answers == decode(plain, "ab").answers
    assert decode(chatty, "ab", chat=False).answers == decode(chatty, [0, 1]).answers


def test_end_of_text_last_and_never():
    model = FakeModel()
    model.head.bias[10] = 1.5
    prompts = ["abc", "ahead", "c", "jig"]
    free, last, never = (generate(model, prompts, gen_length=12, eos=eos) for eos in ("free", "last", "never"))
    lengths = [sum(len(a) for answers in r.answers for a in answers) for r in (free, last, never)]
    assert lengths[0] < lengths[1] < lengths[2] == 4 * 3 * 12
    assert not any(10 in answer for answers in free.answers for answer in answers)
    assert not (never.sequences[..., -12:] == 10).any()


def test_infilling_keeps_the_given_text_and_appends_only_when_asked(decode):
    model = FakeModel()
    hole = [0, 11, 2, 11, 11]
    r = decode(model, [hole], gen_length=None)
    assert all(len(t) == 5 and t[0] == "a" and t[2] == "c" for t in r.texts[0])
    assert all(len(a) == 3 for a in r.answers[0])
    r = decode(model, [hole], gen_length=2, eos="never")
    assert r.sequences.shape[-1] == 7 and all(len(t) == 7 for t in r.texts[0])


def test_guidance_runs_the_second_half_only_where_it_is_on():
    model = FakeModel()
    full = generate(model, "abc", guidance=2.0)
    part = generate(model, "abc", guidance=2.0, guidance_window=(0, 4))
    share = generate(model, "abc", guidance=2.0, guidance_window=(0, 0.5))
    off = generate(model, "abc")
    assert full.rows_nominal.item() == 144 and part.rows_nominal.item() == 108 and off.rows_nominal.item() == 72
    assert share.rows_nominal.item() == 108 and share.answers == part.answers
    assert generate(model, "abc", method="d5p4-p").rows_nominal.item() == 108
    assert full.answers != off.answers


def test_guidance_in_the_loop_is_guidance_on_logits(decode):
    """One step, one row: the draw must follow l_u + g (l_c - l_u)."""
    model, g = FakeModel(), 2.5
    r = decode(model, "abc", k=1, w=1, gen_length=1, guidance=g, temperature=0)
    masked = torch.tensor([[0, 1, 2, 11], [11, 11, 11, 11]])
    states = model.body(masked).states[:, -1]
    conditional, free = states @ model.head.weight.T + model.head.bias
    logits = (free + g * (conditional - free)).masked_fill(model.head.banned, -math.inf)
    assert r.sequences[0, 0, -1] == logits.argmax()


def test_callback_may_drop_prompts_without_touching_the_others(decode):
    model = FakeModel()
    prompts = ["abc", "ahead", "c"]
    whole = decode(model, prompts)
    steps = []

    def drop(shot):
        steps.append(shot.prompts.tolist())
        return [1] if shot.step == 2 else None

    r = decode(model, prompts, callback=drop)
    assert [sorted(s) for s in steps] == [[0, 1, 2]] * 3 + [[0, 2]] * 5
    assert r.answers[0] == whole.answers[0] and r.answers[2] == whole.answers[2]
    assert r.answers[1] == [] and r.score[1].isnan().all()
    assert r[1].score == r[1].distance == [] and "no answers" in r[1]._repr_html_()
    json.dumps(r.to_dict(), allow_nan=False)
    for drop in ([np.int64(1)], torch.tensor([1]), 1, {0, 1, 2}):
        dropped = decode(model, prompts, gen_length=3, callback=lambda shot, drop=drop: drop)
        assert dropped.answers[1] == [] and (dropped.answers[0] == []) == (drop == {0, 1, 2})


def test_what_a_callback_writes_changes_no_answer(decode):
    def write(shot):
        for values in (shot.next_tokens, shot.next_logprobs, shot.source, shot.next_awake):
            if values is not None:
                values.zero_()
        shot.shares.clear()

    plain, written = (decode(FakeModel(), ["abc", "c"], callback=call) for call in (None, write))
    assert plain.answers == written.answers and torch.equal(plain.score, written.score)
    assert [x.tolist() for x in plain.lineage] == [x.tolist() for x in written.lineage]


@pytest.mark.parametrize("carry_over", [False, True])
def test_best_of_n_ranks_as_told(carry_over):
    model = FakeModel(carry_over=carry_over)
    pool = generate(model, ["abc", "c"], method="independent", k=9, logprobs=True)
    counts = [[t.count(letter) for t in texts] for texts, letter in zip(pool.texts, "cg", strict=True)]
    best = generate(model, ["abc", "c"], method="best-of-n", scorer=lambda t, ref: t.count(ref), references=["c", "g"])
    assert best.score.tolist() == [sorted(values, reverse=True)[:3] for values in counts]
    assert [[t.count(letter) for t in texts] for texts, letter in zip(best.texts, "cg", strict=True)] == (
        best.score.tolist()
    )
    assert "scorer" in best.score_kind
    for rank in ("auto", "logprob" if carry_over else "entropy"):  # the score that this model's answers are sorted by
        best = generate(model, "abc", method="best-of-n", rank=rank)
        assert best.score[0].tolist() == pytest.approx(pool.score[0, :3].tolist(), abs=1e-9)


def test_best_of_n_without_repeats_keeps_the_best_different_texts():
    model, repeated = FakeModel(), 0
    for seed in range(6):
        options = dict(gen_length=2, temperature=1.0, seed=seed)
        pool = generate(model, "abc", method="independent", k=12, **options)
        best = dict(
            zip(pool.texts[0][::-1], pool.score[0].tolist()[::-1], strict=True)
        )  # the best of a text comes last
        plain = generate(model, "abc", method="best-of-n", k=3, w=4, **options)
        different = generate(model, "abc", method="best-of-n", k=3, w=4, repeats=False, **options)
        assert len(set(different.texts[0])) == min(3, len(best))
        top = sorted(best.values(), reverse=True)[:3]
        assert len(best) < 3 or different.score[0].tolist() == pytest.approx(top, abs=1e-9)
        repeated += len(set(plain.texts[0])) < 3 <= len(best)
    assert repeated


def test_logdet_is_of_the_chosen_rows_and_minus_infinity_for_equal_ones():
    r = generate(FakeModel(), ["abc", "ahead", "jig"], temperature=2.0, k=2)
    expected = torch.log(1 - r.similarity[:, 0, 1] ** 2)
    torch.testing.assert_close(r.logdet, expected, atol=1e-9, rtol=0)
    same = generate(FakeModel(), "abc", gen_length=1, k=3, temperature=3.0)  # one step: all rows are the first pool's
    assert same.logdet.item() == -math.inf and (same.similarity == 1).all()


def test_holes_at_the_end_of_a_prompt_are_not_the_answer(decode):
    model = FakeModel()
    model.head.bias[10] = 30.0  # end of text everywhere
    r = decode(model, [[0, 11]], gen_length=3, eos="free")
    likely = slice(1 if r.settings.method == "tree" else None)  # the other texts of a tree have another token
    assert all(a == [10] for a in r.answers[0][likely])  # the hole's token stays, what follows is cut
    assert all(t.startswith("a") and len(t) == 2 for t in r.texts[0][likely])


def test_fewer_distinct_answers_than_asked_warn():
    model = FakeModel(scale=20.0)
    options = dict(gen_length=2, seed=0, temperature=0.01)
    with pytest.warns(d5p4.DuplicateAnswers, match="only 1 different text for 4 answers; try method='tree'"):
        assert d5p4.generate(model, "abc", method="d5p4", **options).distinct.item() < 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert d5p4.generate(model, "abc", **options).distinct.item() == 4
        assert d5p4.generate(model, "abc", top_k=1, **options).distinct.item() == 1  # the model has no other text


def test_mask_and_banned_ids_never_come_out(decode):
    model = FakeModel()
    model.head.bias[11], model.head.bias[4] = 50.0, 50.0
    model.head.banned[4] = True
    r = decode(model, "abc", gen_length=12)
    assert not torch.isin(r.sequences[..., 3:], torch.tensor([4, 11])).any()


@pytest.mark.parametrize("carry_over", [False, True])
def test_nan_logits_name_the_step_and_row(carry_over):
    model = FakeModel(carry_over=carry_over)
    original, calls = model.body, []

    def broken(tokens, attention_mask=None):
        hidden = original(tokens, attention_mask)
        calls.append(1)
        if len(calls) == 3:
            hidden.states[0] = math.nan
        return hidden

    model.body = broken
    for method in ("tree", "d5p4", "independent"):
        calls.clear()
        with pytest.raises(d5p4.NonFiniteLogits, match=r"step 2, prompt 0, row \d"):
            generate(model, "abc", method=method)


BAD = [
    ([], {}, "the list is empty"),
    ("abc", {"gen_length": 100}, "gen_length: the prompt has 3 tokens and asks for 100 more, but the model takes at"),
    (["a", "a" * 70], {}, "prompt 1: the prompt has 70 tokens"),
    ([0, 99], {}, "token id 99"),
    ("abc", {"sets": 3}, "sets: works only without a prompt"),
    (None, {"sets": 0}, "sets=0"),
    (None, {"guidance": 2.0}, "guidance=2"),
    ([{"role": "system", "content": "ab"}], {}, "no chat template"),
    ("abc", {"n": 3}, "n: use k"),
    ("abc", {"torch_dtype": "auto"}, "torch_dtype: it belongs to d5p4.load"),
    ("abc", {"chat": True}, "needs a chat template"),
    ("abc", {"keys": ["a", "b"]}, "keys: there are 2 entries for 1 prompts"),
    (["a", "b"], {"keys": ["x", "x"]}, "key 'x' names two prompts"),
    ("abc", {"seed": "x"}, "seed='x'"),
    ("abc", {"scorer": len}, "scorer: method 'd5p4' takes no scorer; use method='best-of-n'"),
    ("abc", {"method": "best-of-n", "rank": "scorer"}, "needs scorer="),
    ("abc", {"method": "best-of-n", "repeats": "no"}, "repeats='no'"),
    ("abc", {"method": "best-of-n", "scorer": lambda t: [1]}, "1 numbers for 9 texts"),
    ("abc", {"method": "best-of-n", "references": ["x"]}, "references: need scorer="),
    ("abc", {"steps": 1, "block_length": 2}, "steps=1 is fewer than the 4 blocks"),
    ("abc", {"steps": 1, "temperature": 0, "order": "random"}, "one step per block is deterministic"),
    ("abc", {"seed": 2**64}, "must be a whole number of 64 bits"),
    ("abc", {"keys": [1.5]}, "key 1.5 must be"),
    ([{"role": "user"}], {}, "needs 'role' and 'content'"),
    ("abc", {"keys": 3}, "keys: give a list with one entry per prompt, not int"),
    ("abc", {"callback": lambda shot: ["x"]}, "the callback returned 'x'"),
    ("abc", {"method": "best-of-n", "scorer": lambda t: [math.nan] * len(t)}, "the scorer returned NaN for '"),
    ("abc", {"k": 10**30}, "at most"),
    ("abc", {"temperature": 10**400}, "temperature="),
    ([b"abc"], {}, "bytes"),
]


def test_bad_input_is_named():
    for prompts, options, message in BAD:
        assert re.search(message, refusal(generate, FakeModel(), prompts, **options)), (prompts, options)


def test_nan_outside_the_last_block_is_found_at_the_last_forward():
    """The result's scores look at the whole window, the last step at its block only."""

    class Broken(FakeModel):
        def body(self, tokens, attention_mask=None):
            hidden = super().body(tokens, attention_mask)
            states = hidden.states.clone()
            states[(tokens[:, 3:7] != self.mask_id).all(-1), 3] = math.nan
            return d5p4.Hidden(states, hidden.features)

    options = dict(k=2, gen_length=8, steps=8, block_length=4, seed=1)
    for method in ("d5p4", "best-of-n", "independent"):
        assert "step 7, prompt 0" in refusal(d5p4.generate, Broken(), ["abc"], method=method, **options), method


@pytest.mark.parametrize("method", ["tree", "d5p4", "independent"])
def test_distances_and_near_copies_are_those_of_the_texts_whatever_the_method(method):
    result = generate(FakeModel(), ["abc", "b"], k=3, gen_length=6, method=method)
    texts = ["one two three four five six", "one two, three four five six", "seven"], ["same", "other", "Same"]
    result = dataclasses.replace(result, texts=list(texts))
    first, second = result
    assert result.near_copies == [1, 1] and result.distance == [first.distance, second.distance]
    assert first.distance == pytest.approx([1 / 13, 1 / 13, 1.0]) and first.near_copies == 1
    assert second.distance == [0.0, 1.0, 0.0] and second.near_copies == 1
    assert first.distances == lexical.distances(texts[0])
    assert generate(FakeModel(), "abc", k=1)[0].distance == [None]


@pytest.mark.parametrize("method", ["tree", "d5p4", "independent"])
def test_the_states_of_earlier_steps_are_freed_at_once(monkeypatch, method):
    """On a GPU, states are large, and nothing else would call Python's search for cycles."""
    made, alive, run = [], [], RowRunner.run

    def counted(*args, **kwargs):
        hidden = run(*args, **kwargs)
        made.append(weakref.ref(hidden.states))
        return hidden

    def count(_):
        alive.append(sum(states() is not None for states in made))

    monkeypatch.setattr(RowRunner, "run", counted)
    options = dict(method=method, order="top", k=3, gen_length=8, callback=count, seed=0)
    options |= dict(guidance=2.0, guidance_window=(0, 0.4), reveal="threshold", tau=0.9, eos="never")
    gc.disable()
    try:
        d5p4.generate(FakeModel(), "ab", **options)
    finally:
        gc.enable()
    assert alive[0] == 2 and alive[-1] == 1 and max(alive) == 2, alive  # with and without the prompt


@pytest.mark.parametrize("method", ["tree", "d5p4", "independent"])
def test_stop_strings_cut_texts_and_equal_texts_are_compared_after_the_cut(method):
    whole = generate(FakeModel(), "abc", k=6, gen_length=5, method=method)
    letter = whole.texts[0][0][1]
    for stops in (letter, ["zzz", letter]):
        result = generate(FakeModel(), "abc", k=6, gen_length=5, method=method, stop_strings=stops)
        [texts], [stopped] = result.texts, result.stopped
        decoded = [FakeModel().tokenizer.decode(ids) for ids in result.answers[0]]
        assert texts == [text.partition(letter)[0] for text in decoded]
        assert stopped == [letter in text for text in decoded] and any(stopped)
        assert result[0].to_dict()["stopped"] == stopped
        assert result.distinct[0] == len(set(texts)) and (method != "tree" or len(texts) == len(set(texts)))
        assert result[0].distance == [min(row[:i] + row[i + 1 :]) for i, row in enumerate(lexical.distances(texts))]
    assert whole.stopped is None


def test_a_tree_finds_other_texts_for_those_that_are_equal_after_the_cut():
    """All texts that begin with a letter other than the stop string are still found."""
    vocabulary = [text for text in generate(FakeModel(), "abc", k=60, gen_length=2, method="tree").texts[0]]
    letter = vocabulary[0][1]
    result = generate(FakeModel(), "abc", k=60, gen_length=2, method="tree", stop_strings=letter)
    everything = {text.partition(letter)[0] for text in vocabulary}
    assert len(result.texts[0]) == len(set(result.texts[0])) >= len(everything)


def test_stop_strings_before_the_first_hole_do_not_count():
    holes = [[0, 1, 0, 11, 11, 2]]
    asked = dict(k=9, method="tree", gen_length=None)
    texts = generate(FakeModel(), holes, **asked).texts[0]
    cut = generate(FakeModel(), holes, **asked, stop_strings="b").texts[0]
    assert len(texts) == 9 and all(text.startswith("aba") for text in cut)
    assert {text[:3] + text[3:].partition("b")[0] for text in texts} <= {*cut}
    after = generate(FakeModel(), holes, **asked, stop_strings="c").texts[0]
    assert all(text.startswith("aba") and "c" not in text for text in after)


def test_bad_stop_strings():
    for value in ("", ["a", ""], [1], 3, {"a": 1}):
        assert "stop_strings" in refusal(generate, FakeModel(), "abc", stop_strings=value), value
