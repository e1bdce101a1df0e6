"""Computes the cost of decoding a file of prompts on many GPUs from measured step times, and simulates the ranks.

In the simulation, d5p4's own code divides the prompts into batches, and the ranks take batches from a shared counter.
If a rank hangs, the job ends early and starts again. The simulation adds up useful, lost and waiting time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from d5p4.generate import batches
from d5p4.jobs.decoder import CUDA
from d5p4.jobs.run import WINDOW
from d5p4.options import Settings

from . import rows_of

Floats = NDArray[np.float64]
RANKS_PER_HOST = 8
BUDGET = CUDA.least  # with a model of 8B parameters, `run_file` puts at most this many tokens into a forward


@dataclass(frozen=True)
class StepTime:
    """The time of a decode step: `ms_per_row` ms for each row of `tokens` tokens, but at least `least` ms in all."""

    ms_per_row: float
    least: float
    tokens: int = 384
    authors: float = float("nan")  # the baseline's ms per row; the baseline runs every row of the pool

    @staticmethod
    def of(gpu: Mapping[str, Any]) -> StepTime:
        """Fit the step times of all decodes in gpu.json.xz that used our kernels.

        `least` is the median time of first steps, which run one row. `ms_per_row` is the slope of a line through the
        origin that is fitted to the later steps.
        """
        rows = gpu["sections"]["decode"]["rows"]
        runs = [row["steps"] for row in rows if "steps" in row and "order" in row["what"]]
        later = np.array([(step["body_rows"], step["ms"]) for run in runs for step in run if step["step"] > 0])
        count, ms = later.T
        paper = next(row["baseline_ms"] for row in rows if row["what"] == "baseline step")
        least = float(np.median([run[0]["ms"] for run in runs]))
        return StepTime(float(count @ ms / (count @ count)), least, authors=paper / 60)

    def seconds(self, rows: float, tokens: float) -> float:
        """Return the seconds of one step with `rows` rows of `tokens` tokens."""
        return max(self.least, rows * self.ms_per_row * tokens / self.tokens) / 1e3


@dataclass(frozen=True)
class Job:
    """A file of prompts and the settings with which the file is decoded."""

    prompts: int = 10**6
    k: int = 16
    w: int = 4
    prompt: int = 128
    answer: int = 256
    steps: int = 256
    share: float = 1.0  # the share of distinct rows in a pool after the first step

    @property
    def pool(self) -> int:
        return self.k * self.w

    @property
    def rows(self) -> float:
        """The number of rows through the model per prompt. In the first step all rows are equal, so one row runs."""
        return 1 + (self.steps - 1) * self.pool * self.share

    @property
    def batch(self) -> int:
        """The number of prompts that one decode call takes under the default token budget."""
        return max(1, self.settings.max_tokens_per_call // self.pool // (self.prompt + self.answer))

    @property
    def settings(self) -> Settings:
        return Settings(method="d5p4", k=self.k, w=self.w, max_tokens_per_forward=BUDGET)

    def seconds(self, step: StepTime, prompts: int | None = None) -> float:
        """Return the GPU seconds per prompt if `prompts` prompts (by default, `self.batch`) are decoded together."""
        together = prompts or self.batch
        tokens = self.prompt + self.answer
        first, later = (step.seconds(together * rows, tokens) for rows in (1, self.pool * self.share))
        return (first + (self.steps - 1) * later) / together

    def gpu_hours(self, step: StepTime) -> float:
        return self.prompts * self.seconds(step) / 3600

    def authors_hours(self, step: StepTime) -> float:
        """Return the GPU-hours of the baseline, which decodes one prompt at a time and runs every row of a pool."""
        return self.prompts * self.steps * self.pool * step.authors / 1e3 / 3600


@dataclass(frozen=True)
class Costs:
    """The costs of a run besides decoding, in seconds if no unit is given. scale.py measures plan, find and merge."""

    plan: float = 500e-6  # the time per prompt to plan batches (with a chat template); every rank plans all batches
    find: float = 60e-6  # the time per line to find the finished lines in the part files
    merge: float = 50e-6  # the time per line to merge the part files into one file at the end
    start: float = 30.0  # the time to start torchrun, Python and CUDA (assumed)
    weights: float = 16.0  # the size of the weights in GB
    server: float = 5.0  # the GB/s that the file server sends to all hosts together (assumed)
    hang: float = 600.0  # the time until the job ends after a rank hangs (--timeout)
    again: float = 60.0  # the time until the ended job starts again (assumed)

    @staticmethod
    def of(scale: Mapping[str, Any]) -> Costs:
        rows = rows_of(scale, "host")

        def seconds(beginning: str, default: float) -> float:
            return next((row["us"] / 1e6 for row in rows if row["what"].startswith(beginning)), default)

        default = Costs()
        plan = seconds("plan a prompt with a chat template", default.plan)
        return replace(default, plan=plan, find=seconds("find", default.find), merge=seconds("merge", default.merge))

    def loading(self, ranks: int) -> float:
        """Return the seconds until all ranks have the weights. Each host reads the weights once for all its ranks."""
        return self.start + math.ceil(ranks / RANKS_PER_HOST) * self.weights / self.server


@dataclass(frozen=True)
class World:
    """The assumptions of a simulation: how prompts differ, and which faults happen.

    Prompt lengths are lognormal with the standard deviation `spread` of the logarithm, clipped to 16..1024. The share
    of distinct rows per prompt is uniform between 1 - `mixed` and 1 + `mixed` times the mean. The range is narrower if
    a share would exceed 1.
    """

    spread: float = 0.5
    mixed: float = 0.2
    slow: float = 1.0  # the speed of GPUs 0, 64, 128, ..., if all other GPUs have speed 1
    killed: float | None = None  # the share of the work that is done when a rank hangs; None if no rank hangs


class Request(NamedTuple):
    """Stands for a request. It has only the attributes that d5p4 reads to make batches."""

    length: int
    answer: int

    def window(self, mask_id: int) -> range:
        return range(self.answer)

    def offset(self, model: Any) -> int:
        return 0


class Batches(NamedTuple):
    """The planned batches of a file."""

    seconds: Floats  # [B] the seconds that each batch takes on a GPU of speed 1
    window: NDArray[np.int64]  # [B] the index of the window of the file from which each batch was made
    prompts: NDArray[np.int64]  # [B] the number of prompts in each batch


class Cut(NamedTuple):
    """A file that is divided into batches. The prompts of a batch are neighbours in `order`."""

    order: NDArray[np.int64]  # [P] the prompts' indices in the file: first those of batch 0, then of batch 1, ...
    first: NDArray[np.int64]  # [B] the index in `order` at which each batch begins
    window: NDArray[np.int64]  # [B]
    lengths: NDArray[np.int64]  # [P] the number of tokens in a row of each prompt


@cache
def cut(job: Job, spread: float) -> Cut:
    """Divide a file into batches with the same windows, the same function and the same budget as `run_file`."""
    prompts, answer, settings, model = job.prompts, job.answer, job.settings, SimpleNamespace(mask_id=-1)
    middle = math.log(job.prompt) - spread**2 / 2
    drawn = np.random.default_rng(0).lognormal(middle, spread, prompts).clip(16, 1024).astype(int)
    lengths = drawn + answer
    order: list[int] = []
    first, window = [], []
    for number, start in enumerate(range(0, prompts, WINDOW)):
        requests: Any = [Request(length, answer) for length in lengths[start : start + WINDOW].tolist()]
        for _, _, numbers in batches(model, requests, settings):
            first.append(len(order))
            window.append(number)
            order += [start + i for i in numbers]
    return Cut(np.array(order), np.array(first), np.array(window), lengths)


@cache
def planned(job: Job, spread: float, mixed: float, step: StepTime) -> Batches:
    """Return the batches of a file with the time of each batch."""
    file = cut(replace(job, steps=1, share=1.0), spread)  # the batches do not depend on steps and share
    reach = min(mixed * job.share, 1 - job.share)
    share = np.random.default_rng(1).uniform(job.share - reach, job.share + reach, job.prompts)
    longest = np.maximum.reduceat(file.lengths[file.order], file.first)  # [B] rows are padded to this length
    count = np.diff(file.first, append=job.prompts)
    rows = job.pool * np.add.reduceat(share[file.order], file.first)

    def seconds(rows: Floats) -> Floats:
        return np.maximum(step.least, rows * step.ms_per_row * longest / step.tokens) / 1e3

    return Batches(seconds(count.astype(float)) + (job.steps - 1) * seconds(rows), file.window, count)


class Played(NamedTuple):
    """The outcome of one start of the job, which ends when all batches are done or when the job is stopped."""

    end: float  # the time at which the last batch is done, or at which the job is stopped
    done: NDArray[np.bool_]  # [B]


def play(work: Batches, pending: NDArray[np.int64], speed: Floats, plan: float, begin: float, stop: Floats) -> Played:
    """Simulate one start of the job: each free rank takes the next pending batch. Rank r stops at stop[r] seconds.

    Before decoding a batch, a rank must plan all windows up to the window of the batch.
    """
    free = [(begin, rank) for rank in range(len(speed))]
    planned_to = [-1] * len(speed)
    done, end = np.zeros(len(work.seconds), bool), begin
    window, seconds, pace = work.window.tolist(), work.seconds.tolist(), speed.tolist()
    for batch in pending.tolist():
        while free and free[0][0] >= stop[free[0][1]]:
            heapq.heappop(free)
        if not free:
            break
        now, rank = heapq.heappop(free)
        now += plan * (window[batch] - planned_to[rank]) + seconds[batch] / pace[rank]
        planned_to[rank] = window[batch]
        if now <= stop[rank]:
            done[batch], end = True, max(end, now)
        heapq.heappush(free, (now, rank))
    return Played(end if done[pending].all() else float(stop.max()), done)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: `wall` is its wall time in hours, and the other floats are shares of ranks × wall time."""

    ranks: int
    wall: float
    useful: float
    starting: float
    merging: float
    lost: float  # the share for batches that did not finish, and for the wait from a rank's hang to the job's end
    rest: float  # the share for planning, slow GPUs, and waiting for the last batches


def simulate(job: Job, ranks: int, step: StepTime, costs: Costs, world: World) -> Outcome:
    work = planned(job, world.spread, world.mixed, step)
    speed = np.ones(ranks)
    speed[::64] = world.slow
    plan, total = costs.plan * WINDOW, float(work.seconds.sum())
    everything, begin = np.arange(len(work.seconds)), costs.loading(ranks)
    starting, lost, done = begin, 0.0, np.zeros(len(everything), bool)
    if world.killed is not None:
        died = begin + world.killed * total / ranks
        # The timeout detects a hung rank. Until then, the other ranks decode and keep the batches that they finish.
        stop = np.full(ranks, died + costs.hang)
        stop[-1] = died
        first = play(work, everything, speed, plan, begin, stop)
        done = first.done
        kept = float(work.seconds[done].sum())  # the rest of the ranks' time until the end counts as lost
        lost = first.end - begin - kept / ranks
        again = costs.again + costs.loading(ranks) + costs.find * int(work.prompts[done].sum())
        starting, begin = starting + again, first.end + again
    last = play(work, everything[~done], speed, plan, begin, np.full(ranks, np.inf))
    merging = (costs.find + costs.merge) * job.prompts
    wall = last.end + merging
    useful = total / ranks
    rest = wall - useful - starting - merging - lost
    return Outcome(ranks, wall / 3600, *(x / wall for x in (useful, starting, merging, lost, rest)))


def fixed_shares(job: Job, ranks: int, step: StepTime, world: World) -> float:
    """Return the useful share of the time of R ranks if batch i is fixed to rank i mod R, without a shared counter."""
    work = planned(job, world.spread, world.mixed, step)
    speed = np.ones(ranks)
    speed[::64] = world.slow
    wall = max(float(work.seconds[rank::ranks].sum()) / speed[rank] for rank in range(ranks))
    return float(work.seconds.sum()) / ranks / wall
