"""The generator of countdown puzzles, by its law."""

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from d5p4.eval.countdown import Problem
from d5p4_lab import puzzles
from d5p4_lab.puzzles import Draws, attempt, heldout, is_heldout, problems
from tests.refusals import refusal

GOLDEN_PROBLEMS = ["34,26,83,81:62", "78,44,76,4:22", "50,46,80,7:91"]


@functools.cache
def all_ways(count, ranges):
    """How many ways lead to each (numbers, steps), by walking every one of them."""
    largest, most, (low, high) = ranges

    def walk(table, steps):
        if len(table) == 1:
            if low <= table[0] <= high:
                ways[(*numbers, *itertools.chain(*steps))] += 1
            return
        for i, j in itertools.combinations(range(len(table)), 2):
            a, b = max(table[i], table[j]), min(table[i], table[j])
            rest = [v for place, v in enumerate(table) if place not in (i, j)]
            for operation, c in enumerate((a + b, a - b, a * b, a / b)):
                if 0 < c <= most and c == int(c):
                    walk([*rest, int(c)], [*steps, (a, operation, b, int(c))])

    ways = Counter()
    for numbers in itertools.product(range(1, largest + 1), repeat=count):
        walk(list(numbers), [])
    return ways


@pytest.mark.parametrize(
    ("count", "ranges", "rows", "columns"),
    [
        (3, (4, 16, (2, 9)), 100_000, slice(None)),
        pytest.param(4, (3, 9, (5, 5)), 500_000, slice(None), marks=pytest.mark.full),
        # Five numbers with the first step, and with the last: with all of them there would be too many.
        pytest.param(5, (2, 3, (3, 3)), 600_000, [*range(5), *range(5, 9)], marks=pytest.mark.full),
        (5, (2, 3, (3, 3)), 200_000, [*range(5), *range(17, 21)]),
    ],
)
def test_accepted_rows_are_uniform_over_the_valid_ways(count, ranges, rows, columns, monkeypatch):
    for name, limit in zip(("LARGEST_NUMBER", "LARGEST_VALUE", "TARGETS"), ranges, strict=True):
        monkeypatch.setattr(puzzles, name, limit)
    every, weight = map(np.array, zip(*all_ways(count, ranges).items(), strict=True))
    drawn = attempt(Draws(count), rows, count)
    accepted = np.hstack([drawn.numbers, drawn.steps.reshape(len(drawn.steps), -1)])
    cells, cell = np.unique(np.vstack([every, accepted])[:, columns], axis=0, return_inverse=True)
    cell = cell.reshape(-1)  # numpy 2.0 gave it a second axis
    expected = np.bincount(cell[: len(every)], weight, len(cells)) / weight.sum() * len(accepted)
    assert len(cells) > 80
    assert expected.min() > 4  # a row that no way leads to would have 0
    assert chisquare(np.bincount(cell[len(every) :], minlength=len(cells)), expected).pvalue > 1e-3
    attempts = ranges[0] ** count * np.prod([4 * n * (n - 1) // 2 for n in range(2, count + 1)])
    share = weight.sum() / attempts
    assert len(accepted) / rows == pytest.approx(share, abs=5 * (share / rows) ** 0.5)


@pytest.mark.parametrize("count", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 5))])
def test_one_problem_in_64_is_held_out_whatever_the_order_of_its_numbers(count):
    ways = attempt(Draws(5, count), 1 << 18, count)
    distinct = np.unique(np.hstack([np.sort(ways.numbers, axis=1), ways.target[:, None]]), axis=0)
    flags = heldout(distinct[:, :-1], distinct[:, -1])
    assert flags.mean() == pytest.approx(1 / 64, abs=4 * (1 / 64 / len(distinct)) ** 0.5)
    shuffled = np.random.default_rng(0).permuted(distinct[:, :-1], axis=1)
    assert (heldout(shuffled, distinct[:, -1]) == flags).all()
    row = int(np.flatnonzero(flags)[0])
    assert is_heldout(Problem(tuple(distinct[row, :-1].tolist()), int(distinct[row, -1])))


def test_the_data_are_the_same_on_every_machine():
    """Committed figures refer to these, so a change of the generator must fail here."""
    assert [p.prompt for p in problems(3)] == GOLDEN_PROBLEMS


@pytest.mark.parametrize("numbers", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 5))])
def test_problems_are_held_out_distinct_and_a_prefix_of_more(numbers):
    many = problems(200, numbers, seed=1)
    assert all(is_heldout(p) and len(p.numbers) == numbers for p in many)
    assert len({(*sorted(p.numbers), p.target) for p in many}) == 200
    assert problems(70, numbers, seed=1) == many[:70]
    assert problems(70, numbers, seed=2) != many[:70]
    assert problems(0, numbers) == []


def test_bad_arguments_are_refused_by_name():
    for arguments, named in (((3, 6), "6"), ((-1,), "-1"), ((1, 4, -4), "-4")):
        assert named in refusal(problems, *arguments)
