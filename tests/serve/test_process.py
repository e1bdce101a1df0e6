"""The real command: its log, its memory, and how it ends (test_guard.py has the other ways to stop a server)."""

import json
import os
import signal
import socket
from contextlib import ExitStack

import pytest

from tests.checkpoints import write_llada
from tests.serve.process import process
from tests.serve.running import direct, request, response, until

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint."""
    return write_llada(tmp_path_factory.mktemp("models") / "tiny", max_sequence_length=512)


@pytest.fixture(scope="module")
def commands(folder):
    """A function that returns the running command, and starts another if a test has ended the last."""
    with ExitStack() as stack:
        started = []

        def running():
            if not started or started[-1].run.poll() is not None:
                started.append(stack.enter_context(process("--model", folder, "--port", 0, "--grace", 60)))
                started[-1].ready()
            return started[-1]

        yield running


@pytest.fixture
def command(commands):
    return commands()


def port_of(command):
    return int(command.url.rpartition(":")[2])


def test_it_listens_at_loopback_and_names_the_model_after_its_folder(command):
    assert command.url.startswith("http://127.0.0.1:")
    entry = command.client().get("/v1/models").json()["data"][0]
    assert entry["id"] == "tiny" and str(os.sep) not in entry["d5p4"]["name"]
    with socket.socket() as other:  # no other address is open
        assert other.connect_ex(("127.0.0.2", port_of(command))) != 0
    assert command.client(headers={"host": "evil.example"}).get("/").status_code == 403


def test_no_text_of_a_client_is_in_the_log(command):
    mark = "marked7words"
    client = command.client()
    good = {"prompt": mark, "max_tokens": 3}
    assert client.post("/v1/completions", json=good).status_code == 200
    assert client.post("/v1/completions", json=good | {"stream": True}).status_code == 200
    talk = {"messages": [{"role": "user", "content": mark}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=talk).status_code == 200
    for bad in (
        {"prompt": mark * 100},
        good | {"method": mark},
        good | {mark: 1},
        good | {"model": mark},
        good | {"stop": ""},
        {"prompt": [mark, 1]},
        good | {"user": 5, "temperature": mark},
    ):
        assert client.post("/v1/completions", json=bad).status_code in (400, 404)
    client.post("/v1/completions", content=f'{{"prompt": "{mark}', headers={"content-type": "application/json"})
    client.post("/v1/completions", content=mark, headers={"content-type": f"text/{mark}"})
    client.get(f"/{mark}?{mark}", headers={"x-mark": mark, "user-agent": mark, "authorization": f"Bearer {mark}"})
    client.request(mark.upper(), "/")
    client.get("/healthz", headers={"host": mark})
    with socket.create_connection(("127.0.0.1", port_of(command))) as wire:
        wire.sendall(f"{mark} {mark}\r\n\r\n".encode())
        wire.recv(1000)
    client.put("/healthz")
    until(lambda: "PUT /healthz 405" in command.stderr)  # the last of all
    assert "POST /v1/completions 200" in command.stderr and "POST other 415" in command.stderr
    assert mark not in command.stderr.lower() and "Traceback" not in command.stderr


@pytest.mark.full
@LINUX
def test_memory_and_threads_stay_what_they_are(command):
    """Rounds of everything that costs: large bodies, histories, streams that are left, errors."""
    client = command.client()
    rounds, port = 40, port_of(command)
    history = {"prompt": "abc", "n": 4, "max_tokens": 16, "history": True, "seed": 1}
    big = json.dumps({"prompt": "a" * 500_000}).encode()

    def round_of_it():
        client.post("/v1/completions", content=big, headers={"content-type": "application/json"})
        client.post("/v1/completions", json={"prompt": [[]] * 100_000})
        for number in range(20):
            wire = socket.create_connection(("127.0.0.1", port))
            wire.sendall(request(history | {"stream": True, "seed": number}))
            wire.close()
        expected = client.post("/v1/completions", json=history).json()["choices"]
        return [choice["text"] for choice in expected]

    first = [round_of_it() for _ in range(3)][0]  # by now every thread has worked
    memory, threads = command.memory(), command.threads()
    for _ in range(rounds):
        assert round_of_it() == first
    grown = command.memory() - memory
    print(f"memory {memory} MB, after {rounds} more rounds {grown:+} MB; {threads} threads")
    assert grown < 40
    assert command.threads() <= threads + 2
    for state in ("running", "waiting"):
        until(lambda state=state: f"d5p4_{state}_prompts 0.0" in client.get("/metrics").text)


LONG = {"prompt": "abc", "method": "d5p4", "n": 4, "w": 8, "max_tokens": 200, "seed": 1}


def test_a_signal_lets_what_is_here_finish(command):
    """What runs is answered to its end; then the process ends."""
    with socket.create_connection(("127.0.0.1", port_of(command)), timeout=60) as wire:
        wire.sendall(request(LONG | {"n": 1, "w": 1, "max_tokens": 100, "stream": True}))
        output = wire.recv(1000)
        assert b"200 OK" in output
        command.run.send_signal(signal.SIGTERM)
        while more := wire.recv(65536):
            output += more
    assert b"data: [DONE]" in output
    assert command.end() in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert "Traceback" not in command.stderr


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_refuses_at_once(command, stop):
    client = command.client()
    with socket.create_connection(("127.0.0.1", port_of(command))) as runs:
        runs.sendall(request(LONG | {"w": 32}))
        until(lambda: "d5p4_running_prompts 1.0" in client.get("/metrics").text)
        command.run.send_signal(stop)
        until(lambda: client.get("/readyz").status_code == 503)
        command.run.send_signal(stop)
        assert response(runs)[0] == 503
        assert command.end() in (128 + stop, -stop)
    assert "Traceback" not in command.stderr


@pytest.mark.full
def test_a_signal_while_the_model_is_being_loaded(tmp_path):
    """Loading cannot be interrupted, but nobody has to wait for it."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import time\nfrom d5p4.serve import serve\n"
        "serve(lambda: time.sleep(3600), name='slow', port=0, started=lambda url: print(url, flush=True))\n"
    )
    with process(command=(script,)) as server:
        url = until(server.run.stdout.readline).strip()
        assert direct().get(f"{url}/readyz").json() == {"status": "loading"}
        server.run.send_signal(signal.SIGTERM)
        assert server.end() in (0, -signal.SIGTERM) and "Traceback" not in server.stderr


@pytest.mark.full
def test_a_large_body_does_not_make_the_collector_look_at_the_whole_program(tmp_path):
    """Otherwise the lists in a body of 1 MiB block the event loop while the collector looks at all that is here."""
    script = tmp_path / "frozen.py"
    script.write_text(
        "import gc, threading, time, d5p4\nfrom d5p4.serve import serve\n"
        "def look():\n    while not gc.get_freeze_count(): time.sleep(0.1)\n"
        "    print(gc.get_freeze_count(), flush=True)\n"
        "threading.Thread(target=look, daemon=True).start()\n"
        "serve(lambda: d5p4.load('countdown'), name='it', port=0)\n"
    )
    with process(command=(script,)) as server:
        assert int(until(server.run.stdout.readline)) > 10_000
