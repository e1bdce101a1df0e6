"""Training batches of countdown: their layout, their mix, and the promise that no held-out problem is among them."""

import zlib

import numpy as np
import pytest

from d5p4.eval.countdown import fault
from d5p4_lab.train import countdown_data
from d5p4_lab.train.countdown_data import END, MASK, PROMPT, WINDOW, Problem, decode
from tests.refusals import refusal

GOLDEN_BATCH = 1931002571


def texts(batch):
    """(problem, answer) of every row."""
    prompts = (decode(row[PROMPT - length :]) for row, length in zip(batch.prompts, batch.lengths, strict=True))
    return [(Problem.parse(p), decode(a)) for p, a in zip(prompts, batch.answers, strict=True)]


@pytest.fixture(scope="module")
def examples():
    return texts(countdown_data.batch(600, seed=7, index=0, mix={3: 1, 4: 1, 5: 1}))


def test_every_example_is_right(examples):
    for problem, answer in examples:
        assert fault(problem, answer) is None, (problem, answer)


def test_layout_of_a_batch():
    batch = countdown_data.batch(600, seed=1, index=2)
    assert (batch.prompts.dtype, batch.prompts.shape) == (np.uint8, (600, PROMPT))
    assert (batch.answers.dtype, batch.answers.shape) == (np.uint8, (600, max(WINDOW.values())))
    assert batch.lengths.dtype == batch.counts.dtype == np.int64
    padding = np.arange(PROMPT) < PROMPT - batch.lengths[:, None]
    assert ((batch.prompts == END) == padding).all()
    ended = batch.answers == END
    assert (np.sort(ended, axis=1) == ended).all()  # one run, at the end
    for (problem, answer), count in zip(texts(batch), batch.counts, strict=True):
        assert len(problem.numbers) == count
        assert len(answer) < WINDOW[count]


def test_prompts_hold_the_longest_problem():
    assert len(Problem((99,) * 5, 99).prompt) == PROMPT


def test_no_heldout_problem_is_trained_on(examples):
    assert not any(problem.heldout for problem, _ in examples)
    assert not any(problem.heldout for problem, _ in texts(countdown_data.batch(2000, seed=0, index=0)))


def test_a_batch_is_a_function_of_its_arguments():
    first, again = countdown_data.batch(256, 3, 9), countdown_data.batch(256, 3, 9)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    for other in (countdown_data.batch(256, 3, 10), countdown_data.batch(256, 4, 9)):
        assert len({p for p, _ in texts(first)} & {p for p, _ in texts(other)}) < 3


def test_the_data_are_the_same_on_every_machine():
    """Checkpoints that resume refer to these, so a change of the generator must fail here."""
    assert zlib.crc32(countdown_data.batch(512, 0, 0).answers.tobytes()) == GOLDEN_BATCH


def test_the_mix_is_kept():
    counts = countdown_data.batch(5000, 0, 0).counts
    for count, share in countdown_data.MIX.items():
        assert (counts == count).mean() == pytest.approx(share, abs=0.03)
    assert set(countdown_data.batch(50, 0, 0, {5: 2.0, 3: 0.0}).counts.tolist()) == {5}


BAD = [
    (lambda: countdown_data.batch(0, 0, 0), "0"),
    (lambda: countdown_data.batch(4, 0, -2), "-2"),
    (lambda: countdown_data.batch(4, 0, 0, {2: 1.0}), "{2: 1.0}"),
    (lambda: countdown_data.batch(4, 0, 0, {4: 0.0}), "{4: 0.0}"),
    (lambda: countdown_data.batch(4, 0, 0, {}), "{}"),
    (lambda: countdown_data.batch(4, 0, 0, {3: float("nan")}), "nan"),
    (lambda: decode([1, 19]), "19"),
]


def test_bad_arguments_are_named():
    for call, named in BAD:
        assert named in refusal(call), named


def test_decode_stops_at_the_end_and_shows_masks():
    assert decode([8, 6, 10, 2, 14, 8, 8, END, 3, END]) == "86+2=88"
    assert decode(np.array([1, MASK, 16, 15, 11, 12, 13], np.uint8)) == "1_:,-*/"
    assert decode([]) == decode([END]) == ""
