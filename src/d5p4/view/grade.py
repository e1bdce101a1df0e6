"""Right or wrong, where the model's card names a grader (`eval.graders`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..eval.graders import grader_of
from ..types import Model


def grade(model: Model, prompt: Any, texts: Sequence[str]) -> list[bool] | None:
    """Which answers are right; None where the model has no grader or the grader cannot judge this prompt."""
    chosen = grader_of(model)
    return None if chosen is None else chosen.grade(prompt, texts, None)


def count_right(model: Model, texts: Sequence[str], right: Sequence[bool] | None) -> int | None:
    """The number of different right answers; None where `grade` returned None."""
    chosen = grader_of(model)
    return None if chosen is None or right is None else chosen.count_right(texts, right)
