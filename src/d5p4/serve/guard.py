"""What stands before the routes: who may come in, how much they may send and how long that may take; and what is
written down about it."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .bodies import Bodies
from .errors import ApiError, where
from .limits import Limits
from .metrics import Metrics

log = logging.getLogger("d5p4.serve")

OPEN = ("/healthz", "/readyz", "/", "/favicon.ico")
"""Paths that need no key; so do the page's files under /page/."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Those that are written down; any other word is a client's own."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, api_key: str | None, hosts: Sequence[str] | None
    ) -> None:
        self.app, self.bodies, self.metrics = app, Bodies(limits), metrics
        self.key = None if api_key is None else _digest(api_key.strip().encode())
        self.hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, begun = time.monotonic(), 500, False

        async def answer(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                message["headers"] = [*message["headers"], *_headers(scope["path"])]
            await send(message)

        try:
            self._check(scope)
            async with self.bodies.bounded(scope, receive) as bounded:
                await self.app(scope, bounded, answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Exception as error:
            log.error("a request failed: %s", where(error))
            if not begun:
                said = "something went wrong here; the server's log says where"
                await ApiError(500, said).response()(scope, receive, answer)
        finally:
            self._note(scope, status, time.monotonic() - start)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = _host(headers.get(b"host", b""))
        if self.hosts is not None and host not in self.hosts:
            raise ApiError(403, f"this server is not known as {host!r}; start it with --allowed-host {host}")
        if self.key is not None and not (scope["path"] in OPEN or scope["path"].startswith("/page/")):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(_digest(given.strip()), self.key):
                raise ApiError(401, "give the server's key as a bearer token", code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":  # which a page of another site cannot send without asking
                raise ApiError(415, "the body must be JSON, with content-type application/json")

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        method = scope["method"] if scope["method"] in METHODS else "other"
        log.info("%s %s %d %.0f ms", method, route, status, 1000 * seconds)


def _digest(key: bytes) -> bytes:
    """Of one length whatever was given, so that comparing takes as long."""
    return hashlib.sha256(key).digest()


def _host(header: bytes) -> str:
    """The name in a Host header, without the port."""
    name = header.decode("latin-1").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _headers(path: str) -> list[tuple[bytes, bytes]]:
    found = [(b"x-content-type-options", b"nosniff")]
    if path == "/" or path.startswith("/page/"):
        found += [(b"content-security-policy", PAGE_POLICY.encode()), (b"referrer-policy", b"no-referrer")]
    return found
