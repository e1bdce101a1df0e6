import torch

from d5p4.decode.measures import similarity


def test_pooling():
    g = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 4, 5, generator=g, dtype=torch.float64)
    masked = torch.rand(2, 3, 4, generator=g) < 0.5
    masked[..., 0], masked[..., 1] = True, False
    slot = torch.arange(6).view(2, 3)
    for pooling in ("flatten", "mean", "masked", "non-masked"):
        cosine = similarity(features.flatten(0, 1), masked.flatten(0, 1), slot, pooling, "cosine", 1.0)
        for p in range(2):
            rows = []
            for n in range(3):
                keep = {"mean": masked[p, n] | True, "masked": masked[p, n], "non-masked": ~masked[p, n]}.get(pooling)
                rows.append(features[p, n].flatten() if keep is None else features[p, n][keep].mean(0))
            unit = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
            torch.testing.assert_close(cosine[p], unit @ unit.T, atol=1e-12, rtol=0, msg=pooling)


def test_rbf_is_of_unit_vectors():
    features = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = torch.nn.functional.normalize(features.flatten(2), dim=-1)[0]
    expected = torch.exp(-0.7 * torch.cdist(unit, unit) ** 2)
    slot = torch.arange(3)[None]
    matrix = similarity(features[0], torch.zeros(3, 2, dtype=torch.bool), slot, "flatten", "rbf", 0.7)[0]
    torch.testing.assert_close(matrix, expected, atol=1e-12, rtol=0)
