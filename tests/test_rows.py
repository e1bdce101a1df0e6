import torch

from d5p4.rows import guidance_at, guide


def test_guidance_on_states_equals_guidance_on_logits():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 8, generator=g, dtype=torch.float64)
    bias = torch.randn(50, generator=g, dtype=torch.float64)
    c, u = (torch.randn(7, 8, generator=g, dtype=torch.float64) for _ in range(2))
    for scale in (1.0, 1.5, 3.0):
        lc, lu = c @ weight.T + bias, u @ weight.T + bias
        torch.testing.assert_close(guide(c, u, scale) @ weight.T + bias, lu + scale * (lc - lu), atol=1e-12, rtol=0)


def test_window_counts_global_steps():
    assert [guidance_at(s, 2.0, (1, 3)) for s in range(4)] == [1, 2, 2, 1]
    assert guidance_at(99, 2.0, None) == 2.0
