"""A server that really listens, in a thread of the test's own process, and models that a server has to cope with."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from d5p4.serve import Limits, create_app
from d5p4.serve.server import Server, bind
from d5p4.types import Hidden
from tests.fake import FakeModel

NAME = "fake"


def direct(**options: Any) -> httpx.Client:
    """A client that asks no proxy and, there being nothing to trust, reads no certificates."""
    return httpx.Client(**{"timeout": 60.0, "trust_env": False, "verify": False} | options)


class Gated(FakeModel):
    """Forwards wait until the gate is open, or for a turn. `calls` are the rows of those that passed, `shapes` rows and
    columns."""

    def __init__(self, open: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        if open:
            self.gate.set()
        self.turns = threading.Semaphore(0)
        self.entered = threading.Event()
        self.calls: list[int] = []
        self.shapes: list[tuple[int, int]] = []

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        self.entered.set()
        until(lambda: self.gate.is_set() or self.turns.acquire(blocking=False))
        self.calls.append(len(tokens))
        self.shapes.append((tokens.shape[0], tokens.shape[1]))
        return super().body(tokens, attention_mask)


class Faulty(FakeModel):
    """Goes wrong for prompts that begin with a letter of `faults`: {"x": "raise"}, "nan" or "memory" (once)."""

    def __init__(self, faults: dict[str, str], vocabulary: int = 30, **options: Any) -> None:
        super().__init__(vocabulary=vocabulary, **options)
        self.faults = {ord(letter) - 97: fault for letter, fault in faults.items()}

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        hidden = super().body(tokens, attention_mask)
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        first = tokens.gather(1, real.long().argmax(1, keepdim=True))[:, 0]
        for token, fault in list(self.faults.items()):
            rows = first == token
            if not rows.any():
                continue
            if fault == "raise":
                raise RuntimeError("the model is broken by " + self.tokenizer.decode(tokens[rows][0].tolist()))
            if fault == "memory":
                del self.faults[token]
                raise torch.OutOfMemoryError("there is none")
            hidden.states[rows] = torch.nan
        return hidden


class Running:
    def __init__(self, model: Any, *, name: str = NAME, limits: dict[str, Any] | None = None, **options: Any) -> None:
        self.model, self.name = model, name
        self.limits = Limits(**{"grace": 2.0} | (limits or {}))
        self.app = create_app(model, name=name, limits=self.limits, **options)
        self.engine = self.app.state.engine
        self.bound = bind("127.0.0.1", 0)
        self.port = self.bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.app)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.bound]}, daemon=True)
        self.http = direct(base_url=self.url)

    def client(self, **options: Any) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60.0}
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=direct(), **given | options)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def raw(self, body: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
        return self.http.post(path, content=body, headers={"content-type": "application/json"} | headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        text = self.http.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.http.close()


@contextmanager
def running(model: Any, **options: Any) -> Iterator[Running]:
    """A server. While the forward of a gated model waits, so do all requests that come."""
    gate = getattr(model, "gate", None)
    server = Running(model, **options)
    server.thread.start()
    if hasattr(model, "body"):  # the test of a loader looks at that itself
        until(lambda: server.http.get("/readyz").status_code == 200)
    try:
        yield server
    finally:
        if gate is not None:
            gate.set()
        server.stop()


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until it is; what it then is. The seconds only end a test that hangs."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
    return value


def request(body: bytes | dict[str, Any], path: str = "/v1/completions", method: str = "POST", **headers: str) -> bytes:
    """An HTTP request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))} | headers
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value != "")]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def response(wire: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next response on a wire that is kept open."""
    data, length = b"", None
    while length is None or len(data) < length:
        more = wire.recv(65536)
        assert more, f"the server hung up after {data[:200]!r}"
        data += more
        head, end, _ = data.partition(b"\r\n\r\n")
        if end:
            length = len(head + end) + int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(data.split()[1]), data.partition(b"\r\n\r\n")[2]


def rest(wire: socket.socket) -> bytes:
    """Everything until the server closes the wire."""
    data = b""
    while more := wire.recv(65536):
        data += more
    return data


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls in threads at the same time; what each gave, or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]
