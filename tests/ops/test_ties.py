"""Choosing among equals by their hash, never by their place."""

from __future__ import annotations

import torch
from torch import Tensor

from d5p4.ops.ties import TOLERANCE, argbest, first_equal, occurrence, ranked, repeats

INF, NAN = torch.inf, torch.nan


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


BEST = {
    "the largest wins whatever the hashes": ([1.0, 3.0, 2.0], [0, 9, 0], 1),
    "equal: the smaller hash": ([3.0, 3.0, 2.0], [5, 4, 0], 1),
    "hashes are signed": ([3.0, 3.0, 3.0], [5, -4, 0], 1),
    "within the tolerance is equal": ([3.0, 3.0 - TOLERANCE / 2, 2.0], [5, 4, 0], 1),
    "beyond it is not": ([3.0, 3.0 - TOLERANCE * 2, 2.0], [5, 4, 0], 0),
    "NaN loses to any number": ([NAN, -7.0, NAN], [0, 9, 0], 1),
    "NaN is minus infinity": ([NAN, -INF, NAN], [5, 4, 3], 2),
    "all minus infinity: the smallest hash": ([-INF, -INF, -INF], [5, 4, 6], 1),
    "all NaN: the smallest hash": ([NAN, NAN, NAN], [5, 6, 4], 2),
    "plus infinity ties with itself alone": ([INF, 1.0, INF], [5, 0, 4], 2),
    "any finite value beats minus infinity": ([-INF, -1e300, -INF], [0, 9, 0], 1),
}


def test_argbest() -> None:
    for rule, (values, tie, best) in BEST.items():
        assert argbest(row(*values), torch.tensor(tie)).item() == best, rule


def test_ranked_sorts_down_and_equals_by_ties():
    values = torch.tensor([[1.0, 3.0, 3.0 + 1e-12, float("nan"), 3.0, -torch.inf]], dtype=torch.float64)
    first = torch.tensor([[0, 7, 7, 0, 2, 1]])
    second = torch.tensor([[0, 5, 4, 9, 0, 1]])
    assert ranked(values, first, second).tolist() == [[4, 2, 1, 0, 3, 5]]
    shuffle = torch.tensor([3, 1, 5, 0, 2, 4])
    again = ranked(values[:, shuffle], first[:, shuffle], second[:, shuffle])
    assert shuffle[again].tolist() == [[4, 2, 1, 0, 3, 5]]


def test_rows_of_one_name() -> None:
    names = torch.tensor([[5, 7, 5, 5, 7, 9]])
    tie = torch.tensor([[30, 2, 10, 20, 1, 0]])
    assert first_equal(names).tolist() == [[0, 1, 0, 0, 1, 5]]
    assert occurrence(names, tie).tolist() == [[2, 1, 0, 1, 0, 0]]
    assert repeats(names, tie.argsort(-1)).tolist() == [[True, True, False, True, False, False]]
    drawn_twice = torch.tensor([[4, 4, 4]])
    assert sorted(occurrence(drawn_twice, torch.ones_like(drawn_twice))[0].tolist()) == [0, 1, 2]
