from functools import partial
from types import SimpleNamespace

import torch

from d5p4.progress import bar, notebook_line


def test_counts_steps_of_all_prompts_in_a_terminal_alone(monkeypatch, capsys):
    with bar("decoding", 3, shown=True) as callback:
        assert callback is None
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    with bar("decoding", 3, shown=True) as callback:
        for prompts in ([0, 1], [2]):
            for step in range(4):
                done = partial(lambda place, step: (step + 1) / 4, step=step)
                shares = [None] * len(prompts)
                callback(SimpleNamespace(step=step, steps=4, prompts=torch.tensor(prompts), shares=shares, done=done))
    out, err = capsys.readouterr()
    assert out == "" and "decoding: step 4 of 4" in err and "100%" in err


def test_in_a_notebook_the_bar_is_one_line():
    begun, middle, full = (notebook_line("a<b", done, 4, 6.0) for done in (0.0, 1.5, 4.0))
    assert begun["text/plain"] == "a<b: 0 of 4 prompts" and full["text/plain"] == "a<b: 4 of 4 prompts"
    assert middle["text/plain"] == "a<b: 1 of 4 prompts, 0:00:10 left"
    assert middle["text/html"] == '<progress value="1.5" max="4"></progress> a&lt;b: 1 of 4 prompts, 0:00:10 left'
    assert notebook_line("decoding", 0.5, 1)["text/plain"] == "decoding: 0 of 1 prompt"  # stopped by the user
