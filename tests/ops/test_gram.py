import torch

from d5p4.ops.gram import pool_gram


def pools_of(rows):
    """Features [P U, 1, F] and slots [P, U] of rows [P, U, F]."""
    return rows.flatten(0, 1)[:, None], torch.arange(rows.shape[0] * rows.shape[1]).view(rows.shape[:2])


def test_matches_normalised_rows():
    rows = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = torch.nn.functional.normalize(rows, dim=-1)
    torch.testing.assert_close(pool_gram(*pools_of(rows)), unit @ unit.transpose(1, 2), atol=1e-14, rtol=0)


def test_diagonal_is_exactly_one_and_nothing_exceeds_it():
    rows = torch.randn(1, 1, 5000, generator=torch.Generator().manual_seed(0)).repeat(1, 6, 1)
    rows[0, 1:] += 1e-6 * torch.randn(5, 5000, generator=torch.Generator().manual_seed(1))
    cosine = pool_gram(*pools_of(rows))
    assert (cosine.diagonal(dim1=1, dim2=2) == 1).all() and cosine.max() <= 1


def test_zero_rows_are_equal_to_each_other_and_unlike_the_rest():
    cosine = pool_gram(*pools_of(torch.tensor([[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])))
    assert cosine[0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
