"""How wide numbers are where their last bits matter."""

from __future__ import annotations

import torch


def wide(device: torch.device) -> torch.dtype:
    """The widest float the device has: float64, on MPS float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """max(float32, dtype): where norms and rotations of rows in this dtype are computed."""
    return torch.promote_types(dtype, torch.float32)
