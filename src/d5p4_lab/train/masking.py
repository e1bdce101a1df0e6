"""The loss of masked diffusion: mask each token with chance p, weigh its cross-entropy by 1/p."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 1e-3  # the smallest chance, so that 1/p stays bounded


def chances(rows: int, generator: torch.Generator) -> Tensor:
    """[rows] masking chances in (LEAST, 1), one in each of as many equal parts: less noise than independent draws."""
    device = generator.device
    shift = torch.rand((), generator=generator, device=device)
    even = (torch.arange(rows, device=device) / rows + shift) % 1
    return (1 - LEAST) * even + LEAST


def masks(chance: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """[rows, length] bool, True with the row's chance."""
    return torch.rand(len(chance), length, generator=generator, device=chance.device) < chance[:, None]


def weighted_cross_entropy(
    states: Tensor, weight: Tensor, bias: Tensor | None, banned: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Sum of weights[M] times the cross-entropy of targets[M] under the head's logits of states[M, D]."""
    logits = F.linear(states, weight, bias).float().masked_fill(banned, -torch.inf)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
