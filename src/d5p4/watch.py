"""Conditions that must hold, checked once per step.

Reading a condition waits for the device. So a `Watch` collects conditions as tensors, and the loop reads all of them at
a place where it has to wait anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Watch:
    """Collects tensors of bools that must be true (`expect`). If one is not all true, `check` raises its error."""

    def __init__(self) -> None:
        self._expected: list[tuple[Tensor, Callable[[Tensor], Exception]]] = []

    def expect(self, holds: Tensor, complaint: Callable[[Tensor], Exception]) -> None:
        """Let `check` raise the error `complaint(holds)` unless `holds` is all true."""
        self._expected.append((holds, complaint))

    def check(self) -> None:
        expected, self._expected = self._expected, []
        if expected and not bool(torch.stack([holds.all() for holds, _ in expected]).all()):
            for holds, complaint in expected:
                if not bool(holds.all()):
                    raise complaint(holds)
