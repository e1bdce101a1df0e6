"""How wide numbers are where their last bits matter."""

from __future__ import annotations

import torch


def wide(device: torch.device) -> torch.dtype:
    """The widest float the device has: float64, on MPS float32."""
    return torch.float32 if device.type == "mps" else torch.float64
