"""The server without HTTP: jobs wait in a queue on the event loop, and threads decode them.

Jobs with equal settings are decoded in one batch. Up to LANES batches with different settings are decoded at the same
time. They take turns, one step each, so that only one thread uses the model at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Receive

from ..errors import D5P4Error
from ..generate import run_requests
from ..jobs.decoder import NOT_FINITE, Decoder
from ..options import Settings
from ..result import Answers, Result
from ..types import Model, Snapshot
from ..view import Recorder, grade
from ..view.trace import count_right
from .errors import ApiError, describe_failure, not_possible
from .job import Finished, Job
from .requests import Ask, Limits

log = logging.getLogger("d5p4.serve")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.004, 0.05
"""Limits of the pause before a decode, in seconds, so that jobs that come at the same time share the decode. The pause
is a small part of the last decode's duration."""
LANES = 2
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # bounds of the histograms
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one app, for Prometheus. Labels are routes and statuses, never text from a client."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()  # of its own, so that one process can run several apps
        ours: dict[str, Any] = {"namespace": "d5p4", "registry": self.registry}
        what = "Time from the head of a request to the end of its response"
        self.requests = Counter("requests", "Requests answered", ("route", "status"), **ours)
        self.seconds = Histogram("request_seconds", what, ("route",), buckets=SECONDS, **ours)
        self.waited = Histogram("queue_seconds", "Time that a prompt waits for its decode", buckets=SECONDS, **ours)
        self.decoding = Histogram("decode_seconds", "Time of the decode of a batch", buckets=SECONDS, **ours)
        self.batch = Histogram("batch_prompts", "Prompts decoded together", buckets=SIZES, **ours)
        self.rows = Counter("rows", "Distinct rows that went through the model", **ours)
        self.tokens = Counter("answer_tokens", "Tokens of all answers", **ours)
        self.answers = Counter("answers", "Answers given", **ours)
        self.distinct = Counter("distinct_answers", "Different answers to a prompt, added up over prompts", **ours)
        self.cancelled = Counter("cancelled_prompts", "Prompts whose client left", **ours)
        self.refused = Counter("refused_requests", "Requests refused because the queue was full", **ours)
        Gauge("running_prompts", "Prompts being decoded", **ours).set_function(engine.running)
        Gauge("waiting_prompts", "Prompts in the queue", **ours).set_function(lambda: len(engine.waiting))
        Gauge("ready", "Whether the model is loaded", **ours).set_function(lambda: engine.state == "ready")

    def answered(self, result: Result, place: int) -> None:
        self.rows.inc(int(result.rows[place]))
        self.answers.inc(len(result.answers[place]))
        self.distinct.inc(int(result.distinct[place]))
        self.tokens.inc(sum(map(len, result.answers[place])))


class Turns:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._change, self._queue = threading.Condition(), deque[object]()

    def __enter__(self) -> None:
        with self._change:
            ticket = object()
            self._queue.append(ticket)
            self._change.wait_for(lambda: self._queue[0] is ticket)

    def __exit__(self, *_: Any) -> None:
        with self._change:
            self._queue.popleft()
            self._change.notify_all()


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run a call on a thread of its own: a daemon, so that a running call does not delay the exit."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from now on, the future cannot be cancelled

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="d5p4-worker", daemon=True).start()
    return await asyncio.wrap_future(future)


def finished(model: Model, job: Job, result: Result, place: int, seconds: float) -> Finished:
    """Return the outcome of a job whose prompt has the index `place` in the result."""
    prompt, texts, ids = job.prompt, result.texts[place], result.answers[place]
    cut = [False] * len(ids) if result.stopped is None else result.stopped[place]
    ended = [stopped or len(tokens) < job.window for tokens, stopped in zip(ids, cut, strict=True)]
    ended = ended if result.unfinished is None else [not one for one in result.unfinished[place]]
    right = grade(model, prompt, texts)
    trace = None if job.recorder is None else job.recorder.trace(prompt, result, place, job.ask.seed, seconds)
    return Finished(Answers(result, place), ended, right, count_right(model, texts, right), trace)


class Engine:
    """One model, and the jobs that wait. The engine runs on one event loop, from `start` to `stop`."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.turns = limits, Turns()
        self.metrics = Metrics(self)
        self.state = "loading"  # later "ready" or "failed", and in the end "stopping"
        self.waiting: list[Job] = []  # oldest first
        self.live: set[Job] = set()
        self._loaded: Model | None = None
        self._lanes: dict[asyncio.Task[None], list[Job]] = {}  # the batches that are being decoded
        self._halvings = 0  # how often the token budget was halved because memory ran out
        self._change = asyncio.Event()  # set when a job comes or a batch ends
        self._seconds = 0.0  # the duration of the last decode

    def start(self, load: Callable[[], Model], failed: Callable[[BaseException], None]) -> None:
        """Load the model on a thread of its own, then decode jobs. If loading fails, call `failed` with the error."""
        self._task = asyncio.get_running_loop().create_task(self._run(load, failed))

    async def _run(self, load: Callable[[], Model], failed: Callable[[BaseException], None]) -> None:
        try:
            self._loaded = await in_thread(load)
        except Exception as error:
            log.error("the model could not be loaded: %s", error)
            self.state = "failed"
            failed(error)
            return
        self.state = "ready" if self.state == "loading" else self.state
        while True:
            await self._change.wait()
            self._change.clear()
            while len(self._lanes) < LANES and (batch := await self._next_batch()):
                self._lanes[asyncio.get_running_loop().create_task(self._lane(batch))] = batch

    async def _lane(self, batch: list[Job]) -> None:
        start = time.monotonic()
        try:
            await in_thread(partial(self._serve, batch))
        finally:
            self._seconds = time.monotonic() - start
            self._lanes = {task: jobs for task, jobs in self._lanes.items() if jobs is not batch}
            self._change.set()

    def running(self) -> int:
        """Return the number of prompts that are being decoded and have no outcome yet."""
        return sum(not job.outcome.done() for jobs in self._lanes.values() for job in jobs)

    async def _next_batch(self) -> list[Job]:
        """Wait a moment for more jobs, then take the oldest job and all jobs that can be decoded together with it."""
        if (batch := self._batch()) and self.state != "stopping":
            await asyncio.sleep(min(max(0.02 * self._seconds, SHORTEST_PAUSE), LONGEST_PAUSE))
            batch = self._batch()
        self.waiting = [job for job in self.waiting if job not in batch]
        return batch

    def _batch(self) -> list[Job]:
        batch: list[Job] = []
        decoding = [jobs[0].kind for jobs in self._lanes.values()]  # jobs of these kinds share the batch that follows
        for job in self.waiting:
            if job.kind not in decoding and (not batch or (job.kind == batch[0].kind and _fits(batch, job))):
                batch.append(job)
        return batch

    def _serve(self, batch: Sequence[Job]) -> None:
        """Decode jobs on a worker's thread, and settle them. If a batch fails, decode its jobs one by one."""
        wanted = [job for job in batch if not job.outcome.done()]
        try:
            return self._decode(wanted) if wanted else None
        except BaseException as error:
            if len(wanted) == 1:
                failure = ApiError(500, "the decode failed; the server's log says where")
                if isinstance(error, D5P4Error):
                    failure = not_possible(error)
                else:
                    log.error("a decode failed: %s", describe_failure(error))
                return wanted[0].soon(wanted[0].settle, failure)
        for job in wanted:  # outside the `except` block, because inside that block the error keeps tensors in memory
            self._serve([job])

    def _decode(self, batch: list[Job]) -> None:
        start = time.monotonic()
        for job in batch:
            self.metrics.waited.observe(max(0.0, start - job.created))
        self.metrics.batch.observe(len(batch))
        delivered: set[Job] = set()
        decoder = Decoder(partial(self._attempt, start, delivered), batch[0].settings, patience=math.inf)
        decoder.halvings = self._halvings  # a budget that was too large before is not tried again
        decoded = decoder.decode(batch)
        self._halvings = decoder.halvings
        self.metrics.decoding.observe(time.monotonic() - start)
        for job, message in decoded.failed:
            by_guidance = message == NOT_FINITE and job.settings.guidance != 1
            job.soon(job.settle, ApiError(400, message, "guidance") if by_guidance else ApiError(500, message))

    def _attempt(self, start: float, delivered: set[Job], jobs: list[Job], settings: Settings) -> Result:
        def deliver(number: int, result: Result, place: int) -> None:
            """Give a job its answers as soon as its prompt is finished. The other prompts of the batch go on."""
            job = jobs[number]
            if job not in delivered and not job.outcome.done():
                delivered.add(job)
                self.metrics.answered(result, place)
                job.soon(job.settle, finished(self.model, job, result, place, time.monotonic() - start))

        def watch(shot: Snapshot) -> list[int]:
            """Report the step to every job. Return the prompts to drop, because nobody waits for their answers."""
            places = list(enumerate(shot.prompts.tolist()))
            for place, number in places:
                if not jobs[number].outcome.done():
                    jobs[number].step(self.model, shot, place)
            self.turns.__exit__()  # the threads that wait have their turn before this one goes on
            self.turns.__enter__()
            return [number for _, number in places if jobs[number].outcome.done()]

        for job in jobs:
            job.recorder = Recorder(self.model) if job.ask.body.history else None  # a retry gets a new recorder
        requests, seeds = [job.request for job in jobs], [job.ask.seed for job in jobs]
        with self.turns:
            return run_requests(self.model, requests, settings, seeds, callback=watch, deliver=deliver)

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
            wait = min(120, max(1, math.ceil(self._seconds)))
            raise ApiError(429, "too many prompts are waiting; try again later", None, "queue_full", wait)
        news = asyncio.Event()
        jobs = [Job(ask, number, news) for number in range(len(ask.prompts))]
        for job in jobs:
            job.outcome.add_done_callback(partial(self._over, job))
        self.live.update(jobs)
        self.waiting += jobs
        self._change.set()
        return jobs

    def _over(self, job: Job, outcome: asyncio.Future[Finished]) -> None:
        self.live.discard(job)
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
        """Refuse all jobs, and wait at most 30 s for the batches that are being decoded."""
        self.state = "stopping"
        self.refuse()
        self._task.cancel()
        if self._lanes:
            await asyncio.wait(self._lanes, timeout=30)


def _fits(batch: Sequence[Job], job: Job) -> bool:
    """Return whether the batch and one more job together stay within the token budget of a decode call."""
    longest = max(other.request.length for other in (*batch, job))
    return (len(batch) + 1) * longest * job.settings.pool_size <= job.settings.max_tokens_per_call


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping; try again in a moment", code="stopping", retry_after=5)
