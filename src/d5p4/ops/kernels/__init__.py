"""Triton versions of the operations next door, one file each, under the same names.

They run on CUDA in float32 and half precision. Everything else (CPU, float64, no Triton) takes the plain version, which
is the reference. `TRITON_INTERPRET=1` runs them on the CPU, slowly: that is how the tests compare the two.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

LARGEST_POOL = 4096
"""Rows of a pool that a solver's program can hold."""

_off = 0


@cache
def installed() -> bool:
    """Whether Triton can be imported and D5P4_KERNELS=off does not forbid it."""
    return os.environ.get("D5P4_KERNELS", "").lower() != "off" and importlib.util.find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Whether the kernels take x: on CUDA, not float64, no gradient wanted, nothing being compiled."""
    if not x.is_cuda or x.dtype == torch.float64 or _off:
        return False
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return installed()


@contextmanager
def off() -> Iterator[None]:
    """The plain versions only, for comparisons."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1
