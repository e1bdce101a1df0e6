"""The token budget of file runs: enough to keep the device busy, and no more."""

from types import SimpleNamespace

import torch
from torch import nn

from d5p4.jobs.decoder import default_budget


class Sized(nn.Module):
    """A model with this number of parameters, on a device that need not exist."""

    def __init__(self, count: int, cuda: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, device="meta"))
        self.head = SimpleNamespace(weight=SimpleNamespace(is_cuda=cuda))


def test_large_models_take_fewer_tokens_and_deterministic_forwards_are_smaller():
    for parameters, cuda, tokens, deterministic in (
        (8_000_000_000, True, 8192, 4096),
        (170_000_000, True, 8192, None),
        (9_700_000, True, 1 << 17, 1 << 15),
        (1000, True, 1 << 18, None),
        (8_000_000_000, False, 1024, 1024),
        (9_700_000, False, 2048, 2048),
        (1000, False, 1 << 18, None),
    ):
        model = Sized(parameters, cuda)
        assert default_budget(model) == tokens, (parameters, cuda)
        if deterministic is not None:
            assert default_budget(model, deterministic=True) == deterministic, (parameters, cuda)
