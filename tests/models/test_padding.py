"""A left-padded row gives the numbers of the unpadded one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d5p4.models import load
from tests.checkpoints import WRITERS


@pytest.mark.parametrize("kind", WRITERS)
def test_padded_rows_equal_unpadded_rows(tmp_path: Path, kind: str) -> None:
    """Without a prompt the first real position is a mask, which Dream predicts from its own row."""
    model = load(WRITERS[kind](tmp_path, dtype=torch.float64), "cpu", "float64")
    for prompt in (5, 0):
        check_padding(model, prompt)
    tokens = torch.full((2, 6), model.pad_id)
    real = torch.tensor([[False], [True]]).expand(2, 6)
    assert model.body(tokens, real).states.isfinite().all(), "a row of padding alone is finite"


def check_padding(model, prompt: int) -> None:
    generator = torch.Generator().manual_seed(1)
    row = torch.cat((torch.randint(0, 45, (prompt,), generator=generator), torch.full((7,), model.mask_id)))
    row[prompt + 3] = 2
    alone = model.body(row[None])
    for pad in (1, 4, 9):
        junk = torch.randint(0, 45, (pad,), generator=generator)
        neighbour = torch.randint(0, 45, (pad + len(row),), generator=generator)
        batch = torch.stack((torch.cat((junk, row)), neighbour))
        real = torch.ones_like(batch, dtype=torch.bool)
        real[0, :pad] = False
        together = model.body(batch, real)
        for one, both in zip(alone[:2], together[:2], strict=True):
            assert both.isfinite().all()
            assert (both[0, pad:] - one[0]).abs().max() < 1e-12
        assert (model.body(neighbour[None]).states - together.states[1:]).abs().max() < 1e-12
