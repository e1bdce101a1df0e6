"""Self-rewarding SMC: when it resamples, by which weights, and what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import d5p4
from d5p4.decode.view import PoolView
from tests.fake import FakeModel
from tests.search.cases import pool, ties

PATH = torch.tensor([[-1.0, -2.0, -4.0, -1.5]], dtype=torch.float64)


def particles(path: Tensor, step: int = 8, **more: Any) -> PoolView:
    """A pool whose rows have these sums of log-probabilities."""
    nothing = torch.zeros_like(path)
    tie = ties(1, path.shape[1]).expand(path.shape)
    return pool(nothing, nothing.unsqueeze(-1), tie, path=path, step=step, **more)


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_self_rewarding_weights_are_the_log_probabilities_of_a_real_decode() -> None:
    """The answers are the likeliest particles."""
    shots: list[Any] = []

    def look(shot: d5p4.Snapshot) -> None:
        shots.append({"path": shot.view.path, "source": shot.source, "logprobs": shot.next_logprobs})

    options = dict(gen_length=9, seed=5, eos="never", logprobs=True, temperature=2.0, block_length=3)
    result = d5p4.generate(FakeModel(), ["abc", "head"], method="sr-smc", k=2, w=3, callback=look, **options)  # type: ignore[arg-type]
    logp, before, moves = torch.zeros(2, 6, 9, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64), 0
    for step, shot in enumerate(shots):
        path = logp.sum(-1)
        torch.testing.assert_close(shot["path"], path)
        w = (path - before).softmax(-1)
        resample = (1 / w.square().sum(-1) < 3) & (step in (3, 6))
        assert ((shot["source"] == torch.arange(6)).all(-1) | resample).all()
        moves += int((shot["source"] != torch.arange(6)).any(-1).sum())
        before = torch.where(resample[:, None], path.gather(1, shot["source"]), before)
        logp = shot["logprobs"]
    assert moves > 0 and result.logprobs is not None
    for path, values in zip(logp.sum(-1), result.logprobs, strict=True):
        kept = torch.tensor([sum(one) for one in values], dtype=torch.float64).sort(descending=True).values
        torch.testing.assert_close(kept, path.sort(descending=True).values[:2])
