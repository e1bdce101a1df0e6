"""The server without HTTP: one model, one worker, a bounded lineup, and requests that come and go."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..types import Model
from .ask import Ask, understand
from .bodies import SMALL
from .errors import ApiError
from .job import Finished, Job
from .limits import Limits
from .lineup import Closed, Full, Lineup
from .metrics import Metrics
from .schema import Asked
from .worker import Worker

STOPPING = "the server is stopping; ask again in a moment"


class Engine:
    """Lives on one event loop, between `start` and `stop`."""

    def __init__(self, load: Callable[[], Model], limits: Limits, fixed: dict[str, Any]) -> None:
        """`fixed`: options of `d5p4.generate` that the server decides for everybody."""
        self.limits, self.fixed = limits, fixed
        self.lineup = Lineup(limits.max_queue)
        self.metrics = Metrics(lambda: len(self.lineup), lambda: self.ready)
        self._load = load
        self._live: set[Job] = set()
        self._large_ones = ThreadPoolExecutor(1, "d5p4-large")
        self._speed = 1.0  # seconds a prompt took lately, to tell the refused when to come back
        self.draining = False

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Load the model on the worker's thread; `failed` hears why that could not be done."""
        loop = asyncio.get_running_loop()

        def loaded() -> None:
            if self.worker.failure is not None:
                loop.call_soon_threadsafe(failed, self.worker.failure)

        self.worker = Worker(self._load, self.lineup, self.metrics, loaded)
        self.worker.start()

    @property
    def ready(self) -> bool:
        return not self.draining and self.worker.model is not None

    @property
    def model(self) -> Model:
        if self.worker.model is None:
            raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)
        return self.worker.model

    async def understand(self, body: Asked, size: int) -> Ask:
        """On another thread, for a long prompt takes a while to encode; bodies of a large size wait for each other, for
        each takes a hundred times its size."""
        lane = self._large_ones if size > SMALL else None
        call = partial(understand, self.model, body, self.limits, self.fixed)
        return await asyncio.get_running_loop().run_in_executor(lane, call)

    def submit(self, ask: Ask) -> list[Job]:
        """A job for each prompt, in the lineup; all of them or an error."""
        jobs = [
            Job(
                prompt=prompt, request=request, key=key, seed=ask.seed, settings=ask.settings, alike=alike,
                streamed=bool(ask.body.stream), history=bool(ask.body.history),
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

    def give_up(self, jobs: list[Job]) -> None:
        """Their client went away, or has all it wanted."""
        for job in jobs:
            if job.outcome.cancel():
                self.metrics.cancelled.inc()

    def time_out(self, jobs: list[Job]) -> None:
        said = f"this took longer than {self.limits.timeout:g} s; ask for fewer steps, a smaller n or w, or later"
        for job in jobs:
            job.fail(ApiError(503, said, code="timeout", again=False))

    async def answers(self, jobs: list[Job]) -> list[Finished]:
        return [await job.outcome for job in jobs]

    async def drain(self) -> None:
        """Take no more; what is here has the limit's `grace` to finish, then it is refused."""
        self.draining = True
        self.lineup.close()
        if self._live:
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
        loading = self.worker.model is None  # which cannot be interrupted, and leaves nothing behind
        await asyncio.to_thread(self.worker.join, 0 if loading else 30)
