"""Classifier-free guidance, on hidden states.

The head is affine, so l_u + g (l_c - l_u) = head(h_u + g (h_c - h_u)) exactly: guidance costs a second body pass, and
no second vocabulary pass. g = 1 is off (LLaDA's own scale s is g - 1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def guidance_at(step: int, guidance: float, window: tuple[int, int] | None) -> float:
    """The scale in force at a global step; outside the window [start, stop) it is 1 (partial guidance, D5P4^P)."""
    inside = window is None or window[0] <= step < window[1]
    return guidance if inside else 1.0


def guide(conditional: Tensor, unconditional: Tensor, g: float) -> Tensor:
    """Guided states, same shape as both, in max(float32, dtype): g magnifies what a narrower sum would round away."""
    wide = torch.promote_types(conditional.dtype, torch.float32)
    c, u = conditional.to(wide), unconditional.to(wide)
    return u + g * (c - u)
