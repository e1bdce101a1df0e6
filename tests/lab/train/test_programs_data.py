"""Training batches of programs: their layout, their mix, and the promise that no held-out function is among them."""

import zlib

import numpy as np
import pytest

from d5p4.eval.programs import LARGEST, NAMES, Task, heldout, is_right, read_program
from d5p4_lab.train import programs_data
from d5p4_lab.train.programs_data import ANSWER, BLOCK, END, LONGEST, MIX, PROMPT, ROW, VOCABULARY
from tests.refusals import refusal

GOLDEN_BATCH = 3556839567


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
