"""What a run says of itself: while it goes on, and at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Pace:
    """How far a run is. Of prompts decoded now a part counts too."""

    total: int  # prompts of the file
    before: int  # finished by earlier starts
    now: float  # finished by this start, on all ranks
    rows: float  # that went through the model for them
    seconds: float

    @property
    def prompts_per_second(self) -> float:
        return self.now / self.seconds if self.seconds > 0 else 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds left at this pace."""
        rate = self.prompts_per_second
        return max(0.0, self.total - self.before - self.now) / rate if rate > 0 else None


Progress = Callable[[Pace], object]


@dataclass(frozen=True)
class Report:
    """A finished run."""

    prompts: int  # lines of the output
    now: int  # of them finished by this start
    before: int  # by earlier ones
    failed: int  # that have an error instead of answers
    distinct: float | None  # share of answers that differ from the others of their prompt
    rows: int  # through the model, for all answers
    seconds: float  # of this start
    prompts_per_second: float
    rows_per_second: float
    seed: int
    settings: str  # the hash of the configuration, as in every line
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"notes": list(self.notes)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Report:
        return Report(**values | {"notes": tuple(values["notes"])})

    def nothing_left(self) -> Report:
        """The same run, seen by a start that finds it finished."""
        return replace(self, now=0, before=self.prompts, seconds=0.0, prompts_per_second=0.0, rows_per_second=0.0)
