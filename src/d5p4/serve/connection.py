"""uvicorn's connection, which also gives up on clients that keep it waiting.

uvicorn itself waits for ever for the head of a request, and for a client to read.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

KERNEL_HOLDS = 1 << 18
"""Bytes on their way to a client that the system keeps: little, so that what we keep tells whether it reads."""


def patient(seconds: float) -> type[H11Protocol]:
    """A protocol for `uvicorn.Config(http=...)`: a request's head must arrive, and what was sent be read, in time."""

    class Connection(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_HOLDS)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._unread):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            self._expect_head()
            super().on_response_complete()

        def _expect_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
            if self.transport.is_closing():
                return
            self._head = self.loop.call_later(seconds, self._close_silent)

        def _close_silent(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader(None)

        def _watch_reader(self, before: int | None) -> None:
            """Every so often something of what is to be sent must have been read."""
            left = self.transport.get_write_buffer_size()
            if before is not None and left >= before:
                self.transport.abort()
            else:
                self._unread = self.loop.call_later(seconds, self._watch_reader, left)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

    return Connection
