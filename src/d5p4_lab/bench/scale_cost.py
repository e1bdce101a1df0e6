"""What a file of prompts costs: step times measured on one GPU, and what ranks do besides decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from d5p4.jobs.budget import CUDA
from d5p4.settings import Settings

RANKS_A_HOST = 8
BUDGET = CUDA.least  # tokens a forward that `run_file` takes for a model of this size


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a whole decode step: so many for each row of `tokens` tokens, and never less than `least`."""

    a_row: float
    least: float
    tokens: int = 384
    authors: float = float("nan")  # a row the paper's way, which runs every row of the pool

    @staticmethod
    def of(gpu: Mapping[str, Any]) -> StepTime:
        """From the steps of all decodes in gpu.json: `least` is the median first one (one row), `a_row` the slope of a
        line from 0 through the others (all with the kernels on)."""
        rows = gpu["sections"]["decode"]["rows"]
        runs = [row["steps"] for row in rows if "steps" in row and "order" in row["what"]]
        later = np.array([(step["body_rows"], step["ms"]) for run in runs for step in run if step["step"] > 0])
        count, ms = later.T
        paper = next(row["baseline_ms"] for row in rows if row["what"] == "baseline step")
        least = float(np.median([run[0]["ms"] for run in runs]))
        return StepTime(float(count @ ms / (count @ count)), least, authors=paper / 60)

    def seconds(self, rows: float, tokens: float) -> float:
        """Of one step with so many rows of so many tokens."""
        return max(self.least, rows * self.a_row * tokens / self.tokens) / 1e3


@dataclass(frozen=True)
class Job:
    """A file of prompts and how it is decoded."""

    prompts: int = 10**6
    k: int = 16
    w: int = 4
    prompt: int = 128
    answer: int = 256
    steps: int = 256
    share: float = 1.0  # of the rows of a pool that differ, after the first step

    @property
    def pool(self) -> int:
        return self.k * self.w

    @property
    def rows(self) -> float:
        """Rows through the model for a prompt: all rows of the first step are equal."""
        return 1 + (self.steps - 1) * self.pool * self.share

    @property
    def batch(self) -> int:
        """Prompts of one decode call under the default budget."""
        return max(1, self.settings.max_tokens_per_call // self.pool // (self.prompt + self.answer))

    @property
    def settings(self) -> Settings:
        return Settings(k=self.k, w=self.w, max_tokens_per_forward=BUDGET)

    def seconds(self, step: StepTime, prompts: int | None = None) -> float:
        """Of a GPU for one prompt, decoded with others (as many as the budget takes)."""
        together = prompts or self.batch
        tokens = self.prompt + self.answer
        first, later = (step.seconds(together * rows, tokens) for rows in (1, self.pool * self.share))
        return (first + (self.steps - 1) * later) / together

    def gpu_hours(self, step: StepTime) -> float:
        return self.prompts * self.seconds(step) / 3600

    def authors_hours(self, step: StepTime) -> float:
        """One prompt at a time, every row of every pool."""
        return self.prompts * self.steps * self.pool * step.authors / 1e3 / 3600


@dataclass(frozen=True)
class Costs:
    """What ranks do besides decoding, in seconds; measured by scale.py unless said."""

    plan: float = 500e-6  # a prompt with a chat template, on every rank
    find: float = 60e-6  # a line, when parts are read
    merge: float = 50e-6  # a line, at the end
    start: float = 30.0  # torchrun, imports, CUDA (assumed)
    weights: float = 16.0  # GB
    server: float = 5.0  # GB/s that the file server gives to all hosts together (assumed)
    hang: float = 600.0  # --timeout: until a rank that hangs ends the job
    again: float = 60.0  # until the job is started again (assumed)

    @staticmethod
    def of(scale: Mapping[str, Any]) -> Costs:
        rows = scale["sections"].get("host", {}).get("rows", [])

        def of(beginning: str, default: float) -> float:
            return next((row["us"] / 1e6 for row in rows if row["what"].startswith(beginning)), default)

        known = Costs()
        plan = of("plan a prompt with a chat template", known.plan)
        return replace(known, plan=plan, find=of("find", known.find), merge=of("merge", known.merge))

    def loading(self, ranks: int) -> float:
        """Each host reads the weights once; its ranks share the pages."""
        return self.start + math.ceil(ranks / RANKS_A_HOST) * self.weights / self.server
