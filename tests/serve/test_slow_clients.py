"""Clients that are slow on purpose are waited for only so long, and nobody else has to wait for them."""

import resource
import socket
import threading
import time

import pytest

from tests.fake import FakeModel
from tests.serve.running import request, response, running, until

GOOD = {"prompt": "abc", "max_tokens": 6, "seed": 1, "n": 2}
BODY = request(GOOD)
MIDDLE = len(BODY) - 10
LARGE = {"prompt": ["a", "b", "c", "d"], "n": 8, "w": 8, "max_tokens": 30, "history": True}  # megabytes come back


def connections(server):
    return len(server.server.server_state.connections)


@pytest.mark.parametrize(("sent", "status"), [(b"", None), (BODY[:20], None), (BODY[:MIDDLE], 408)])
def test_a_request_that_never_ends(sent, status):
    """Nothing at all, half a head, half a body."""
    with running(FakeModel(), limits={"client_timeout": 0.3}) as server, server.connect() as wire:
        start = time.monotonic()
        wire.sendall(sent)
        said = wire.recv(1000)
        assert (said.split()[1:2] == [b"408"]) == (status == 408) and 0.2 < time.monotonic() - start < 3
        until(lambda: connections(server) == 0)  # nor is one kept that has nothing to say
    assert not server.server.server_state.tasks


def test_a_slow_second_request_on_a_wire():
    with running(FakeModel(), limits={"client_timeout": 0.3}) as server, server.connect() as wire:
        wire.sendall(BODY)
        assert response(wire)[0] == 200
        time.sleep(0.2)
        wire.sendall(BODY[:30])
        wire.settimeout(3)
        assert wire.recv(100) == b""


def test_drops_of_a_body_do_not_buy_time():
    """The whole body has to be there in time, not each piece of it."""
    with running(FakeModel(), limits={"client_timeout": 0.5}) as server, server.connect() as wire:
        wire.sendall(BODY[:MIDDLE])
        start = time.monotonic()
        for byte in BODY[MIDDLE : MIDDLE + 5]:
            wire.sendall(bytes([byte]))
            time.sleep(0.15)
        assert wire.recv(1000).split()[1] == b"408" and time.monotonic() - start < 3


def many(server, count):
    """So many slow clients: some send nothing, some half a head, some half a body, some do not read a stream."""
    wires = []
    for number in range(count):
        wire = server.connect()
        stream = request(GOOD | {"stream": True, "history": True, "seed": number})
        wire.sendall((b"", BODY[: 10 + number % 50], BODY[:MIDDLE], stream)[number % 4])
        wires.append(wire)
    return wires


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_many_slow_clients_keep_nobody_waiting(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    with running(FakeModel(), limits={"client_timeout": 1 + count / 200, "max_queue": 4096}) as server:
        expected = server.post(**GOOD).json()["choices"]
        threads = threading.active_count()
        wires = many(server, count)
        until(lambda: connections(server) >= count)
        waits = []
        for _ in range(10):
            start = time.monotonic()
            found = server.post(**GOOD)
            waits.append(time.monotonic() - start)
            assert found.status_code == 200 and found.json()["choices"] == expected
        assert sorted(waits)[5] < 1.0, waits
        for wire in wires[3::4]:
            wire.close()  # these were answered; nobody waits for them to read so little
        until(lambda: connections(server) <= 1, 30)
        until(lambda: not server.engine._live and not server.server.server_state.tasks)
        assert threading.active_count() <= threads + 8  # the pools of to_thread and of the page, at most
        assert server.post(**GOOD).json()["choices"] == expected
        for wire in wires:
            wire.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_does_not_read_is_cut_off():
    """A response of many megabytes, and a client with a small buffer that never reads."""
    with running(FakeModel(), limits={"client_timeout": 0.5}) as server:
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", server.port))
        wire.sendall(request(LARGE | {"stream": True}))
        until(lambda: server.metric("d5p4_answers_total") == 32, 60)
        assert connections(server) == 2
        until(lambda: connections(server) == 0 and not server.server.server_state.tasks, 10)
        assert server.post(**GOOD).status_code == 200
        wire.close()


def test_who_reads_slowly_but_steadily_gets_it_all():
    """However long it takes: what counts is that something was read in the last while."""
    with running(FakeModel(), limits={"client_timeout": 0.4}) as server:
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        wire.connect(("127.0.0.1", server.port))
        start = time.monotonic()
        wire.sendall(request(LARGE))
        data = wire.recv(65536)
        length = int(data.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        head = data.index(b"\r\n\r\n") + 4
        got = len(data) - head
        while got < length and (more := wire.recv(1 << 17)):
            got += len(more)
            time.sleep(0.03)
        assert got == length > 2_000_000 and time.monotonic() - start > 0.8
        wire.close()


def test_large_bodies_have_room_for_so_many(monkeypatch):
    """What is on its way in is bounded; a small request always has room."""
    monkeypatch.setattr("d5p4.serve.bodies.LARGE_ONES", 3)
    with running(FakeModel(), limits={"client_timeout": 10.0, "max_body": 200_000}) as server:
        large = request(b" " * 190_000)
        wires = [server.connect() for _ in range(6)]
        for wire in wires:
            wire.sendall(large[:-1])
        time.sleep(0.2)
        found = server.raw(b" " * 190_000)
        assert found.status_code == 429 and int(found.headers["retry-after"]) > 0
        assert server.post(**GOOD).status_code == 200
        for wire in wires:
            wire.close()
        until(lambda: connections(server) <= 1)
        assert server.raw(b" " * 190_000).status_code == 400
