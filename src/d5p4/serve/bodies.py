"""Bodies of requests on their way in: neither too large, nor too slow, nor too many large ones at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive, Scope

from .errors import ApiError
from .limits import Limits

SWALLOWED = 8 << 20  # bytes of a body that is too large which are read before the answer, so that it arrives
SMALL = 1 << 16  # bytes; a body of up to so many always has room
LARGE_ONES = 64  # bodies of the largest size that there is room for at a time


class Bodies:
    """All bodies of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0  # bytes of those that are here

    @asynccontextmanager
    async def bounded(self, scope: Scope, receive: Receive) -> AsyncIterator[Receive]:
        """`receive` that gives up on bodies it should not wait for; what they hold is given back at the end."""
        most, end = self.limits.max_body, time.monotonic() + self.limits.client_timeout
        headers = dict(scope["headers"])
        told = headers.get(b"content-length", b"")
        too_large = ApiError(413, f"the body is larger than {most} bytes")
        got, whole = 0, False

        async def more() -> Message:
            nonlocal got, whole
            message = await self._soon(receive, end)
            size = len(message.get("body", b""))
            whole = not message.get("more_body", False)
            got += size
            self.held += size
            return message

        async def bounded() -> Message:
            if whole:
                return await receive()
            if told.isdigit() and int(told[:20]) > most and b"expect" in headers:
                raise too_large  # the client has not begun to send
            message = await more()
            if got > most:
                while not whole and got < SWALLOWED + most:
                    await more()
                raise too_large
            if got > SMALL and self.held > LARGE_ONES * most:
                raise ApiError(429, "too many large requests are here; come back later", None, "queue_full", 5)
            return message

        try:
            yield bounded
        finally:
            self.held -= got

    async def _soon(self, receive: Receive, end: float) -> Message:
        try:
            return await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError:
            said = f"the body did not arrive within {self.limits.client_timeout:g} s"
            raise ApiError(408, said, again=False) from None
