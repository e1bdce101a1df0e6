"""How tests read a refusal, so that a table of bad input can be one test that names the case that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d5p4.errors import D5P4Error


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The sentence with which `call` refuses its arguments."""
    try:
        call(*args, **options)
    except D5P4Error as error:
        return str(error)
    return "(nothing was refused)"
