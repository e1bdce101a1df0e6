import gc
import weakref

import pytest
import torch

import d5p4
from d5p4.decode.rows import RowRunner, guide
from d5p4.decode.schedule import in_window
from tests.fake import FakeModel


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


@pytest.mark.parametrize("method", ["tree", "d5p4", "independent"])
def test_the_states_of_earlier_steps_are_freed_at_once(monkeypatch, method):
    """On a GPU, states are large, and nothing else would call Python's search for cycles."""
    made, alive, run = [], [], RowRunner.run

    def counted(*args, **kwargs):
        hidden = run(*args, **kwargs)
        made.append(weakref.ref(hidden.states))
        return hidden

    def count(_):
        alive.append(sum(states() is not None for states in made))

    monkeypatch.setattr(RowRunner, "run", counted)
    options = dict(method=method, order="top", k=3, gen_length=8, callback=count, seed=0)
    options |= dict(guidance=2.0, guidance_window=(0, 0.4), reveal="threshold", tau=0.9, eos="never")
    gc.disable()
    try:
        d5p4.generate(FakeModel(), "ab", **options)
    finally:
        gc.enable()
    assert alive[0] == 2 and alive[-1] == 1 and max(alive) == 2, alive  # with and without the prompt
