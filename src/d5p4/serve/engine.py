"""The server without HTTP: jobs wait in a queue, and one thread decodes them.

Jobs of one kind share a running call (`calls.Group`): they join it before its next step, and leave it when they are
finished or nobody waits for them. The groups take turns, one step each, so only one thread uses the model.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Receive

from ..errors import D5P4Error, NonFiniteLogits
from ..jobs.decoder import NO_MEMORY, NOT_FINITE
from ..result import Result
from ..types import Model
from .calls import Group, entering, next_group
from .errors import ApiError, describe_failure, not_possible
from .job import Finished, Job
from .requests import Ask, Limits

log = logging.getLogger("d5p4.serve")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # bounds of the histograms
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LONGEST_WAIT = 120  # seconds after which a client that is refused may try again, at most


class Metrics:
    """The metrics of one app, for Prometheus. Labels are routes and statuses, never text from a client."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()  # of its own, so that one process can run several apps
        ours: dict[str, Any] = {"namespace": "d5p4", "registry": self.registry}
        what = "Time from the head of a request to the end of its response"
        self.requests = Counter("requests", "Requests answered", ("route", "status"), **ours)
        self.seconds = Histogram("request_seconds", what, ("route",), buckets=SECONDS, **ours)
        self.waited = Histogram("queue_seconds", "Time that a prompt waits until it joins", buckets=SECONDS, **ours)
        what = "Time from a prompt's arrival to the end of its first step"
        self.first = Histogram("first_step_seconds", what, buckets=SECONDS, **ours)
        self.step = Histogram("step_seconds", "Time of a step of a group of prompts", buckets=SECONDS, **ours)
        self.batch = Histogram("batch_prompts", "Prompts that take a step together", buckets=SIZES, **ours)
        self.rows = Counter("rows", "Distinct rows that went through the model, for answered prompts", **ours)
        self.nominal = Counter("rows_nominal", "Rows that these would be if equal rows ran apart", **ours)
        self.tokens = Counter("answer_tokens", "Tokens of all answers", **ours)
        self.answers = Counter("answers", "Answers given", **ours)
        self.distinct = Counter("distinct_answers", "Different answers to a prompt, added up over prompts", **ours)
        self.cancelled = Counter("cancelled_prompts", "Prompts whose client left", **ours)
        self.refused = Counter("refused_requests", "Requests refused because the queue was full", **ours)
        Gauge("groups", "Running calls, which take turns", **ours).set_function(lambda: len(engine.groups))
        Gauge("running_prompts", "Prompts being decoded", **ours).set_function(engine.running)
        Gauge("waiting_prompts", "Prompts in the queue", **ours).set_function(lambda: len(engine.waiting))
        Gauge("ready", "Whether the model is loaded", **ours).set_function(lambda: engine.state == "ready")

    def answered(self, result: Result, place: int) -> None:
        self.rows.inc(int(result.rows[place]))
        self.nominal.inc(int(result.rows_nominal[place]))
        self.answers.inc(len(result.answers[place]))
        self.distinct.inc(int(result.distinct[place]))
        self.tokens.inc(sum(map(len, result.answers[place])))


class Engine:
    """One model, the jobs that wait, and the groups that are decoded.

    The event loop makes and settles jobs, and owns `live`. The worker's thread loads the model and owns the groups.
    Both use `waiting`, under the lock of `_change`.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = "loading"  # later "ready" or "failed", and in the end "stopping"
        self.waiting: list[Job] = []  # oldest first
        self.live: set[Job] = set()  # the jobs without an outcome
        self.groups: dict[Any, Group] = {}  # by the kind of their jobs
        self.metrics = Metrics(self)
        self._change = threading.Condition()
        self._ended = False
        self._loaded: Model | None = None
        self._halvings = 0  # how often the room was halved because memory ran out
        self._work, self._busy = 0.0, 0.0  # the work of answered jobs, and the seconds of all steps

    def start(self, load: Callable[[], Model], failed: Callable[[BaseException], None]) -> None:
        """Load the model on a thread of its own, then decode jobs. If loading fails, call `failed` with the error. The
        thread is a daemon, so that a running step does not delay the exit."""
        loop = asyncio.get_running_loop()
        run = partial(self._run, load, lambda error: loop.call_soon_threadsafe(failed, error))
        self.worker = threading.Thread(target=run, name="d5p4-worker", daemon=True)
        self.worker.start()

    def _run(self, load: Callable[[], Model], failed: Callable[[BaseException], Any]) -> None:
        try:
            self._loaded = load()
        except Exception as error:
            log.error("the model could not be loaded: %s", error)
            self.state = "failed"
            failed(error)
            return
        self.state = "ready" if self.state == "loading" else self.state
        while (group := self._next()) is not None:
            self._step(group)

    def _next(self) -> Group | None:
        """Wait for jobs, let them join groups, and return the group whose turn it is. None: the server stops."""
        with self._change:
            while not self._ended:
                self.groups = {kind: group for kind, group in self.groups.items() if group.jobs}
                running = [job for group in self.groups.values() for job in group.jobs.values()]
                for job in entering(self.waiting, running, self._halvings):
                    self.waiting.remove(job)
                    if job.kind not in self.groups:
                        self.groups[job.kind] = Group(self.model, job.settings, self._halvings, self._answered)
                    self.groups[job.kind].add(job)
                    self.metrics.waited.observe(max(0.0, time.monotonic() - job.created))
                if self.groups:
                    return next_group(self.groups.values(), time.monotonic())
                self._halvings = 0  # nothing runs, so memory may be free again
                self._change.wait()
        return None

    def _step(self, group: Group) -> None:
        """Let a group take a step. If it fails, its jobs fail or are decoded again."""
        start, failures = time.monotonic(), None
        try:
            for job in group.step():
                self.metrics.first.observe(max(0.0, time.monotonic() - job.created))
            self.metrics.batch.observe(group.size)
        except BaseException as error:
            failures = self._failures(group, error)
        group.last = time.monotonic()
        group.seconds = group.last - start
        self._busy += group.seconds
        self.metrics.step.observe(group.seconds)
        if failures is not None:  # outside the `except` block, because inside it the error keeps tensors in memory
            self.groups = {kind: other for kind, other in self.groups.items() if other is not group}
            again = [job for job in group.jobs.values() if job not in failures]
            group.jobs.clear()
            for job, failure in failures.items():
                job.soon(job.settle, failure)
            with self._change:
                self.waiting[:0] = [job for job in again if not job.outcome.done()]
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _failures(self, group: Group, error: BaseException) -> dict[Job, ApiError]:
        """Return the jobs that fail because of an error. The others are decoded again from their beginning."""
        jobs = list(group.jobs.values())
        if isinstance(error, NonFiniteLogits) and error.prompts:
            failed = [group.jobs[number] for number in error.prompts if number in group.jobs]
            guided = group.settings.guidance != 1  # guidance that overflows is the client's fault
            failure = ApiError(400, NOT_FINITE, "guidance") if guided else ApiError(500, NOT_FINITE)
            return dict.fromkeys(failed, failure)
        alone = len(jobs) == 1 and len(self.groups) == 1
        if isinstance(error, torch.OutOfMemoryError):
            if not (alone and group.smallest):
                self._halvings += 1
                return {}
            self._halvings = 0  # no budget is small enough for this prompt, so it says nothing about the others
            return {jobs[0]: ApiError(500, NO_MEMORY)}
        if len(jobs) > 1:
            for job in jobs:
                job.kind = (job.kind, id(job))  # it shares its call with no other job
            return {}
        if isinstance(error, D5P4Error):
            return dict.fromkeys(jobs, not_possible(error))
        log.error("a decode failed: %s", describe_failure(error))
        return dict.fromkeys(jobs, ApiError(500, "the decode failed; the server's log says where"))

    def _answered(self, job: Job, result: Result, place: int) -> None:
        self._work += job.work
        self.metrics.answered(result, place)

    def running(self) -> int:
        """Return the number of prompts that are being decoded and have no outcome yet."""
        return len(self.live) - len(self.waiting)

    def wait(self) -> int:
        """Return about how many seconds the prompts in the queue take, by the speed so far."""
        seconds = sum(job.work for job in self.waiting) * self._busy / self._work if self._work else 1.0
        return min(LONGEST_WAIT, max(1, math.ceil(seconds)))

    @property
    def model(self) -> Model:
        if self._loaded is not None:
            return self._loaded
        if self.state == "failed":
            raise ApiError(503, "the model could not be loaded; the server's log says why", code="failed", retry=False)
        raise ApiError(503, "the model is still being loaded; try again in a moment", code="loading", retry_after=5)

    async def within(self, end: float, call: Callable[[], Ask]) -> Ask:
        """Run a call on another thread. Raise an error if the call has not ended when the loop's clock shows `end`."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(call), max(0.0, end - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            raise self._late() from None

    def submit(self, ask: Ask) -> list[Job]:
        """Queue one job per prompt. Raise an error if the queue has no room for all these jobs."""
        if self.state == "stopping":
            raise _stopping()
        if len(self.waiting) + len(ask.prompts) > self.limits.max_queue:
            self.metrics.refused.inc()
            wait, count = self.wait(), len(self.waiting)
            message = f"{count} prompts are waiting, which take about {wait} s; try again then"
            raise ApiError(429, message, None, "queue_full", wait)
        news = asyncio.Event()
        jobs = [Job(self.model, ask, number, news) for number in range(len(ask.prompts))]
        for job in jobs:
            job.outcome.add_done_callback(partial(self._over, job))
        self.live.update(jobs)
        with self._change:
            self.waiting += jobs
            self._change.notify()
        return jobs

    def _over(self, job: Job, outcome: asyncio.Future[Finished]) -> None:
        self.live.discard(job)
        with self._change:
            self.waiting = [other for other in self.waiting if other is not job]

    @asynccontextmanager
    async def attend(self, jobs: list[Job], receive: Receive, end: float) -> AsyncIterator[None]:
        """In this context, jobs are cancelled if the client leaves, and fail at time `end`. Leaving it ends them."""
        loop = asyncio.get_running_loop()

        async def departure() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.metrics.cancelled.inc(sum(job.outcome.cancel() for job in jobs))

        def time_out() -> None:
            for job in jobs:
                job.settle(self._late())

        leaving, late = loop.create_task(departure()), loop.call_at(end, time_out)
        try:
            yield
        finally:
            late.cancel()
            leaving.cancel()
            for job in jobs:
                job.outcome.cancel()

    def _late(self) -> ApiError:
        advice = "ask for fewer steps or a smaller n or w, or try again later"
        message = f"this request took longer than {self.limits.timeout:g} s; {advice}"
        return ApiError(503, message, code="timeout", retry=False)

    async def answers(self, jobs: list[Job]) -> list[Finished] | None:
        """Wait for the answers to all jobs. Return None if their client has left."""
        try:
            return [await job.outcome for job in jobs]
        except asyncio.CancelledError:
            if any(job.outcome.cancelled() for job in jobs):
                return None
            raise

    async def drain(self) -> None:
        """Refuse new requests. Refuse accepted requests, too, if they do not finish within `limits.grace` seconds."""
        self.state = "stopping"
        if self.live:
            waiting = f"{len(self.live)} prompts have {self.limits.grace:g} s to finish"
            log.warning("stopping: %s; stop again to refuse them at once", waiting)
            await asyncio.wait([job.outcome for job in self.live], timeout=self.limits.grace)
        self.refuse()

    def refuse(self) -> None:
        for job in list(self.live):
            job.settle(_stopping())

    async def stop(self) -> None:
        """Refuse all jobs, and wait at most 30 s for the step that is being taken."""
        self.state = "stopping"
        self.refuse()
        with self._change:
            self._ended = True
            self._change.notify()
        if self._loaded is not None:
            await asyncio.to_thread(self.worker.join, 30)


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping; try again in a moment", code="stopping", retry_after=5)
