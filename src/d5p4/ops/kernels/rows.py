"""What the kernels over rows share: tensors as rows of neighbouring numbers."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """[..., D] to [rows, D] with neighbouring columns, a view wherever there is one.

    The step between rows then depends on the model alone, never on how many rows or tokens there are: the kernels may
    be specialised by it (they need it for wide loads) and are still compiled once.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
