import pytest

from d5p4 import make_schedule


def test_orders_reveal_every_position_once():
    for length, steps, block, reveals in (
        (6, None, None, [1] * 6),
        (6, 3, None, [2, 2, 2]),
        (7, 3, None, [3, 2, 2]),
        (6, 100, None, [1] * 6),
        (7, None, 3, [1] * 7),
        (7, 4, 3, [2, 1, 3, 1]),
        (8, 4, 4, [2, 2, 2, 2]),
        (5, 1, None, [5]),
        (5, None, 50, [1] * 5),
    ):
        made = make_schedule(length, steps, block, ancestral=False).steps
        assert [s.reveal for s in made] == reveals, (length, steps, block)
        assert sum(s.reveal for s in made) == length
        assert [s.last for s in made] == [False] * (len(reveals) - 1) + [True]
        assert [s.index for s in made] == list(range(len(reveals)))


def test_ancestral_takes_all_its_steps_and_ends_with_certainty():
    steps = make_schedule(4, 10, None, ancestral=True).steps
    assert len(steps) == 10 and steps[-1].move == 1
    still_masked = 1.0
    for i, s in enumerate(steps):
        still_masked *= 1 - s.move
        assert still_masked == pytest.approx(1 - (i + 1) / 10)
