"""Right or wrong, where that can be told: for models that speak countdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import D5P4Error
from ..eval.countdown import CHARACTERS, END, MASK, Problem, canonical, is_right
from ..types import Model


def speaks_countdown(model: Model) -> bool:
    """Whether the model's ids are those of countdown puzzles, whoever trained it."""
    if model.tokenizer is None or model.mask_id != MASK or tuple(model.eos_ids) != (END,):
        return False
    try:
        return list(model.tokenizer.encode(CHARACTERS)) == list(range(len(CHARACTERS)))
    except D5P4Error:
        return False


def grade(model: Model, prompt: Any, texts: Sequence[str]) -> list[bool] | None:
    """Which answers to a puzzle are right; None for other models and for prompts that are no puzzle."""
    if not isinstance(prompt, str) or not speaks_countdown(model):
        return None
    try:
        problem = Problem.parse(prompt)
    except D5P4Error:
        return None
    return [is_right(problem, text) for text in texts]


def count_right(texts: Sequence[str], right: Sequence[bool] | None) -> int | None:
    """How many right answers differ by more than the order of operands and of independent steps; None: not graded."""
    if right is None:
        return None
    return len({canonical(text) for text, good in zip(texts, right, strict=True) if good})
