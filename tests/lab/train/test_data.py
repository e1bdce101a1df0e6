"""Training batches and held-out tasks: their layout, their mix, and the promise that nothing held out is trained on."""

import itertools
import zlib

import numpy as np
import pytest

from d5p4.eval.countdown import Problem, fault
from d5p4.eval.programs import NAMES, Task, function_of, is_right, output, read_program
from d5p4_lab.puzzles import Draws, is_heldout
from d5p4_lab.train import countdown_data, programs_data
from d5p4_lab.train.countdown_data import CHARACTERS, WINDOW
from d5p4_lab.train.programs_data import ANSWER, BLOCK, HIDDEN, LONGEST, PROMPT, ROW, VISIBLE, VOCABULARY, tasks
from tests.refusals import refusal

GOLDEN_PROMPTS = [
    "4 8 1 -5 3 7>2 4 5 8 9|6 -6 5 5 -7>-5 6 6 7|0 -1 9 4 8 -5>0 1 5 9 10:",
    "-7 -1 6>-16 -14 -7|-2 -8 -1 -5 -9>-10 -8 -6 -4 -2|-1 9 -7 -8>-1 7 15 23:",
    "-5 0 9 -6 -7>3|4 5 7 0>6|-2 -2 8 8>0:",
]


def puzzles(batch):
    """(problem, answer) of every row."""
    for prompt, answer in zip(batch.prompts, batch.answers, strict=True):
        yield tuple("".join(CHARACTERS[i] for i in row if i != countdown_data.END) for row in (prompt, answer))


def programs(batch):
    """(prompt, answer so far, whether the answer has ended) of every row."""
    for row, length, prompt in zip(batch.tokens, batch.lengths, batch.prompts, strict=True):
        tokens = row[ROW - length :].tolist()
        written = [
            "".join(VOCABULARY[i] for i in part if i != programs_data.END) for part in np.split(tokens, [prompt])
        ]
        yield *written, programs_data.END in tokens[prompt:]


@pytest.fixture(scope="module")
def batch():
    return programs_data.batch(1500, seed=7, index=0)


def test_countdown_rows_are_right_answers_of_problems_that_are_not_held_out():
    batch = countdown_data.batch(1500, seed=7, index=0, mix={3: 1, 4: 1, 5: 1})
    assert (batch.prompts.dtype, batch.prompts.shape) == (np.uint8, (1500, countdown_data.PROMPT))
    assert (batch.answers.dtype, batch.answers.shape) == (np.uint8, (1500, max(WINDOW.values())))
    for (prompt, answer), length, count in zip(puzzles(batch), batch.lengths, batch.counts, strict=True):
        problem = Problem.parse(prompt)
        assert fault(problem, answer) is None and not is_heldout(problem)
        assert len(prompt) == length and len(answer) < WINDOW[count] and len(problem.numbers) == count
    padding = np.arange(countdown_data.PROMPT) < countdown_data.PROMPT - batch.lengths[:, None]
    assert ((batch.prompts == countdown_data.END) == padding).all()
    ended = batch.answers == countdown_data.END
    assert (np.sort(ended, axis=1) == ended).all()  # one run, at the end


def test_finished_programs_satisfy_their_prompts_and_are_not_held_out(batch):
    index = {name: i for i, name in enumerate(NAMES)}
    finished = [(prompt, answer) for prompt, answer, ended in programs(batch) if ended]
    assert len(finished) > 500
    for prompt, answer in finished:
        assert is_right(prompt, answer) and len(Task.parse(prompt).visible) == VISIBLE
        assert not programs_data.heldout([[index[name] for name in read_program(answer)]])[0], answer


def test_rows_of_programs_end_with_a_block_of_the_answer_or_with_the_window(batch):
    assert (batch.tokens.dtype, batch.tokens.shape) == (np.int16, (1500, ROW))
    assert (batch.prompts <= PROMPT).all() and (batch.lengths <= ROW).all() and (batch.opened >= 1).all()
    answer, start = batch.lengths - batch.prompts, batch.lengths - batch.opened
    assert (answer >= batch.opened).all() and (answer <= LONGEST).all()
    assert ((start == batch.prompts) | (start % BLOCK == 0)).all() and (batch.opened <= BLOCK).all()
    assert (start // BLOCK == (batch.lengths - 1) // BLOCK).all()
    cut = batch.lengths % BLOCK != 0
    assert 0 < cut.mean() < 0.2 and (answer[cut] >= ANSWER).all(), "a window holds the longest answer"
    assert (start % BLOCK != 0).any() and (answer > BLOCK).any()
    assert (batch.tokens[np.arange(ROW) < ROW - batch.lengths[:, None]] == programs_data.END).all()


def test_the_data_are_the_same_on_every_machine():
    """Committed figures and saved states refer to these, so a change of a generator must fail here."""
    assert zlib.crc32(countdown_data.batch(512, 0, 0).answers.tobytes()) == 1931002571
    assert zlib.crc32(programs_data.batch(256, 0, 0).tokens.tobytes()) == 3556839567
    assert [tasks(1, operations)[0].prompt for operations in (3, 4, 5)] == GOLDEN_PROMPTS


@pytest.mark.parametrize("operations", [2, 5])
def test_drawn_tasks_are_valid_and_need_every_operation(operations):
    (low, high), (least, most) = programs_data.LENGTHS, programs_data.NUMBERS
    drawn = programs_data.attempt(Draws(7, operations), 2000, operations, VISIBLE + HIDDEN, held_out=False)
    assert len(drawn) > 50
    for program, examples in drawn[:100]:
        names = [NAMES[i] for i in program]
        for numbers, result in examples:
            assert low <= len(numbers) <= high and all(least <= value <= most for value in numbers)
            assert result and output(names, numbers) == result
        for part in (examples[:VISIBLE], examples[VISIBLE:]):
            assert len({result for _, result in part}) > 1, "a constant"
            assert any(numbers != result for numbers, result in part), "the identity"
        for place in range(operations):
            assert not is_right(Task(examples[:VISIBLE]), " ".join(names[:place] + names[place + 1 :]))


def test_one_function_in_64_is_held_out_whatever_its_program():
    batch = list(itertools.product(range(len(NAMES)), repeat=3))[::11]
    flags = programs_data.heldout(batch)
    assert 0.5 / 64 < flags.mean() < 2 / 64
    same = {}
    for row, flag in zip(batch, flags, strict=True):
        assert same.setdefault(function_of(" ".join(NAMES[i] for i in row)), flag) == flag
    assert len(same) < len(batch)


def test_tasks_differ_and_are_a_prefix_of_more():
    many = tasks(30, 3, seed=1)
    assert len({task.prompt for task in many}) == 30
    assert tasks(15, 3, seed=1) == many[:15] and tasks(15, 3, seed=2) != many[:15] and tasks(0) == []
    for task in many:
        assert len(task.visible) == VISIBLE and len(task.hidden) == HIDDEN
        assert Task.parse(task.prompt, task.reference) == task


def test_what_cannot_be_drawn_is_named():
    for make, arguments, named in (
        (countdown_data.batch, (0, 0, 0), "0"),
        (countdown_data.batch, (4, 0, 0, {2: 1.0}), "{2: 1.0}"),
        (programs_data.batch, (4, 0, 0, {3: float("nan")}), "nan"),
        (tasks, (1, 6), "6"),
    ):
        assert named in refusal(make, *arguments), arguments
