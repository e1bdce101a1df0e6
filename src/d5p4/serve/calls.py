"""Running calls: which jobs may enter, which group takes the next step, and what a group does in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..decode.loop import Loop
from ..generate import arrivals
from ..options import Settings
from ..result import Answers, Result
from ..types import Model, Snapshot
from ..view import Recorder, grade
from ..view.trace import count_right
from .job import Finished, Job

SMALL = 1 / 16  # a job is small if it takes at most this share of the room for pools and caches
RESERVE = 1 / 4  # the share of the room that only small jobs may use, and that they have while a large job waits
PATIENCE = 4  # a group takes its step at the latest when it has waited this many rounds of all groups


def entering(waiting: Sequence[Job], running: Sequence[Job], halvings: int) -> list[Job]:
    """Return the jobs that may be decoded now, oldest first.

    The pools and caches of all running jobs fit in the room. Large jobs leave a reserve for small ones. A large job
    that waits keeps younger large jobs back, and small ones outside the reserve. A job may always enter an empty room.
    """
    size, entering, large_waits = 0.5**halvings, list[Job](), False
    small = sum(job.share for job in running if job.share <= SMALL)
    large = sum(job.share for job in running if job.share > SMALL)
    for job in waiting:
        if job.outcome.done():
            continue
        if job.share <= SMALL:
            fits = small + job.share <= max(RESERVE * size, 0 if large_waits else size - large)
        else:
            fits = not large_waits and large + job.share <= (1 - RESERVE) * size and small + large + job.share <= size
            fits = fits or (not large_waits and not large and small <= RESERVE * size)
        if fits or not (running or entering):
            entering.append(job)
            small, large = (small + job.share, large) if job.share <= SMALL else (small, large + job.share)
        else:
            large_waits = large_waits or job.share > SMALL
    return entering


def next_group(groups: Iterable[Group], now: float) -> Group:
    """Return the group that takes the next step: the one with the cheapest request, in turn if several are about equal.
    A group that has waited too long goes first, so that each group gets on."""
    groups = list(groups)
    most = PATIENCE * sum(group.seconds for group in groups)
    late = [group for group in groups if now - group.last > most]
    if late:
        return min(late, key=lambda group: group.last)
    return min(groups, key=lambda group: (min(job.rank for job in group.jobs.values()), group.last))


class Group:
    """Jobs of one kind, and the call that decodes them. Only the worker's thread uses a group."""

    def __init__(
        self, model: Model, settings: Settings, halvings: int, answered: Callable[[Job, Result, int], None]
    ) -> None:
        """answered: a function that is called with each job that has its answers."""
        budget = max(1, settings.max_tokens_per_forward >> (0 if settings.deterministic else halvings))
        self.model, self.settings = model, replace(settings, max_tokens_per_forward=budget)
        self.loop: Loop | None = None
        self.answered = answered
        self.jobs: dict[int, Job] = {}  # by their numbers in the call
        self.new: list[int] = []  # the numbers of those that join before the next step
        self.count = 0  # of all jobs so far
        self.size = 0  # how many prompts took the last step
        self.last, self.seconds = time.monotonic(), 0.0  # the end of the last step, and its duration

    @property
    def smallest(self) -> bool:
        """Whether the forwards cannot become smaller."""
        longest = max(job.request.length for job in self.jobs.values())
        return self.settings.deterministic or self.settings.max_tokens_per_forward <= longest

    def add(self, job: Job) -> None:
        """Let a job join before the next step."""
        job.recorder = Recorder(self.model) if job.ask.body.history else None  # a new one when it is decoded again
        self.jobs[self.count] = job
        self.new.append(self.count)
        self.count += 1

    def step(self) -> list[Job]:
        """Take a step of all jobs for which somebody waits, and return those for which it was the first."""
        loop = self.loop = self.loop or Loop(self.model, self.settings, deliver=self._deliver)
        gone = [number for number, job in self.jobs.items() if job.outcome.done()]
        loop.drop(gone)
        for number in gone:
            del self.jobs[number]
        numbers, self.new = [number for number in self.new if number in self.jobs], []
        jobs = [self.jobs[number] for number in numbers]
        if jobs:
            requests, seeds = [job.request for job in jobs], [job.ask.seed for job in jobs]
            loop.join(arrivals(self.model, self.settings, requests, seeds, numbers))
        self.size = len(self.jobs)
        loop.callback = self._watch if any(job.listens for job in self.jobs.values()) else None
        loop.step()
        return jobs

    def _watch(self, shot: Snapshot) -> None:
        """Report the step to every job that wants to know."""
        for place, number in enumerate(shot.prompts.tolist()):
            if self.jobs[number].listens and not self.jobs[number].outcome.done():
                self.jobs[number].step(self.model, shot, place)

    def _deliver(self, result: Result, numbers: list[int]) -> None:
        """Give jobs their answers as soon as they are finished. The others go on."""
        for place, number in enumerate(numbers):
            job = self.jobs[number]
            if not job.outcome.done():
                own = replace(result, settings=job.settings, seed=job.ask.seed)
                self.answered(job, own, place)  # first, so that the metrics count what a client has
                job.soon(job.settle, self._finished(job, own, place))
            del self.jobs[number]

    def _finished(self, job: Job, result: Result, place: int) -> Finished:
        """Return the outcome of a job whose prompt has the index `place` in the result."""
        texts, ids = result.texts[place], result.answers[place]
        cut = [False] * len(ids) if result.stopped is None else result.stopped[place]
        ended = [stopped or len(tokens) < job.window for tokens, stopped in zip(ids, cut, strict=True)]
        ended = ended if result.unfinished is None else [not one for one in result.unfinished[place]]
        right, seconds = grade(self.model, job.prompt, texts), time.monotonic() - job.created
        record = job.recorder
        trace = None if record is None else record.trace(job.prompt, result, place, job.ask.seed, seconds)
        return Finished(Answers(result, place), ended, right, count_right(self.model, texts, right), trace)
