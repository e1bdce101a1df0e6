"""Training batches of programs: their layout, their mix, and the promise that no held-out function is among them."""

import itertools
import zlib

import numpy as np
import pytest

from d5p4.eval.countdown import Draws
from d5p4.eval.programs import LARGEST, NAMES, Task, canonical, is_right, outputs, pack, read_program
from d5p4_lab.train import programs_data
from d5p4_lab.train.programs_data import (
    ANSWER,
    BLOCK,
    END,
    HIDDEN,
    LENGTHS,
    LONGEST,
    MIX,
    NUMBERS,
    PROMPT,
    ROW,
    VISIBLE,
    VOCABULARY,
    attempt,
    heldout,
    probes,
    run,
    tasks,
    unpack,
)
from tests.eval.test_programs import plain, random_lists
from tests.refusals import refusal

GOLDEN_BATCH = 3556839567
GOLDEN_PROMPTS = [
    "4 8 1 -5 3 7>2 4 5 8 9|6 -6 5 5 -7>-5 6 6 7|0 -1 9 4 8 -5>0 1 5 9 10:",
    "-7 -1 6>-16 -14 -7|-2 -8 -1 -5 -9>-10 -8 -6 -4 -2|-1 9 -7 -8>-1 7 15 23:",
    "-5 0 9 -6 -7>3|4 5 7 0>6|-2 -2 8 8>0:",
]


# ---- tasks


def test_programs_of_many_operations_do_too_row_by_row():
    draw, lists = np.random.default_rng(1), random_lists(600, largest=9, longest=6)
    batch = draw.integers(0, len(NAMES), (600, 4))
    results = run(batch, pack(lists))
    for row, numbers, values, length in zip(batch, lists, results.values.tolist(), results.lengths, strict=True):
        expected = plain([NAMES[i] for i in row], numbers)
        assert (None if length < 0 else tuple(values[:length])) == expected
    assert 0 < (results.lengths < 0).sum() < 500, "some lists have no result"


@pytest.mark.parametrize("operations", [2, 5])
def test_drawn_tasks_are_valid_and_need_every_operation(operations):
    count = VISIBLE + HIDDEN
    drawn = attempt(Draws(7, operations), 2000, operations, count)
    given, wanted = unpack(drawn.inputs), unpack(drawn.outputs)
    assert len(drawn.programs) > 50
    for row, program in enumerate(drawn.programs[:100].tolist()):
        names = tuple(NAMES[i] for i in program)
        examples = list(zip(given[row * count :], wanted[row * count :], strict=True))[:count]
        for numbers, output in examples:
            assert LENGTHS[0] <= len(numbers) <= LENGTHS[1] and all(NUMBERS[0] <= v <= NUMBERS[1] for v in numbers)
            assert output and plain(names, numbers) == output
        for part in (examples[:VISIBLE], examples[VISIBLE:]):
            assert len({output for _, output in part}) > 1, "a constant"
            assert any(numbers != output for numbers, output in part), "the identity"
        task = Task(tuple(examples[:VISIBLE]))
        for place in range(operations):
            assert not is_right(task, " ".join(names[:place] + names[place + 1 :]))


def test_one_function_in_64_is_held_out_whatever_its_program():
    batch = np.array(list(itertools.product(range(len(NAMES)), repeat=3)))
    flags = heldout(batch)
    assert 0.5 / 64 < flags.mean() < 2 / 64
    index = {name: i for i, name in enumerate(NAMES)}
    lists = unpack(probes())
    for row, flag in list(zip(batch, flags, strict=True))[::97]:
        names = tuple(NAMES[i] for i in row)
        form = read_program(canonical(" ".join(names))) or ()
        if form and outputs(form, lists) == outputs(names, lists):
            assert heldout(np.array([[index[name] for name in form]]))[0] == flag


def test_tasks_are_the_same_on_every_machine():
    """Committed figures refer to these, so a change of the generator must fail here."""
    assert [tasks(1, operations)[0].prompt for operations in (3, 4, 5)] == GOLDEN_PROMPTS


def test_tasks_differ_and_are_a_prefix_of_more():
    many = tasks(40, 3, seed=1)
    assert len({task.prompt for task in many}) == 40
    assert tasks(15, 3, seed=1) == many[:15] and tasks(15, 3, seed=2) != many[:15]
    assert tasks(0) == []
    for task in many:
        assert len(task.visible) == VISIBLE and len(task.hidden) == HIDDEN
        assert Task.parse(task.prompt, task.reference) == task


def test_what_cannot_be_drawn_is_named():
    for bad, value in (
        (lambda: tasks(1, 6), "6"),
        (lambda: tasks(1, 2), "2"),
        (lambda: tasks(-1), "-1"),
        (lambda: tasks(1, seed=-4), "-4"),
    ):
        assert value in refusal(bad)


# ---- training rows


def texts(batch):
    """(prompt, answer so far, whether the answer has ended) of every row."""
    for row, length, prompt in zip(batch.tokens, batch.lengths, batch.prompts, strict=True):
        tokens = row[ROW - length :].tolist()
        answer = tokens[prompt:]
        written = "".join(VOCABULARY[i] for i in answer if i != END)
        yield "".join(VOCABULARY[i] for i in tokens[:prompt]), written, END in answer


@pytest.fixture(scope="module")
def batch():
    return programs_data.batch(1500, seed=7, index=0)


def test_every_finished_program_satisfies_its_prompt_and_is_not_held_out(batch):
    index = {name: i for i, name in enumerate(NAMES)}
    finished = [(prompt, answer) for prompt, answer, ended in texts(batch) if ended]
    assert len(finished) > 500
    for prompt, answer in finished:
        assert is_right(prompt, answer), (prompt, answer)
        assert not heldout(np.array([[index[name] for name in read_program(answer)]]))[0], answer
    assert all(len(Task.parse(prompt).visible) == 3 for prompt, _, _ in texts(batch))


def test_rows_end_with_a_block_of_the_answer_or_with_the_window(batch):
    assert (batch.tokens.dtype, batch.tokens.shape) == (np.int16, (1500, ROW))
    assert (batch.prompts <= PROMPT).all() and (batch.lengths <= ROW).all() and (batch.opened >= 1).all()
    answer = batch.lengths - batch.prompts
    assert (answer >= batch.opened).all() and (answer <= LONGEST).all()
    start = batch.lengths - batch.opened
    assert ((start == batch.prompts) | (start % BLOCK == 0)).all() and (batch.opened <= BLOCK).all()
    assert (start // BLOCK == (batch.lengths - 1) // BLOCK).all()
    cut = batch.lengths % BLOCK != 0
    assert 0 < cut.mean() < 0.2 and (answer[cut] >= ANSWER).all(), "a window holds the longest answer"
    assert (start % BLOCK != 0).any() and (answer > BLOCK).any()
    padding = np.arange(ROW) < ROW - batch.lengths[:, None]
    assert (batch.tokens[padding] == END).all()


def test_no_batch_has_a_row_without_tokens_to_learn():
    """The longest prompts leave little room for a long window."""
    size = 4000
    lengths = np.full(size, PROMPT)
    prompts = np.zeros((size, PROMPT), np.int16)
    answers = np.ones((size, LONGEST), np.int16)
    rows = programs_data._cut(programs_data.Draws(0), prompts, lengths, answers, np.full(size, ANSWER))
    assert (rows.opened >= 1).all() and (rows.lengths <= ROW).all() and (rows.lengths == ROW).any()


def test_numbers_and_words_are_one_token_each():
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert {f"{space}{value}" for space in ("", " ") for value in range(-LARGEST, LARGEST + 1)} < set(VOCABULARY)
    assert {" sort", "sort", " take", " +1", " max"} < set(VOCABULARY)


def test_a_batch_is_a_function_of_its_arguments():
    first, again = programs_data.batch(64, 3, 9), programs_data.batch(64, 3, 9)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    for other in (programs_data.batch(64, 3, 10), programs_data.batch(64, 4, 9)):
        assert not {p for p, _, _ in texts(first)} & {p for p, _, _ in texts(other)}


def test_the_data_are_the_same_on_every_machine():
    """Checkpoints that resume refer to these, so a change of the generator must fail here."""
    assert zlib.crc32(programs_data.batch(256, 0, 0).tokens.tobytes()) == GOLDEN_BATCH


def test_the_mix_is_kept():
    rows = [answer for _, answer, ended in texts(programs_data.batch(300, 0, 0, {5: 2.0, 3: 0.0})) if ended]
    assert rows and {len(read_program(answer)) for answer in rows} == {5}
    assert sum(MIX.values()) == pytest.approx(1)


BAD = [
    (lambda: programs_data.batch(0, 0, 0), "0"),
    (lambda: programs_data.batch(4, 0, -2), "-2"),
    (lambda: programs_data.batch(4, 0, 0, {6: 1.0}), "{6: 1.0}"),
    (lambda: programs_data.batch(4, 0, 0, {}), "{}"),
    (lambda: programs_data.batch(4, 0, 0, {3: float("nan")}), "nan"),
]


def test_bad_arguments_are_named():
    for call, named in BAD:
        assert named in refusal(call), named
