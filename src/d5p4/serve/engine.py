"""The server without HTTP: one thread owns the model and decodes what waits in the queue; the event loop fills it."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.types import Receive

from ..errors import D5P4Error
from ..generate import run_requests
from ..jobs.decoder import NOT_FINITE, Decoder
from ..record import Answers
from ..settings import Settings
from ..types import Model, Result, Snapshot
from ..view import Recorder, count_right, grade
from .errors import ApiError, describe_failure, not_possible
from .limits import Limits
from .metrics import Metrics
from .queue import Finished, Job, Queue, stopping
from .requests import Ask
from .settled import cut

log = logging.getLogger("d5p4.serve")


class Worker(threading.Thread):
    """Started once. `model` is None until it is loaded; `failure` says why it could not be."""

    def __init__(
        self, load: Callable[[], Model], queue: Queue, metrics: Metrics, on_failure: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name="d5p4-worker", daemon=True)
        self._load, self.queue, self.metrics, self._on_failure = load, queue, metrics, on_failure
        self.model: Model | None = None
        self.failure: BaseException | None = None
        self.seconds = 0.0  # that the last decode took
        self.halvings = 0  # of the token budget, after too little memory

    def run(self) -> None:
        try:
            self.model = self._load()
        except BaseException as error:
            self.failure = error
            self._on_failure(error)
        while self.model is not None and (batch := self.queue.take(self._fits, self.seconds)):
            start = time.monotonic()
            self._serve(self.model, batch)
            self.seconds = time.monotonic() - start

    def _fits(self, batch: Sequence[Job], job: Job) -> bool:
        longest = max(other.request.length for other in (*batch, job))
        return (len(batch) + 1) * longest * job.settings.pool_size <= job.settings.max_tokens_per_call

    def _serve(self, model: Model, batch: list[Job]) -> None:
        """Every job of the batch gets an outcome, whatever happens. One that fails does not take others with it."""
        wanted = [job for job in batch if not job.outcome.done()]
        if not wanted:
            return
        try:
            self._decode(model, wanted)
            return
        except BaseException as error:
            if len(wanted) == 1:
                wanted[0].fail(_failure(error))
                return
        for job in wanted:  # outside of the block, because its error holds tensors
            self._serve(model, [job])

    def _decode(self, model: Model, batch: list[Job]) -> None:
        start = time.monotonic()
        for job in batch:
            self.metrics.waited.observe(max(0.0, start - job.created))
        self.metrics.batch.observe(len(batch))

        def attempt(jobs: list[Job], settings: Settings) -> Result:
            def watch(shot: Snapshot) -> list[int]:
                """Tell every job of the step; drop those that nobody waits for."""
                dropped = []
                for place, number in enumerate(shot.prompts.tolist()):
                    if jobs[number].outcome.done():
                        dropped.append(number)
                    else:
                        jobs[number].step(model, shot, place)
                return dropped

            for job in jobs:
                job.recorder = Recorder(model) if job.ask.body.history else None  # an earlier attempt may have failed
            keys, seeds = [job.ask.keys[job.number] for job in jobs], [job.ask.seed for job in jobs]
            return run_requests(model, [job.request for job in jobs], keys, settings, seeds, callback=watch)

        with self.metrics.running(len(batch)):
            decoder = Decoder(attempt, batch[0].settings, patience=math.inf)
            decoder.halvings = self.halvings  # a budget that was too large once is not tried again
            outcome = decoder.decode(batch)
            self.halvings = decoder.halvings
        seconds = time.monotonic() - start
        self.metrics.decoding.observe(seconds)
        for job, result, place in outcome.answered:
            if result.answers[place] and not job.outcome.done():
                self.metrics.answered(result, place)
                job.finish(finished(model, job, result, place, seconds))
        for job, error in outcome.failed:
            by_guidance = error == NOT_FINITE and job.settings.guidance != 1
            job.fail(ApiError(400, error, "guidance") if by_guidance else ApiError(500, error))


def _failure(error: BaseException) -> ApiError:
    if isinstance(error, D5P4Error):
        return not_possible(error)
    log.error("a decode failed: %s", describe_failure(error))
    return ApiError(500, "the decode failed; the server's log says where")


def finished(model: Model, job: Job, result: Result, place: int, seconds: float) -> Finished:
    """The outcome of a job: prompt number `place` of a result."""
    prompt, window = job.ask.prompts[job.number], len(job.request.window(model.mask_id))
    cuts = [cut(text, job.ask.body.stops) for text in result.texts[place]]
    texts = [text for text, _ in cuts]
    ended = [stopped or len(ids) < window for ids, (_, stopped) in zip(result.answers[place], cuts, strict=True)]
    right = grade(model, prompt, texts)
    count = None if right is None else count_right(texts, right)
    trace = None if job.recorder is None else job.recorder.trace(prompt, result, place, job.ask.seed, seconds)
    return Finished(Answers(result, place), texts, ended, right, count, trace)


class Engine:
    """One model, one worker, one queue. Lives on one event loop, between `start` and `stop`."""

    def __init__(self, load: Callable[[], Model], limits: Limits, fixed: dict[str, Any]) -> None:
        """`fixed`: options of `d5p4.generate` that the server decides for all requests."""
        self.limits, self.fixed, self._load = limits, fixed, load
        self.queue = Queue(limits.max_queue)
        self.metrics = Metrics(lambda: len(self.queue), lambda: self.state == "ready")
        self.worker: Worker | None = None
        self.live: set[Job] = set()
        self.draining = False

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Load the model on the worker's thread; `failed` gets the reason when that is not possible."""
        loop = asyncio.get_running_loop()

        def on_failure(error: BaseException) -> None:
            log.error("the model could not be loaded: %s", error)
            loop.call_soon_threadsafe(failed, error)

        self.worker = Worker(self._load, self.queue, self.metrics, on_failure)
        self.worker.start()

    @property
    def state(self) -> str:
        """ready, loading, failed or stopping."""
        if self.draining:
            return "stopping"
        if self.worker is None or (self.worker.model is None and self.worker.failure is None):
            return "loading"
        return "ready" if self.worker.failure is None else "failed"

    @property
    def model(self) -> Model:
        if self.worker is not None and self.worker.model is not None:
            return self.worker.model
        if self.state == "failed":
            raise ApiError(503, "the model could not be loaded; the server's log says why", code="failed", retry=False)
        raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)

    async def within(self, end: float, call: Callable[[], Ask]) -> Ask:
        """Run a call on another thread, until `end` by the loop's clock."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(call), max(0.0, end - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            raise self._late() from None

    def submit(self, ask: Ask) -> list[Job]:
        """Queue a job per prompt: all of them, or an error."""
        jobs = [Job(ask, number) for number in range(len(ask.prompts))]
        if not self.queue.add(jobs):
            self.metrics.refused.inc()
            wait = 1 if self.worker is None else min(120, max(1, math.ceil(self.worker.seconds)))
            raise ApiError(429, "too many requests are waiting; come back later", None, "queue_full", wait)
        for job in jobs:
            self.live.add(job)
            job.outcome.add_done_callback(partial(self._over, job))
        return jobs

    def _over(self, job: Job, outcome: asyncio.Future[Finished]) -> None:
        self.live.discard(job)
        self.queue.discard(job)

    @asynccontextmanager
    async def attend(self, jobs: list[Job], receive: Receive, end: float) -> AsyncIterator[None]:
        """Inside, jobs are cancelled as soon as their client leaves, and fail at `end`; at the exit all are over."""
        loop = asyncio.get_running_loop()

        async def departure() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.metrics.cancelled.inc(sum(job.outcome.cancel() for job in jobs))

        def time_out() -> None:
            for job in jobs:
                job.fail(self._late())

        leaving, late = loop.create_task(departure()), loop.call_at(end, time_out)
        try:
            yield
        finally:
            late.cancel()
            leaving.cancel()
            for job in jobs:
                job.outcome.cancel()

    def _late(self) -> ApiError:
        seconds = f"{self.limits.timeout:g} s"
        message = f"this took longer than {seconds}; ask for fewer steps, a smaller n or w, or ask later"
        return ApiError(503, message, code="timeout", retry=False)

    async def answers(self, jobs: list[Job]) -> list[Finished] | None:
        """The answers to all jobs; None when their client has left."""
        try:
            return [await job.outcome for job in jobs]
        except asyncio.CancelledError:
            if any(job.outcome.cancelled() for job in jobs):
                return None
            raise

    async def drain(self) -> None:
        """Take no more requests; those that are here have `limits.grace` seconds, then they are refused."""
        self.draining = True
        self.queue.close()
        if self.live:
            waiting = f"{len(self.live)} prompts have {self.limits.grace:g} s to finish"
            log.warning("stopping: %s; stop again to refuse them at once", waiting)
            await asyncio.wait([job.outcome for job in self.live], timeout=self.limits.grace)
        self.refuse()

    def refuse(self) -> None:
        for job in list(self.live):
            job.fail(stopping())

    async def stop(self) -> None:
        """Refuse all jobs and wait for the worker's thread; a model that is being loaded is left alone."""
        self.draining = True
        self.queue.close()
        self.refuse()
        await asyncio.sleep(0)
        if self.worker is not None and self.worker.model is not None:
            await asyncio.to_thread(self.worker.join, 30)
