"""Limits on the cost of a request and on the number of prompts that wait."""

from collections.abc import Sequence
from dataclasses import replace

from ..jobs.decoder import weight_count
from ..options import ServerLimits, Settings
from ..prompts import Request, default_length
from ..types import Model
from .errors import ApiError

HISTORY_ROWS = 128  # the most rows per pool with `history`; a step stores a similarity for every pair of rows
HISTORY_PROMPTS = 16  # the most prompts with `history`; the history of one prompt may be tens of megabytes
CHILDREN_PER_ROW = 64  # with `distinct`, a step may draw at most this number times `max_pool` children
WORK = {"cuda": 100_000.0, "mps": 100.0, "cpu": 6.0}
"""Work allowed per request by kind of device, in units of 10^12 floating-point operations: about one minute on two CPU
cores, and about five minutes on one large GPU."""
SELECTION = 300  # the factor in `work`, from the time on a CPU with 128 beams and pools of 512 rows


class Limits(ServerLimits):
    """The limits of a server, and what they refuse."""

    def work_allowed(self, model: Model) -> float:
        """Return how many operations a request may take. By default, one answer of default length is always allowed."""
        if self.max_work is not None:
            return 1e12 * self.max_work
        length = model.generation_defaults.get("length") or default_length(model, Settings())
        default = work(model, Settings.make(model, k=1), [(min(2 * length, model.max_length), length)])
        return max(1e12 * WORK.get(model.head.weight.device.type, WORK["cpu"]), default)

    def check(self, settings: Settings, requests: Sequence[Request], window: int, history: bool, field: str) -> None:
        """Raise an error if a request is beyond a limit. window: the number of tokens of the longest answer."""
        rows, steps, tokens = settings.pool_size, settings.steps or window, max(len(one.ids) for one in requests)
        finishes = settings.spec.search(settings).finishes
        parents = rows if finishes or settings.select_window is not None else settings.groups
        children = 4 * settings.w * parents if settings.distinct else 0
        wide = f", w={settings.w}" if settings.spec.branches else ""
        pool = f"n={settings.k}{wide} and spare={settings.spare} make a pool of {rows} rows"
        draws = f"w={settings.w} and distinct draw {children} children per step (lower w, or set distinct to false)"
        cases: list[tuple[int, int | None, str, str]] = [
            (rows, self.max_pool, "n", pool),
            (children, CHILDREN_PER_ROW * self.max_pool, "w", draws),
            (tokens, self.max_prompt_tokens, field, f"the prompt has {tokens} tokens"),
            (window, self.max_gen_length, "max_tokens", f"max_tokens={window}"),
            (steps, self.max_steps, "steps", f"this request takes {steps} steps (set steps to a lower number)"),
            (rows * history, HISTORY_ROWS, "history", f"history with a pool of {rows} rows"),
            (len(requests) * history, HISTORY_PROMPTS, "history", f"history with {len(requests)} prompts"),
        ]
        for value, most, param, subject in cases:
            if most is not None and value > most:
                code = "context_length_exceeded" if param == field else None
                raise ApiError(400, f"{subject}; this server takes at most {most}", param, code)

    def check_work(self, model: Model, prompts: Sequence[tuple[int, int]], settings: Settings) -> None:
        """Raise an error if a request is too much work. The message says what would fit. prompts: see `work`."""
        allowed, n = self.work_allowed(model), settings.k
        fitting = next((k for k in range(n, 0, -1) if work(model, replace(settings, k=k), prompts) <= allowed), 0)
        if fitting == n:
            return
        if fitting:
            message = f"n={n} is more work than this server does per request; the largest n that fits is {fitting}"
            raise ApiError(400, message, "n")
        per_step = work(model, replace(settings, k=1), [(tokens, 1) for tokens, _ in prompts])
        steps = int(allowed / per_step)
        advice = f"set steps to {steps} or less" if steps else "ask for fewer prompts or tokens"
        raise ApiError(400, f"even n=1 is more work than this server does per request; {advice}", "steps")


def work(model: Model, settings: Settings, prompts: Sequence[tuple[int, int]]) -> float:
    """Return the number of floating-point operations of a request in the worst case, when all rows of a pool differ.

    prompts: (tokens per row, steps) of each prompt. A forward takes two operations per parameter and token. Guidance
    runs every row twice. A selection of g beams from N candidates takes as long as SELECTION g^2 N s operations, where
    s is the number of starts of the selection. A method may say how many more pools it runs, and what N s is (`cost`).
    """
    rows = settings.pool_size * (1 if settings.guidance == 1 else 2)
    per_token = 2.0 * weight_count(model) * rows
    search = settings.spec.search(settings)
    operations = 0.0
    for tokens, steps in prompts:
        pools, compared = search.cost(settings, steps)
        operations += per_token * tokens * (steps + pools) + SELECTION * settings.groups**2 * compared * steps
    return operations
