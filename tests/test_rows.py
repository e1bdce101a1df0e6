import torch

from d5p4.ops.ties import first_equal, occurrence


def test_first_equal_and_occurrence():
    row_hash = torch.tensor([[5, 7, 5, 5, 7, 9]])
    tie = torch.tensor([[30, 2, 10, 20, 1, 0]])
    assert first_equal(row_hash).tolist() == [[0, 1, 0, 0, 1, 5]]
    assert occurrence(row_hash, tie).tolist() == [[2, 1, 0, 1, 0, 0]]


def test_occurrence_follows_the_rows_when_they_move():
    g = torch.Generator().manual_seed(0)
    row_hash = torch.randint(0, 4, (3, 12), generator=g)
    tie = torch.randperm(12, generator=g).expand(3, 12)
    order = torch.randperm(12, generator=g)
    assert torch.equal(occurrence(row_hash, tie)[:, order], occurrence(row_hash[:, order], tie[:, order]))


def test_rows_drawn_twice_are_numbered_apart():
    same = torch.tensor([[4, 4, 4]])
    assert sorted(occurrence(same, torch.tensor([[1, 1, 1]]))[0].tolist()) == [0, 1, 2]
