"""uvicorn around the app: it binds, reports its address, and answers everybody when it stops."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..errors import D5P4Error
from ..types import Model
from .app import create_app
from .engine import Engine

SECONDS_TO_READ = 5  # that clients have to read their answers when the server stops


class Server(uvicorn.Server):
    """A server that drains: requests that are here finish or are refused, new ones are refused with 503."""

    def __init__(self, app: FastAPI) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        config = uvicorn.Config(app, ws="none", lifespan="on", timeout_graceful_shutdown=SECONDS_TO_READ, **quiet)
        super().__init__(config)
        self.engine: Engine = app.state.engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stay open until the requests that are here are answered. A second Ctrl-C refuses them at once."""
        drained = asyncio.ensure_future(self.engine.drain())
        while not drained.done() and not self.force_exit:
            await asyncio.wait([drained], timeout=0.1)
        if drained.cancel():
            self.force_exit = False  # it would leave no time for the answer
            self.engine.refuse()
        await super().shutdown(sockets)


def serve(
    model: Model | Callable[[], Model],
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    hosts: Sequence[str] = (),
    started: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve a model until SIGINT or SIGTERM. `started` is called with the address; `options` are those of `create_app`.

    hosts: names that requests may call the server by, beside its own. At a loopback address there are no others, so
    that no page of another site gets here by a name it controls; elsewhere any name will do unless some are given.
    """
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(model, name=name, hosts=allowed_names(host, hosts), failed=failed, **options)
    server = Server(app)
    bound = bind(host, port)
    if started is not None:
        started(address(bound))
    with bound:
        server.run(sockets=[bound])
    if failures:
        error = failures[0]
        raise error if isinstance(error, D5P4Error) else D5P4Error(f"the model could not be loaded: {error}")


def allowed_names(host: str, others: Sequence[str]) -> list[str] | None:
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
        bound = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise D5P4Error(f"cannot listen at {host} port {port}: {reason}; give another --host or --port") from None
    # Connections inherit it; asyncio sets it only on sockets it made itself. Without it each answer waits 40 ms for the
    # client to acknowledge its head.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # every address of this machine; this is one
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_to_stderr(level: int = logging.INFO) -> None:
    """One line per request: its route, status and time. Never what was asked or answered."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("d5p4.serve").setLevel(level)
