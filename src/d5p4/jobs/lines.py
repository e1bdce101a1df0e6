"""The lines a run writes: the input's own fields, then ours. No times: a line is a function of the configuration."""

from __future__ import annotations

from typing import Any

from ..record import Answers, finite
from ..store import json_line
from ..types import Result
from .reader import BadLine, PromptLine

OURS = (
    "line", "error", "answers", "tokens", "score", "distance", "distinct", "logdet", "rows", "rows_nominal", "nfe",
    "seed", "settings", "logprobs", "reveal_step", "given",
)  # fmt: skip
DIGITS = 6


def answer_line(source: PromptLine, result: Result, place: int, settings: str) -> bytes:
    """The line of prompt number `place` of a result; `settings` is the hash of the configuration."""
    found = Answers(result, place).to_dict()
    if result.logprobs is None:
        del found["tokens"]
    known = {name: rounded(found[name]) for name in OURS if name in found}
    return json_line(_given(source.fields) | {"line": source.line} | known | {"settings": settings})


def error_line(source: PromptLine | BadLine, error: str, settings: str) -> bytes:
    """The line of a prompt that has no answers."""
    return json_line(
        _given(source.fields) | {"line": source.line, "error": error, "answers": [], "settings": settings}
    )


def rounded(value: Any) -> Any:
    """Floats with six significant digits, None where they are not finite."""
    if isinstance(value, float):
        return finite(float(f"{value:.{DIGITS}g}") + 0.0)  # + 0.0: there is one zero
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The input's fields; those whose names are ours under `given`."""
    ours = {name: value for name, value in fields.items() if name in OURS}
    return {name: value for name, value in fields.items() if name not in OURS} | ({"given": ours} if ours else {})
