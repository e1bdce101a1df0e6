"""uvicorn around the app: binds, says where it is, and leaves nobody without an answer when it stops."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..errors import D5P4Error
from ..types import Model
from .app import create_app
from .connection import patient
from .engine import Engine
from .limits import Limits

BACKLOG = 2048


class Server(uvicorn.Server):
    """A server that drains: requests that are here finish or are refused, new ones are refused with 503."""

    def __init__(self, app: FastAPI, limits: Limits) -> None:
        config = uvicorn.Config(
            app, http=patient(limits.client_timeout), ws="none", lifespan="on", log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=math.ceil(limits.client_timeout),
            timeout_graceful_shutdown=math.ceil(limits.client_timeout) + 5,
        )  # fmt: skip
        super().__init__(config)
        self.engine: Engine = app.state.engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The door stays open until those inside are served: who comes now is told to come back, not cut off. A second
        Ctrl-C refuses all of them at once."""
        drained = asyncio.ensure_future(self.engine.drain())
        while not drained.done() and not self.force_exit:
            await asyncio.wait([drained], timeout=0.1)
        if drained.cancel():
            self.force_exit = False  # which would leave no time to say so
            self.engine.refuse()
        await super().shutdown(sockets)


def serve(
    model: Model | Callable[[], Model],
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
    log_prompts: bool = False,
    started: Callable[[str], None] | None = None,
    **fixed: Any,
) -> None:
    """Serve a model until SIGINT or SIGTERM. `started` hears the address; the rest is as for `create_app`.

    hosts: names the server may be called by beside its own. At a loopback address there are no others, so that no page
    of another site gets here by a name it controls; elsewhere any name will do unless some are given.
    """
    limits = limits or Limits()
    failure: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failure.append(error)
        server.should_exit = True

    known = names(host, hosts or ())
    app = create_app(
        model, name=name, limits=limits, api_key=api_key, hosts=known, log_prompts=log_prompts, failed=failed, **fixed
    )
    server = Server(app, limits)
    _allow_connections()
    bound = bind(host, port)
    if started is not None:
        started(address(bound))
    with bound:
        server.run(sockets=[bound])
    if failure:
        error = failure[0]
        raise error if isinstance(error, D5P4Error) else D5P4Error(f"the model could not be loaded: {error}")


def names(host: str, others: Sequence[str]) -> list[str] | None:
    """What requests may call the server; None: anything."""
    return [host, "localhost", "127.0.0.1", "::1", *others] if others or loopback(host) else None


def loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as reason:
        said = getattr(reason, "strerror", None) or reason
        raise D5P4Error(f"cannot listen at {host} port {port}: {said}; give another --host or --port") from None
    # Connections inherit it; asyncio asks for it only where it made the socket itself. Without it each answer waits
    # 40 ms for the client to acknowledge its head.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _allow_connections() -> None:
    """As many open connections as the system lets this process have."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS says there is no limit, and then does not grant it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # every address of this machine; this is one
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_to_stderr(level: int = logging.INFO) -> None:
    """A line a request: its route, status and time. Never what was asked or answered."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("d5p4.serve").setLevel(level)
