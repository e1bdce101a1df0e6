"""Marks answers right or wrong, if the model's generation_config.json names a grader (`eval.graders`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..eval.graders import grader_of
from ..types import Model


def grade(model: Model, prompt: Any, texts: Sequence[str]) -> list[bool] | None:
    """Return whether each answer is right. Return None if the model has no grader that can judge this prompt."""
    chosen = grader_of(model)
    return None if chosen is None else chosen.grade(prompt, texts, None)


def count_right(model: Model, texts: Sequence[str], right: Sequence[bool] | None) -> int | None:
    """Return the number of different right answers, or None if `grade` returned None."""
    chosen = grader_of(model)
    return None if chosen is None or right is None else chosen.count_right(texts, right)
