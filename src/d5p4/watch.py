"""`Watch` checks once per step that conditions hold, such as finite logits.

The values of a condition are on the device, and reading them means waiting for the device. So a `Watch` collects
conditions as tensors, and the decoding loop reads all of them at a point at which it waits anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Watch:
    """Collects tensors of bools by `expect`. If a tensor has a false element, `check` raises that tensor's error."""

    def __init__(self) -> None:
        self._expected: list[tuple[Tensor, Callable[[Tensor], Exception]]] = []

    def expect(self, holds: Tensor, complaint: Callable[[Tensor], Exception]) -> None:
        """Make the next `check` raise the error `complaint(holds)` if `holds` has a false element."""
        self._expected.append((holds, complaint))

    def check(self) -> None:
        expected, self._expected = self._expected, []
        if expected and not bool(torch.stack([holds.all() for holds, _ in expected]).all()):
            for holds, complaint in expected:
                if not bool(holds.all()):
                    raise complaint(holds)
