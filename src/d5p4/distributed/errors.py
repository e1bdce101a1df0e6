"""What a rank says when it cannot go on without another."""

from __future__ import annotations

import re

from ..errors import D5P4Error

CURE = "what is finished is kept: start the same command again"


class RankLost(D5P4Error):
    """Another rank has died, hangs or has given up; `told`: it says itself why."""

    def __init__(self, said: str, told: bool = False) -> None:
        super().__init__(said)
        self.told = told


def in_short(error: BaseException) -> str:
    """The first line of what an error says, without the place in a library's source; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return (re.sub(r"^\[[^\]]*\]\s*", "", lines[0]) if lines else "")[:160] or type(error).__name__
