"""The recipe of smol: what it hides and learns, that its KL is exact, and that the library loads what it writes."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from d5p4_lab.train.loop import Budget, train
from d5p4_lab.train.smol import Body, copies_mask, hide, learnt, nothing_right
from d5p4_lab.train.smol_data import ANSWER, END, ENDED, MASK, PLAIN, QUESTION, Data, Prefix, Writer, sift
from tests.lab import smol
from tests.refusals import refusal

T = 64  # tokens per row of the toy


def quiet(_):
    pass


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A toy adapter after enough steps to change every answer, and its base."""
    root = tmp_path_factory.mktemp("smol")
    recipe = smol.recipe(block=8, rank=4)
    recipe.rates, recipe.rows = (0.0, 0.004), 16
    figures = train(recipe, root / "adapter", Budget(steps=40), say=quiet)
    return recipe, root / "adapter", smol.write_base(root / "base"), figures


# what is hidden, and what is learnt


def test_a_block_hides_a_uniform_number_of_positions_half_as_a_suffix():
    learn = torch.tensor([[0, 1, 1, 1] * 3000]).bool()
    hidden = hide(learn, 4, torch.Generator().manual_seed(0)).view(-1, 4)
    assert not hidden[:, 0].any(), "only learnt positions are hidden"
    counts = Counter(tuple(row) for row in hidden[:, 1:].int().tolist())
    law = {}
    for places in itertools.product((0, 1), repeat=3):
        size, suffix = sum(places), list(places) == sorted(places)
        law[places] = (0.5 * suffix + 0.5 / (1, 3, 3, 1)[size]) / 3 if size else 0.0
    assert counts[0, 0, 0] == 0
    observed, expected = zip(*((counts[places], 3000 * p) for places, p in law.items() if p), strict=True)
    assert chisquare(observed, expected).pvalue > 1e-3


def test_blocks_with_one_or_no_learnt_position():
    hidden = hide(torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0]]).bool(), 4, torch.Generator().manual_seed(1))
    assert hidden.tolist() == [[False, False, True, False] + [False] * 4]


def test_the_answer_is_learnt_to_the_end_of_the_block_of_its_end():
    start, end, block = torch.tensor([3, 4, 9, 0]), torch.tensor([5, 7, 12, 8]), 4
    expected = [[s <= i < (e // block + 1) * block for i in range(12)] for s, e in zip(start, end, strict=True)]
    assert learnt(start, end, 12, block).tolist() == expected
    assert learnt(torch.tensor([5]), torch.tensor([12]), 12, block).sum() == 7, "without an end, all of the row"


def test_nothing_right_is_the_hidden_run_at_the_end_of_a_block():
    draw = random.Random(0)
    hidden = [[draw.random() < 0.6 for _ in range(12)] for _ in range(20)]
    ends = [[all(row[i : (i // 4 + 1) * 4]) for i in range(12)] for row in hidden]
    assert nothing_right(torch.tensor(hidden), 4).tolist() == ends and any(map(any, ends))


@pytest.mark.parametrize(("causal", "copies", "first"), [(False, 1, 0), (True, 1, 0), (False, 3, 4), (True, 2, 2)])
def test_who_sees_whom(causal, copies, first):
    """A noisy block sees itself and clean blocks before it; clean blocks see themselves and what is before."""
    block, length = 2, 8
    cells = [(c, i) for c in range(copies) for i in range(first, length)] + [(None, i) for i in range(length)]
    expected = []
    for copy, i in cells:
        for other, j in cells:
            if other is not None:
                expected.append(copy == other and i // block == j // block)
            elif copy is not None:
                expected.append(j // block < i // block)
            else:
                expected.append(j <= i if causal else j // block <= i // block)
    assert copies_mask(length, block, causal, smol.CPU, copies, first).flatten().tolist() == expected


# the bodies, the loss and the divergence, beside independent code


def test_the_teacher_is_the_llama_of_transformers():
    recipe, row = smol.recipe(), smol.rows().rows[0].astype(int).tolist()
    states = recipe.taught(torch.tensor([row]))[0, 1:]
    ours = recipe.teacher.logits(states).log_softmax(-1)
    torch.testing.assert_close(ours, smol.next_log_probabilities(row)[:-1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("block", [4, 8])
def test_the_library_loads_what_the_recipe_writes(tmp_path, block, causal):
    """Every noisy block has a mask, as in training: the library takes blocks without masks for clean ones."""
    recipe = smol.recipe(block=block, rank=4, causal=causal)
    recipe.rates = (0.0, 0.02)
    train(recipe, tmp_path / "adapter", Budget(steps=4), say=quiet)
    model = smol.load(smol.write_base(tmp_path / "base"), tmp_path / "adapter")
    student, _ = recipe.written(tmp_path / "adapter")
    assert model.block == block and all(float(b.detach().abs().max()) > 0 for b in student.stack[0].b.values())
    rows = torch.from_numpy(smol.rows().rows[:3].astype(np.int64))
    chance = torch.rand(3, 2, T, generator=torch.Generator().manual_seed(2)).unflatten(2, (-1, block))
    hidden = ((chance < 0.5) | (chance == chance.amin(-1, keepdim=True))).flatten(2)
    states = recipe.both(student, rows, hidden)
    for end in range(block, T + 1, block):
        tokens = torch.where(hidden, MASK, rows[:, None])[:, :, end - block : end]
        tokens = torch.cat([rows[:, None, : end - block].expand(-1, 2, -1), tokens], 2).flatten(0, 1)
        expected = model.body(tokens).states[:, end - block :]
        here = slice(end - block + (end == block), end)  # the first token of a row is never predicted
        torch.testing.assert_close(
            states[:, :, here].flatten(0, 1), expected[:, end == block :], atol=3e-5, rtol=1e-4, msg=f"block to {end}"
        )
    half = recipe.both(student, rows, hidden[:, :, 16:], first=16)
    torch.testing.assert_close(half, states[:, :, 16:], atol=1e-5, rtol=1e-4)


def test_the_loss_is_the_mean_over_blocks_of_means_over_their_hidden_positions(written):
    """The loss does not ban the mask, which no row has."""
    recipe, folder, base, _ = written
    model, (student, _) = smol.load(base, folder), recipe.written(folder)
    tokens, start, end = (torch.from_numpy(column[:2].astype(np.int64)) for column in recipe.learning[:3])
    loss = recipe.loss(student, (tokens, start, end), torch.Generator().manual_seed(5))
    hidden = hide(learnt(start, end, T, 8), 8, torch.Generator().manual_seed(5))
    blocks = []
    for row, gone, last in zip(tokens.tolist(), hidden.tolist(), end.tolist(), strict=True):
        truth = smol.next_log_probabilities(row)
        for first in range(0, T, 8):
            terms = []
            for i in (i for i in range(first, first + 8) if gone[i]):
                scores = smol.log_probabilities(model, row, gone, i, banned=False)
                soft = i <= last and all(gone[i : first + 8])
                terms.append(-(truth[i - 1].exp() * scores).sum() if soft else -scores[row[i]])
            blocks += [torch.stack(terms).mean()] if terms else []
    assert float(loss.detach()) == pytest.approx(float(torch.stack(blocks).mean()), rel=1e-4)


def test_the_divergence_is_that_of_decoding_from_the_left(written):
    recipe, folder, base, figures = written
    model = smol.load(base, folder)
    data = recipe.held_out
    kl, entropy, padding, count = np.zeros(8), 0.0, 0.0, np.zeros(8)
    for row, start, end in zip(data.rows.astype(int).tolist(), *map(np.ndarray.tolist, data[1:3]), strict=True):
        truth = smol.next_log_probabilities(row)
        truth = truth.index_fill(1, torch.tensor([MASK]), -1e4).log_softmax(-1)
        for i in range(start, min(T, (end // 8 + 1) * 8)):
            scores = smol.log_probabilities(model, row, [j >= i for j in range(T)], i)
            if i > end:
                padding -= float(scores[row[i]])
                continue
            p = truth[i - 1].exp()
            kl[i % 8] += float((p * (truth[i - 1] - scores.clamp(min=-1e4))).sum())
            entropy -= float((p * truth[i - 1]).sum())
            count[i % 8] += 1
    assert figures["KL per token"] == pytest.approx(kl.sum() / count.sum(), rel=1e-3)
    assert figures["KL per token"] > 0.05, "too little to tell"
    assert figures["entropy of the teacher per token"] == pytest.approx(entropy / count.sum(), rel=1e-4)
    for i in range(8):
        assert figures[f"KL at offset {i}"] == pytest.approx(kl[i] / count[i], rel=1e-3)
    assert padding > 0 and figures["nats of all padding per answer"] == pytest.approx(
        padding / len(data.rows), rel=1e-3
    )


def test_blocks_of_one_token_and_no_change_are_the_teacher_itself():
    recipe = smol.recipe(block=1)
    assert abs(recipe.divergence(recipe.build(), recipe.teacher)["KL per token"]) < 1e-6
    causal = smol.recipe(block=4)
    figures = causal.divergence(causal.build(), causal.teacher)
    assert abs(figures["KL at offset 0"]) < 1e-6 < 1e-2 < figures["KL at offset 1"]


def test_training_learns_what_follows_an_end(written):
    recipe, *_, figures = written
    start = recipe.divergence(recipe.build(), recipe.teacher)
    name = "nats of all padding per answer"
    assert figures[name] < 0.8 * start[name]


def test_an_unknown_option_is_refused():
    assert "no option 'blocks'" in refusal(smol.recipe, blocks=4)


# the data


def plain_rows(teacher, given, turn, length, seed):
    """Write rows as `Writer` does, without a cache and row by row."""
    torch.manual_seed(seed)
    rows = [list(prefix.ids[:1]) for prefix in given]
    phases, waiting = [prefix.phase for prefix in given], [[] for _ in given]
    for at in range(length - 1):
        noise = torch.empty(len(given), teacher.table.shape[0]).exponential_().log()
        for row, prefix, n, left in zip(rows, given, range(len(given)), waiting, strict=True):
            tokens, place = torch.tensor([row]), torch.arange(at + 1)
            mask = (place[:, None] >= place)[None, None]
            logits = teacher.logits(teacher(tokens, place, mask)[:, -1])[0]
            logits[MASK] = -torch.inf
            heat = prefix.temperature if phases[n] == QUESTION else 1.0
            drawn = int((logits / heat - noise[n]).argmax())
            if at + 1 < len(prefix.ids):
                row.append(prefix.ids[at + 1])
            elif left:
                row.append(left.pop(0))
            elif phases[n] == ENDED:
                row.append(END)
            else:
                row.append(drawn)
                if drawn == END and phases[n] in (QUESTION, ANSWER):
                    left += turn if phases[n] == QUESTION else []
                    phases[n] += 1
    return rows


def test_the_teacher_writes_questions_turns_and_answers_as_a_plain_loop_does():
    teacher, turn = smol.teacher(), [5, 6]
    draw = random.Random(0)
    given = [Prefix([3, 4, *(draw.randint(8, 63) for _ in range(n % 5))], 0.7, phase)
             for n, phase in enumerate([QUESTION, ANSWER, PLAIN] * 8)]  # fmt: skip
    writer = Writer(teacher, turn, 40, len(given))
    torch.manual_seed(3)
    rows = writer.write(given)
    assert rows.tolist() == plain_rows(teacher, given, turn, 40, 3)
    turns = [row for row, prefix in zip(rows.tolist(), given, strict=True) if prefix.phase == QUESTION and END in row]
    assert turns and all(row[row.index(END) + 1 :][:2] == turn[: 39 - row.index(END)] for row in turns)
    assert not (rows == MASK).any()


def test_sift_keeps_one_answer_per_question_and_holds_questions_out_by_their_text():
    names = {10: "What", 11: "what", 12: " is", 13: " it"}

    def row(*ids):
        return [3, 4, *ids, *[END] * (24 - 2 - len(ids))]

    answer = (5, 6, 20, 21)
    asked = [(10, 12, 13), (11, 12, 13), (10, 12, 12), (10, 13, 13), (10, 12, 13, 12)]
    rows = [row(*question, END, *answer) for question in asked]
    rows += [[3, 4, 10, 13, 12, END, 5, 6, *[20] * 16]]  # an answer without an end
    rows += [row(10, 1, 13, END, *answer), row(13, 12, 10, END, 5, 6, 1, 20)]  # special tokens
    rows += [[3, 4, *[10] * 22], row(10, 10, END, *answer)]  # a question without an end, and one of two tokens
    rows += [[3, 4, 12, 12, *[20] * 20], [3, 4, 13, 13, *[20] * 19, END]]  # plain text, and one that ends
    given = [Prefix([3, 4], 1.0, QUESTION)] * 10 + [Prefix([3, 4, 12, 12], 1.0, PLAIN)] * 2

    def decode(ids):
        return "".join(names.get(i, f"<{i}>") for i in ids)

    data = sift(np.array(rows, np.uint16), given, 2, 2, decode)
    assert data.rows.tolist() == [rows[i] for i in (0, 2, 3, 4, 5, 10)], "'what is it' repeats 'What is it'"
    assert list(zip(data.start.tolist(), data.end.tolist(), strict=True)) == [
        (8, 10), (8, 10), (8, 10), (9, 11), (8, 24), (4, 24)
    ]  # fmt: skip
    assert data.tokens == 3 + 3 + 3 + 3 + 16 + 20
    many = [row(*(draw // 10 + 30, draw % 10 + 50, n + 100), END, *answer) for draw in range(100) for n in range(64)]
    split = sift(np.array(many, np.uint16), given[:1] * len(many), 2, 2, str).held_out
    assert 60 < split.sum() < 140, "one question in 64"
    turned = sift(np.array(many[::-1], np.uint16), given[:1] * len(many), 2, 2, str).held_out
    assert (split == turned[::-1]).all(), "which does not depend on the other questions"
    assert "no row" in refusal(sift, np.array(rows[6:10], np.uint16), given[6:10], 2, 2, decode)


def test_data_come_back_from_their_file(tmp_path):
    data = smol.rows()
    data.save(tmp_path / "folder" / "rows.npz")
    again = Data.read(tmp_path / "folder" / "rows.npz")
    assert all(np.array_equal(a, b) for a, b in zip(data, again, strict=True)) and data.held_out.any()


def test_the_command_keeps_its_rows_and_measures_again(cli, tmp_path):
    out = tmp_path / "made"
    first = cli("train", "smol", "--steps", 2, "--option", "block=4", "--out", out, "--device", "cpu")
    assert first.exit_code == 0, first.output
    assert "KL per token" in first.stdout and (tmp_path / "made-data.npz").exists()
    again = cli("train", "smol", "--validate", "--option", "block=4", "--out", out, "--device", "cpu")
    assert set(again.stdout.splitlines()) <= set(first.stdout.splitlines()) and again.stdout
    assert Body is type(smol.teacher()) and "KL per token" in (out / "README.md").read_text()
