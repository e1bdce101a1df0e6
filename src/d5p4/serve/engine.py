"""The server without HTTP: one model, one worker, a bounded lineup, and requests that come and go."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from ..types import Model
from .ask import Ask, understand
from .bodies import SMALL
from .errors import ApiError, not_valid
from .job import Finished, Job
from .limits import Limits
from .lineup import Closed, Full, Lineup
from .metrics import Metrics
from .schema import Asked
from .worker import Worker

log = logging.getLogger("d5p4.serve")
Body = TypeVar("Body", bound=Asked)
STOPPING = "the server is stopping; ask again in a moment"


class Engine:
    """Lives on one event loop, between `start` and `stop`."""

    def __init__(self, load: Callable[[], Model], limits: Limits, fixed: dict[str, Any]) -> None:
        """`fixed`: options of `d5p4.generate` that the server decides for everybody."""
        self.limits, self.fixed = limits, fixed
        self.lineup = Lineup(limits.max_queue)
        self.metrics = Metrics(lambda: len(self.lineup), lambda: self.state == "ready")
        self._load = load
        self.worker: Worker | None = None
        self._live: set[Job] = set()
        self._large_ones = ThreadPoolExecutor(1, "d5p4-large")
        self._speed = 1.0  # seconds a prompt took lately, to tell the refused when to come back
        self.draining = False

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Load the model on the worker's thread; `failed` hears why that could not be done."""
        loop = asyncio.get_running_loop()

        def loaded() -> None:
            if worker.failure is not None:
                log.error("the model could not be loaded: %s", worker.failure)
                loop.call_soon_threadsafe(failed, worker.failure)

        worker = self.worker = Worker(self._load, self.lineup, self.metrics, loaded)
        worker.start()

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
            raise ApiError(503, "the model could not be loaded; the server's log says why", code="failed", again=False)
        raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)

    async def valid(self, kind: type[Body], data: bytes) -> Body:
        """A request's body, checked."""

        def check() -> Body:
            try:
                return kind.model_validate_json(data)
            except ValidationError as error:
                raise not_valid(error) from None

        if len(data) <= SMALL:
            return check()
        return await asyncio.get_running_loop().run_in_executor(self._large_ones, check)

    async def understand(self, body: Asked, size: int, end: float) -> Ask:
        """On another thread, for a long prompt takes a while to encode; bodies of a large size wait for each other, for
        each takes a hundred times its size. At `end` by the loop's clock the request's time is over."""
        loop, lane = asyncio.get_running_loop(), self._large_ones if size > SMALL else None
        call = partial(understand, self.model, body, self.limits, self.fixed)
        try:
            return await asyncio.wait_for(loop.run_in_executor(lane, call), max(0.0, end - loop.time()))
        except asyncio.TimeoutError:
            raise self._late() from None

    def submit(self, ask: Ask) -> list[Job]:
        """A job for each prompt, in the lineup; all of them or an error."""
        jobs = [
            Job(
                prompt=prompt, request=request, key=key, seed=ask.seed, settings=ask.settings, alike=alike,
                streamed=bool(ask.body.stream), history=bool(ask.body.history), stops=ask.body.stops,
            )
            for prompt, request, key, alike in zip(ask.prompts, ask.requests, ask.keys, ask.alike, strict=True)
        ]  # fmt: skip
        try:
            self.lineup.add(jobs)
        except Full:
            self.metrics.refused.inc()
            wait = min(120, max(1, math.ceil(len(self.lineup) * self._speed)))
            raise ApiError(429, "too many requests are waiting; come back later", None, "queue_full", wait) from None
        except Closed:
            raise ApiError(503, STOPPING, code="stopping", retry_after=5) from None
        for job in jobs:
            self._live.add(job)
            job.outcome.add_done_callback(partial(self._over, job))
        return jobs

    def _over(self, job: Job, outcome: asyncio.Future[Finished]) -> None:
        self._live.discard(job)
        self.lineup.discard(job)
        if not outcome.cancelled() and outcome.exception() is None:
            self._speed += 0.1 * ((time.monotonic() - job.asked) / (1 + len(self._live)) - self._speed)

    def give_up(self, jobs: list[Job]) -> int:
        """Nobody wants what is not finished; how many of them that is."""
        return sum(job.outcome.cancel() for job in jobs)

    def lose(self, jobs: list[Job]) -> None:
        """Their client went away."""
        self.metrics.cancelled.inc(self.give_up(jobs))

    def time_out(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.fail(self._late())

    def _late(self) -> ApiError:
        said = f"this took longer than {self.limits.timeout:g} s; ask for fewer steps, a smaller n or w, or later"
        return ApiError(503, said, code="timeout", again=False)

    async def answers(self, jobs: list[Job]) -> list[Finished]:
        return [await job.outcome for job in jobs]

    async def drain(self) -> None:
        """Take no more; what is here has the limit's `grace` to finish, then it is refused."""
        self.draining = True
        self.lineup.close()
        if self._live:
            waiting = f"{len(self._live)} prompts have {self.limits.grace:g} s to finish"
            log.warning("stopping: %s; stop again to refuse them at once", waiting)
            await asyncio.wait([job.outcome for job in self._live], timeout=self.limits.grace)
        self.refuse()

    def refuse(self) -> None:
        for job in list(self._live):
            job.fail(ApiError(503, STOPPING, code="stopping", retry_after=5))

    async def stop(self) -> None:
        """Nobody is served any more, and the worker's thread is over."""
        self.draining = True
        self.lineup.close()
        self.refuse()
        await asyncio.sleep(0)
        self._large_ones.shutdown(wait=False, cancel_futures=True)
        if self.worker is not None and self.worker.model is not None:  # loading cannot be interrupted, nor need it be
            await asyncio.to_thread(self.worker.join, 30)
