"""What a rank says when it cannot go on without another."""

from __future__ import annotations

from ..errors import D5P4Error

CURE = "what is finished is kept: start the same command again"


class RankLost(D5P4Error):
    """Another rank has died, hangs or has given up."""
