"""The finished lines of a large file, as each rank holds them and as they are told to it."""

import pickle
import random

from d5p4.jobs.done import Done


def test_done_is_a_set_of_line_numbers():
    lines = set(random.Random(0).sample(range(1, 1001), 300)) | {1, 8, 1000}
    done = Done(1000, lines)
    assert {line for line in range(-5, 1200) if line in done} == lines and len(done) == len(lines)
    assert done.has_all(lines) and done.has_all([]) and not done.has_all([1, 0])
    other = pickle.loads(pickle.dumps(done))
    assert {line for line in range(-5, 1200) if line in other} == lines and len(other) == len(lines)
    assert len(Done()) == 0 and 0 not in Done() and 1 not in Done()


def test_numbers_that_the_file_does_not_have_are_left_out():
    assert len(Done(10, [-1, 0, 11, 10**18, 3])) == 1


def test_a_million_lines_are_small():
    million = 1_000_000
    assert len(pickle.dumps(Done(million, range(1, million + 1)))) < 1000
    chance = random.Random(0)
    scattered = Done(million, (line for line in range(1, million + 1) if chance.random() < 0.5))
    assert len(pickle.dumps(scattered)) < 130_000  # a bit a line at worst
