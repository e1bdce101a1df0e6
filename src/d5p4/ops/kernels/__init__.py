"""Triton versions of the operations in `ops`, in files and functions of the same names.

They run on CUDA in float32 and half precision. All other cases (CPU, float64, no Triton) use the plain version, which
is the reference. With `TRITON_INTERPRET=1` the Triton versions run on the CPU, slowly, for tests.
"""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

MOST_ITEMS, MOST_GROUPS = 4096, 64
"""One program can solve a pool of at most MOST_ITEMS rows in at most MOST_GROUPS groups."""

_off = 0


@cache
def installed() -> bool:
    """Return whether Triton can be imported and the environment variable D5P4_KERNELS (read once) allows it."""
    forbidden = os.environ.get("D5P4_KERNELS", "").strip().lower() in ("off", "0", "no", "false")
    return not forbidden and importlib.util.find_spec("triton") is not None


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether a kernel can be compiled and run on the device. Triton needs a C compiler and Python's headers."""
    from .rng import mix

    try:
        mix([torch.zeros(1, dtype=torch.int64, device=device)])
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(f"Triton does not run on {device} ({first}); d5p4 uses plain torch and is slower", stacklevel=4)
        return False
    return True


def usable(x: Tensor, items: int = 0) -> bool:
    """Return whether the kernels accept x and a pool of `items` rows. Callers look at `x.is_cuda` first, so that a step
    on the CPU stays in the plain versions."""
    if not x.is_cuda or x.dtype == torch.float64 or _off or items > MOST_ITEMS:
        return False
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return installed() and runs_on(x.device)


@contextmanager
def off() -> Iterator[None]:
    """Use only the plain versions inside the `with` block, for comparisons."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1
