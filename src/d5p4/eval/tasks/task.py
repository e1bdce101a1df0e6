"""What a task is: prompts, what a good answer looks like, and the name of the grader that judges one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """One thing to be answered."""

    id: str  # unique in its task, and the same whatever limit and seed
    prompt: str | None  # None: nothing is given, the answer is open-ended text
    references: tuple[str, ...]  # texts a good answer is like, the best first; may be empty
    gold: str | tuple[str, ...] | None = None  # the reference of the task's grader
    meta: dict[str, Any] = field(default_factory=dict)  # whatever else the source says


@dataclass(frozen=True)
class Task:
    """Examples in the order they are to be answered."""

    name: str
    examples: list[Example]
    grader: str | None  # a name of `eval.graders.GRADERS`; None: answers are compared with the references only
    source: str  # where they come from, as the caller named it

    def __len__(self) -> int:
        return len(self.examples)


def shuffled(count: int, seed: int, purpose: str) -> list[int]:
    """0..count-1 in an order fixed by the seed, the same on every machine and Python: sorted by a hash."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{purpose} {seed} {i}".encode()).digest())
