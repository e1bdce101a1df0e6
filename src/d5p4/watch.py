"""Conditions that must hold, checked once per step.

Reading a condition waits for the device. So conditions are collected here as tensors, and the loop reads all of them
where it has to wait anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Watch:
    """`expect` a tensor of bools to be all true; `check` raises the first complaint if one is not."""

    def __init__(self) -> None:
        self._expected: list[tuple[Tensor, Callable[[Tensor], Exception]]] = []

    def expect(self, holds: Tensor, complaint: Callable[[Tensor], Exception]) -> None:
        """`complaint(holds)` is the error to raise unless `holds` is all true."""
        self._expected.append((holds, complaint))

    def check(self) -> None:
        expected, self._expected = self._expected, []
        if expected and not bool(torch.stack([holds.all() for holds, _ in expected]).all()):
            for holds, complaint in expected:
                if not bool(holds.all()):
                    raise complaint(holds)
