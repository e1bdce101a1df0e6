"""What one request may cost, and how many requests the server takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ..errors import D5P4Error
from ..options import Settings
from ..prompts import Request, default_length
from ..types import Model
from .errors import ApiError

HISTORY_ROWS = 128  # largest pool with `history`: every step's similarities are the square of it
HISTORY_PROMPTS = 16  # most prompts with `history`: the history of one prompt may be tens of megabytes
CHILDREN_PER_ROW = 64  # most children that `distinct` may draw per step, per row of the largest pool
WORK = {"cuda": 100_000.0, "mps": 100.0, "cpu": 6.0}
"""Work allowed per request by kind of device, in units of 10^12 floating-point operations: about a minute on two CPU
cores, and about five on one large GPU."""


@dataclass(frozen=True)
class Limits:
    """Every field is a flag of `d5p4 serve`."""

    max_prompt_tokens: int | None = None  # None: what the model holds
    max_gen_length: int | None = None  # None: what the model holds
    max_pool: int = 256  # rows of a pool: n * w
    max_steps: int = 1024
    max_work: float | None = None  # 10^12 floating-point operations per request; None: by the kind of device
    max_body: int = 1 << 20  # bytes
    max_queue: int = 256  # prompts that wait
    timeout: float = 300.0  # seconds per request, waiting included
    grace: float = 30.0  # seconds that running requests have to finish when the server stops

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < math.inf:
                raise D5P4Error("must be a number above 0", option=field.name, value=value)

    def work_allowed(self, model: Model) -> float:
        """Floating-point operations per request; always enough for one answer with the model's default length."""
        if self.max_work is not None:
            return 1e12 * self.max_work
        length = model.generation_defaults.get("length") or default_length(model, Settings())
        default = work(model, Settings(k=1), [(min(2 * length, model.max_length), length)])
        return max(1e12 * WORK.get(model.head.weight.device.type, WORK["cpu"]), default)

    def check(
        self, settings: Settings, asked: Settings, requests: Sequence[Request], window: int, history: bool, field: str
    ) -> None:
        """Refuse what is beyond a limit.

        asked: the settings without spare beams that the server adds. window: most tokens to write per answer.
        """
        rows, tokens = settings.pool_size, max(len(request.ids) for request in requests)
        parents = settings.groups if not settings.spec.finishes and settings.select_window is None else rows
        children = 4 * settings.w * parents if settings.distinct else 0
        pool = f"n={asked.k}, w={asked.w} and spare={asked.spare} make a pool of {asked.pool_size} rows"
        draws = f"w={settings.w} and distinct draw {children} children per step (lower w, or set distinct to false)"
        cases: list[tuple[int, int | None, str, str]] = [
            (asked.pool_size, self.max_pool, "n", pool),
            (children, CHILDREN_PER_ROW * self.max_pool, "w", draws),
            (tokens, self.max_prompt_tokens, field, f"the prompt has {tokens} tokens"),
            (window, self.max_gen_length, "max_tokens", f"max_tokens={window}"),
            (settings.steps or window, self.max_steps, "steps", f"{window} steps, one per token"),
            (rows * history, HISTORY_ROWS, "history", f"history of pools of {rows} rows"),
            (len(requests) * history, HISTORY_PROMPTS, "history", f"history of {len(requests)} prompts"),
        ]
        for value, most, param, subject in cases:
            if most is not None and value > most:
                code = "context_length_exceeded" if param == field else None
                raise ApiError(400, f"{subject}; this server takes at most {most}", param, code)

    def check_work(
        self, model: Model, prompts: Sequence[tuple[int, int]], settings_for: Callable[[int], Settings], n: int
    ) -> None:
        """Refuse a request that would keep the server busy for minutes, and say what would fit.

        `settings_for(n)` are the settings of the same request for n answers.
        """
        allowed = self.work_allowed(model)
        if work(model, settings_for(n), prompts) <= allowed:
            return
        fitting = next((less for less in range(n - 1, 0, -1) if work(model, settings_for(less), prompts) <= allowed), 0)
        if fitting:
            message = f"n={n} is more work than this server does per request; the largest n that fits is {fitting}"
            raise ApiError(400, message, "n")
        per_step = work(model, settings_for(1), [(tokens, 1) for tokens, _ in prompts])
        steps = int(allowed / per_step)
        advice = f"set steps to {steps} or less" if steps else "ask for fewer prompts or tokens"
        raise ApiError(400, f"this is more work than this server does per request, even with n=1; {advice}", "steps")


def work(model: Model, settings: Settings, prompts: Sequence[tuple[int, int]]) -> float:
    """Floating-point operations of prompts of (tokens per row, steps), if all rows of all pools differ.

    A forward takes two per parameter and token. Guidance runs every row twice.
    """
    module: Any = getattr(model, "module", model)
    weights = module.parameters() if isinstance(module, nn.Module) else [model.head.weight]
    rows = settings.pool_size * (1 if settings.guidance == 1 else 2)
    return 2.0 * sum(weight.numel() for weight in weights) * rows * sum(tokens * steps for tokens, steps in prompts)
