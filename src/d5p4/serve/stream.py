"""Server-sent events: drafts of the answers while they are denoised, then the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..store import json_bytes
from .engine import Engine
from .errors import ApiError
from .job import Finished, Job
from .respond import Reply
from .wait import attended, left

STILL_HERE = 10.0  # seconds of silence after which proxies are told that we live
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """The response of a streamed request."""

    def __init__(self, engine: Engine, jobs: list[Job], reply: Reply, end: float) -> None:
        """`end`: when the request's time is over, by the loop's clock."""
        super().__init__(None, headers=HEADERS)
        del self.headers["content-length"]
        self.engine, self.jobs, self.reply, self.end = engine, jobs, reply, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with attended(self.engine, self.jobs, receive, self.end):
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self.reply.opening():
            yield event(json_bytes(chunk))
        try:
            async for number, draft in self._drafts():
                yield b": still here\n\n" if draft is None else event(json_bytes(self.reply.draft(number, draft)))
            finished = await self.engine.answers(self.jobs)
        except ApiError as error:
            yield event(json_bytes(error.body()))
            return
        except asyncio.CancelledError:
            if not left(self.jobs):
                raise
            return
        for data in await asyncio.to_thread(self._end, finished):
            yield event(data)
        yield event(b"[DONE]")

    def _end(self, finished: list[Finished]) -> list[bytes]:
        return [self.reply.encoded(chunk, finished) for chunk in self.reply.chunks(finished)]

    async def _drafts(self) -> AsyncIterator[tuple[int, dict[str, Any] | None]]:
        """(prompt, its newest draft), or a draft of None after a long silence, until all prompts are finished."""
        while not all(job.outcome.done() for job in self.jobs):
            tasks = [asyncio.ensure_future(job.news.wait()) for job in self.jobs if not job.outcome.done()]
            try:
                done, _ = await asyncio.wait(tasks, timeout=STILL_HERE, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            if not done:
                yield 0, None
            for number, job in enumerate(self.jobs):
                if job.outcome.done():
                    continue
                job.news.clear()
                draft, job.draft = job.draft, None
                if draft is not None:
                    yield number, draft


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
