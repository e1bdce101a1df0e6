"""How many tokens a forward of a file run takes, unless the caller says.

Enough for the device to be busy and no more: a batch is eight forwards' tokens at every step, which is what a kill
loses and what the last rank keeps the others waiting for. Measured on an H200 (docs/scale.md): 8 B parameters work at
their full rate from 2,048 tokens on, 10 M from 131,072 to 262,144.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..options import DETERMINISTIC_TOKENS
from ..types import Model


class Appetite(NamedTuple):
    """What keeps a kind of device busy."""

    work: float  # floating-point operations of a forward
    least: int  # tokens


CUDA, OTHERS = Appetite(5e12, 8192), Appetite(4e10, 1024)
MOST = 1 << 18


def default_budget(model: Model, deterministic: bool = False) -> int:
    """Tokens a forward: a power of two that follows from the model's size and the kind of device alone.

    A deterministic forward is filled up to its whole size, so it is a quarter of others.
    """
    module: Any = getattr(model, "module", model)
    weights = module.parameters() if isinstance(module, nn.Module) else [model.head.weight]
    appetite = CUDA if model.head.weight.is_cuda else OTHERS
    tokens = appetite.work / (2 * sum(weight.numel() for weight in weights))
    budget = min(max(1 << max(0, round(tokens).bit_length() - 1), appetite.least), MOST)
    return max(budget // 4, min(budget, DETERMINISTIC_TOKENS)) if deterministic else budget
