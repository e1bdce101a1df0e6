"""Runs the app with uvicorn: binds a socket, reports its address, and answers all waiting clients before it stops."""

import asyncio
import gc
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from ..errors import D5P4Error
from ..types import Model
from .app import create_app
from .engine import Engine

SECONDS_TO_READ = 5  # time that clients have to read their answers when the server stops
SECONDS_TO_SEND = 20.0  # time that clients have to send a request
MOST_CONNECTIONS = 1000  # further requests get status 503; uvicorn's own limit


class Server(uvicorn.Server):
    """A server that, while it stops, finishes or refuses the accepted requests and answers new requests with 503."""

    def __init__(self, app: FastAPI) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        quiet["limit_concurrency"] = MOST_CONNECTIONS
        config = uvicorn.Config(app, ws="none", lifespan="on", timeout_graceful_shutdown=SECONDS_TO_READ, **quiet)
        super().__init__(config)
        self.engine: Engine = app.state.engine
        self.sending: dict[Any, float] = {}  # the connections that are sending a request, and since when

    async def on_tick(self, counter: int) -> bool:
        """Close connections that take too long to send a request, for which uvicorn has no limit."""
        sending, now = {}, time.monotonic()
        for connection in self.server_state.connections:
            cycle: Any = getattr(connection, "cycle", None)  # the request whose head was sent last
            if cycle is None or cycle.response_complete or cycle.more_body:
                sending[connection, cycle] = self.sending.get((connection, cycle), now)
        self.sending = sending
        for (connection, _), since in sending.items():
            if now - since > SECONDS_TO_SEND:
                connection.transport.close()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # at the second signal, whichever it is
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stay open until all accepted requests are answered. A second signal refuses them at once."""
        drained = asyncio.ensure_future(self.engine.drain())
        while not drained.done() and not self.force_exit:
            await asyncio.wait([drained], timeout=0.1)
        if drained.cancel():
            self.force_exit = False  # if True, uvicorn would not wait until the refusals are sent
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

    hosts: further host names that requests may use. At a loopback address only the server's own names and `hosts` are
    accepted, so that no web page can point its own host name at the server. At other addresses any name is accepted if
    `hosts` is empty.
    """
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    def load() -> Model:
        loaded = cast(Any, model)
        served: Model = loaded if hasattr(loaded, "body") else loaded()
        gc.freeze()  # what is here stays, and reading a large body must not make the collector look at it again
        return served

    app = create_app(load, name=name, hosts=allowed_names(host, hosts), failed=failed, **options)
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
    """Return the host names that requests may use, or None for any name."""
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
    # Connections inherit this option. Without it, each body waits 40 ms until the client has acknowledged the head.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # a browser cannot open "all addresses"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
