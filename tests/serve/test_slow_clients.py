"""Clients that are slow on purpose are waited for only so long, and nobody else has to wait for them."""

import resource
import select
import socket
import threading
from types import SimpleNamespace

import pytest

from d5p4.serve.bodies import Bodies
from d5p4.serve.connection import patient
from tests.fake import FakeModel
from tests.serve.running import request, response, running, until

GOOD = {"prompt": "abc", "max_tokens": 6, "seed": 1, "n": 2}
BODY = request(GOOD)
MIDDLE = len(BODY) - 10


def connections(server):
    return len(server.server.server_state.connections)


def test_a_request_that_never_ends():
    """Nothing at all, half a head, half a second head; and a body in drops, which buy no time."""
    with running(FakeModel(), limits={"client_timeout": 2.0}) as server:
        second = server.connect()
        second.sendall(BODY)
        assert response(second)[0] == 200
        second.sendall(BODY[:30])
        drops = server.connect()
        drops.sendall(request(b"{", **{"content-length": "10000"}))
        head, silent = server.connect(), server.connect()
        head.sendall(BODY[:20])
        for _ in range(1200):  # a minute of drops, should the server never have enough of them
            if select.select([drops], [], [], 0.05)[0]:
                break
            drops.sendall(b" ")
        assert drops.recv(1000).split()[1] == b"408"
        for wire in (silent, head, second):
            assert wire.recv(1000) == b""
        for wire in (silent, head, second, drops):
            wire.close()
        until(lambda: connections(server) == 0 and not server.server.server_state.tasks)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_many_slow_clients_keep_nobody_waiting(count):
    """Some send nothing, some half a head, some half a body, some do not read a stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    with running(FakeModel(), limits={"client_timeout": 100.0, "max_queue": 4096}) as server:
        expected = server.post(**GOOD).json()["choices"]
        threads = threading.active_count()
        wires = [server.connect() for _ in range(count)]
        for number, wire in enumerate(wires):
            stream = request(GOOD | {"stream": True, "history": True, "seed": number})
            wire.sendall((b"", BODY[: 10 + number % 50], BODY[:MIDDLE], stream)[number % 4])
        until(lambda: connections(server) >= count)
        assert server.post(**GOOD).json()["choices"] == expected
        assert connections(server) > count // 2  # who sends or reads too little is still waited for
        for wire in wires:
            wire.close()
        until(lambda: connections(server) <= 1 and not server.engine._live and not server.server.server_state.tasks)
        assert threading.active_count() <= threads + 8  # the pools of to_thread and of the page, at most
        assert server.post(**GOOD).json()["choices"] == expected
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_does_not_read_is_cut_off():
    """Megabytes are asked for by a client with a small buffer that never reads."""
    with running(FakeModel(), limits={"client_timeout": 0.3}) as server, socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", server.port))
        wire.sendall(request(b"", "/openapi.json", "GET") * 200)
        until(lambda: connections(server) == 0 and not server.server.server_state.tasks)


def test_who_reads_slowly_but_steadily_is_not():
    """However long it takes: what counts is that something was read in the last while."""
    timers, aborted, left = [], [], [100, 80, 79, 79]
    connection = object.__new__(patient(5.0))
    connection.loop = SimpleNamespace(call_later=lambda seconds, call, given: timers.append((seconds, call, given)))
    connection.transport = SimpleNamespace(
        get_write_buffer_size=lambda: left.pop(0), abort=lambda: aborted.append(len(left))
    )
    connection._watch_reader(None)
    while timers:
        assert aborted == []
        seconds, call, given = timers.pop()
        assert seconds == 5.0
        call(given)
    assert aborted == [0]  # when nothing more was read


def test_large_bodies_have_room_for_so_many(monkeypatch):
    """What is on its way in is bounded; a small request always has room."""
    monkeypatch.setattr("d5p4.serve.bodies.LARGE_ONES", 3)
    made, make = [], Bodies.__init__
    monkeypatch.setattr(Bodies, "__init__", lambda self, limits: made.append(self) or make(self, limits))
    with running(FakeModel(), limits={"client_timeout": 100.0, "max_body": 200_000}) as server:
        wires = [server.connect() for _ in range(3)]
        for wire in wires:
            wire.sendall(request(b" " * 190_000)[:-1])
        (bodies,) = made
        until(lambda: bodies.held == 3 * 189_999)
        found = server.raw(b" " * 190_000)
        assert found.status_code == 429 and int(found.headers["retry-after"]) > 0
        assert server.post(**GOOD).status_code == 200
        for wire in wires:
            wire.close()
        until(lambda: bodies.held == 0)
        assert server.raw(b" " * 190_000).status_code == 400
