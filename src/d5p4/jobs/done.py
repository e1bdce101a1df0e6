"""Which lines of a file are finished: a bit a line, small in memory and smaller still on its way to the other ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any


class Done:
    """Numbers from 1 to `last`; others are never in it. Once made it does not change."""

    def __init__(self, last: int = 0, lines: Iterable[int] = ()) -> None:
        self._bits = bytearray(last // 8 + 1)
        for line in lines:
            if 0 < line <= last:
                self._bits[line >> 3] |= 1 << (line & 7)
        self._count = self._counted()

    def __contains__(self, line: int) -> bool:
        return 0 < line < 8 * len(self._bits) and bool(self._bits[line >> 3] >> (line & 7) & 1)

    def __len__(self) -> int:
        return self._count

    def has_all(self, lines: Iterable[int]) -> bool:
        return all(line in self for line in lines)

    def __getstate__(self) -> bytes:
        return zlib.compress(self._bits)

    def __setstate__(self, state: Any) -> None:
        self._bits = bytearray(zlib.decompress(state))
        self._count = self._counted()

    def _counted(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()
