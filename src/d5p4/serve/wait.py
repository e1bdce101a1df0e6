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


@asynccontextmanager
async def attended(engine: Engine, jobs: list[Job], receive: Receive) -> AsyncIterator[None]:
    """Inside, jobs are given up as soon as their client leaves and fail when their time is over; after it, whatever
    is left of them is given up."""
    loop = asyncio.get_running_loop()
    leaving = loop.create_task(departure(receive))
    leaving.add_done_callback(lambda task: None if task.cancelled() else engine.give_up(jobs))
    late = loop.call_at(loop.time() + engine.limits.timeout, engine.time_out, jobs)
    try:
        yield
    finally:
        late.cancel()
        leaving.cancel()
        engine.give_up(jobs)
