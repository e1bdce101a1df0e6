"""What a server allows one request to cost, and how many it takes at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import D5P4Error

LARGEST_HISTORY = 128
"""Rows of a pool up to which `history` may be asked for: each step's similarities are the square of it."""
DRAWN_A_ROW = 64
"""Children that `distinct` may draw at each step for each row of the largest pool; where nobody selects, or not in all
steps, it draws for every row of a pool."""
MOST_HISTORIES = 16
"""Prompts of a request with `history`: each may be tens of megabytes, and they go out together."""


@dataclass(frozen=True)
class Limits:
    """Every field is a flag of `d5p4 serve`."""

    max_prompt_tokens: int | None = None  # None: what the model holds
    max_gen_length: int | None = None  # None: what the model holds
    max_pool: int = 256  # rows of a pool: n * w
    max_steps: int = 1024
    max_body: int = 1 << 20  # bytes
    max_queue: int = 256  # prompts that wait
    timeout: float = 300.0  # seconds a request may take, waiting included
    client_timeout: float = 20.0  # seconds a client may keep us waiting: for a request to arrive, or to be read
    grace: float = 30.0  # seconds that running requests have to finish when the server stops

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise D5P4Error(f"{field.name}={value!r} must be a number above 0")
