"""JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

from ..record import Answers, finite

__all__ = ["Answers", "finite", "print_json"]


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(finite(value), ensure_ascii=not utf8, allow_nan=False))
