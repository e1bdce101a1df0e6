"""The token budget of file runs: enough for the device, and no more."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from d5p4.jobs.budget import default_budget


class Sized(nn.Module):
    """So many parameters, on a device that need not be there."""

    def __init__(self, count: int, cuda: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, device="meta"))
        self.head = SimpleNamespace(weight=SimpleNamespace(is_cuda=cuda))


@pytest.mark.parametrize("parameters, cuda, tokens", [
    (8_000_000_000, True, 8192), (170_000_000, True, 8192), (9_700_000, True, 1 << 17), (1000, True, 1 << 18),
    (8_000_000_000, False, 1024), (9_700_000, False, 2048), (1000, False, 1 << 18),
])  # fmt: skip
def test_large_models_take_fewer_tokens(parameters, cuda, tokens):
    assert default_budget(Sized(parameters, cuda)) == tokens


@pytest.mark.parametrize("parameters, cuda, tokens", [
    (8_000_000_000, True, 4096), (9_700_000, True, 1 << 15), (8_000_000_000, False, 1024), (9_700_000, False, 2048),
])  # fmt: skip
def test_forwards_that_are_filled_up_are_smaller(parameters, cuda, tokens):
    assert default_budget(Sized(parameters, cuda), deterministic=True) == tokens
