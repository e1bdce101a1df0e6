import torch

from d5p4.decode.rows import guide
from d5p4.decode.schedule import in_window


def test_guidance_on_states_equals_guidance_on_logits():
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 8, generator=g, dtype=torch.float64)
    bias = torch.randn(50, generator=g, dtype=torch.float64)
    c, u = (torch.randn(7, 8, generator=g, dtype=torch.float64) for _ in range(2))
    for scale in (1.0, 1.5, 3.0):
        lc, lu = c @ weight.T + bias, u @ weight.T + bias
        torch.testing.assert_close(guide(c, u, scale) @ weight.T + bias, lu + scale * (lc - lu), atol=1e-12, rtol=0)


def test_windows_count_steps_or_shares_of_revealed_positions():
    assert [in_window((1, 3), step, None) for step in range(4)] == [False, True, True, False]
    assert in_window(None, 99, None)
    assert [in_window((0, 0.5), 7, share) for share in (0.0, 0.49, 0.5, 1.0)] == [True, True, False, False]
