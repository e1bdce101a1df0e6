"""One call of `d5p4.generate` as the commands make it: timed, with progress, without Python's own warnings."""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from ..errors import D5P4Error, DuplicateAnswers
from .progress import progress

if TYPE_CHECKING:
    from ..types import Model, Result


def run(model: Model, prompts: Any, label: str, shown: bool, **settings: Any) -> tuple[Result, float]:
    """The result and the seconds it took."""
    import d5p4

    count = len(prompts) if prompts is not None else settings.get("sets") or 1
    start = time.perf_counter()
    with warnings.catch_warnings(), progress(label, count, shown) as callback:
        warnings.simplefilter("ignore", DuplicateAnswers)  # the commands say it in their own way
        result = d5p4.generate(model, prompts, callback=callback, **settings)
    return result, time.perf_counter() - start


def read_prompt(prompt: str) -> str:
    """The prompt argument; "-" stands for standard input."""
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # bytes that are no text arrive as half surrogate pairs, or not at all
    except UnicodeError as reason:
        raise D5P4Error(f"the prompt is not valid text: {reason}") from None
    return text
