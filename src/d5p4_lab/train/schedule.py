"""How far a run is and what that means for the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

WARMUP_STEPS, WARMUP_SHARE = 100, 0.02  # whichever is over first


@dataclass(frozen=True)
class Budget:
    """The end of a run: seconds of training, or a number of steps (which makes a run repeatable)."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds} s"

    def progress(self, step: int, seconds: float) -> float:
        """0 at the start, 1 at the end."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.seconds is not None
        return min(1.0, seconds / self.seconds)


def rate_scale(step: int, progress: float) -> float:
    """A short linear warm-up, then half a cosine down to zero."""
    warmth = max((step + 1) / WARMUP_STEPS, progress / WARMUP_SHARE)
    return min(1.0, warmth) * 0.5 * (1 + math.cos(math.pi * progress))
