"""Waiting for answers while the client may leave and time may run out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from .engine import Engine
from .job import Job


async def departure(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def left(jobs: list[Job]) -> bool:
    """Whether jobs were given up because their client went away."""
    return any(job.outcome.cancelled() for job in jobs)


@asynccontextmanager
async def attended(engine: Engine, jobs: list[Job], receive: Receive, end: float) -> AsyncIterator[None]:
    """Inside, jobs are given up as soon as their client leaves, and fail at `end` by the loop's clock; after it, what
    is left of them is given up."""
    loop = asyncio.get_running_loop()
    leaving = loop.create_task(departure(receive))
    leaving.add_done_callback(lambda task: None if task.cancelled() else engine.lose(jobs))
    late = loop.call_at(end, engine.time_out, jobs)
    try:
        yield
    finally:
        late.cancel()
        leaving.cancel()
        engine.give_up(jobs)
