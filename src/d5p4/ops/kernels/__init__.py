"""Triton versions of the operations in `ops`, in files and functions of the same names.

They run on CUDA in float32 and half precision. Everything else (CPU, float64, no Triton) takes the plain version, which
is the reference. `TRITON_INTERPRET=1` runs them on the CPU, slowly: that is how the tests compare the two.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

MOST_ITEMS, MOST_GROUPS = 4096, 64
"""The largest problem a solver's program can hold: rows of a pool, and groups (it keeps a groups x groups matrix)."""

_off = 0


@cache
def installed() -> bool:
    """Whether Triton can be imported and is not switched off by D5P4_KERNELS=off, which is read at the first use."""
    forbidden = os.environ.get("D5P4_KERNELS", "").strip().lower() in ("off", "0", "no", "false")
    return not forbidden and importlib.util.find_spec("triton") is not None


@cache
def runs_on(device: torch.device) -> bool:
    """Whether a kernel can be compiled for the device and run: Triton needs a C compiler and Python's headers."""
    from .rng import mix

    try:
        mix([torch.zeros(1, dtype=torch.int64, device=device)])
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(f"Triton does not run on {device} ({first}); d5p4 uses its slower plain versions", stacklevel=4)
        return False
    return True


def usable(x: Tensor, items: int = 0) -> bool:
    """Whether the kernels take x: on CUDA, not float64, no gradient wanted, nothing being compiled; `items`: rows of a
    pool."""
    if not x.is_cuda or x.dtype == torch.float64 or _off or items > MOST_ITEMS:
        return False
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return installed() and runs_on(x.device)


@contextmanager
def off() -> Iterator[None]:
    """Use the plain versions only, for comparisons."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1
