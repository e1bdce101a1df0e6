import gc
import weakref

import pytest

import d5p4
from d5p4.decode.rows import RowRunner
from tests.fake import FakeModel


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
