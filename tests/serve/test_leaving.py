"""Clients that go away, and requests whose time is over: their slots are free and nothing is decoded for them."""

import json
import logging
import socket
import struct
import threading
import time

import openai
import pytest

from d5p4.serve.lineup import Lineup
from tests.serve.models import Faulty, Gated, Slow
from tests.serve.running import NAME, request, response, running, until

LONG = {"prompt": "abc", "max_tokens": 60, "n": 2, "seed": 1}  # 60 steps


def idle(server):
    return server.metric("d5p4_running_prompts") == server.metric("d5p4_waiting_prompts") == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_stops_its_decode(streamed):
    with running(Slow(0.02)) as server:
        body = LONG | {"stream": streamed}
        with server.connect() as wire:
            wire.sendall(request(body))
            until(lambda: len(server.model.calls) >= 3)
            if streamed:
                assert b"200 OK" in wire.recv(1000)
        until(lambda: idle(server))
        calls = len(server.model.calls)
        assert calls < 40 and server.metric("d5p4_cancelled_prompts_total") == 1
        time.sleep(0.1)
        assert len(server.model.calls) == calls
        assert server.post(prompt="abc", max_tokens=2).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_leaving_when_a_part_of_the_prompts_is_done(streamed, caplog):
    """Prompts that do not share a decode: the first is finished when the client goes."""
    with running(Slow(0.02)) as server, caplog.at_level(logging.WARNING):
        with server.connect() as wire:
            wire.sendall(request({"prompt": ["a", "all"], "seed": 1, "stream": streamed}))  # the second has holes
            until(lambda: server.metric("d5p4_answers_total") == 1)
        until(lambda: idle(server) and not server.server.server_state.tasks)
        assert server.post(prompt="abc", max_tokens=2).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_closing_the_client_s_stream_is_leaving():
    with running(Slow(0.02)) as server:
        stream = server.client().completions.create(model=NAME, stream=True, **LONG)
        for chunk in stream:
            if "drafts" in (getattr(chunk, "d5p4", None) or {}):
                break
        stream.close()
        until(lambda: idle(server))
        assert server.metric("d5p4_cancelled_prompts_total") == 1 and len(server.model.calls) < 50


def test_who_leaves_the_queue_frees_its_place():
    with running(Gated(), limits={"max_queue": 2}) as server:
        with server.connect() as first, server.connect() as second:
            first.sendall(request({"prompt": "a", "max_tokens": 1}))
            until(server.model.entered.is_set)
            second.sendall(request({"prompt": ["a", "b"], "max_tokens": 1}))
            until(lambda: server.metric("d5p4_waiting_prompts") == 2)
            assert server.post(prompt="a").status_code == 429
        until(lambda: server.metric("d5p4_waiting_prompts") == 0)
        assert server.metric("d5p4_cancelled_prompts_total") == 3
        server.model.gate.set()
        assert server.post(prompt="a", max_tokens=1).status_code == 200
        assert server.metric("d5p4_batch_prompts_sum") == 2  # what was left in the queue was never decoded


def test_others_in_the_batch_go_on():
    """One of two that share a decode leaves; the other gets its answer, the same as ever."""
    with running(Slow(0.005)) as server:
        alone = server.post(**LONG).json()["choices"]
        with server.connect() as first, server.connect() as leaving, server.connect() as staying:
            first.sendall(request(LONG | {"n": 1}))  # behind it the others queue up
            until(lambda: server.metric("d5p4_running_prompts") == 1)
            leaving.sendall(request(LONG | {"prompt": "cba", "seed": 2}))
            staying.sendall(request(LONG))
            until(lambda: server.metric("d5p4_running_prompts") == 2)
            count = len(server.model.calls)
            until(lambda: len(server.model.calls) > count + 3)
            leaving.close()
            status, answer = response(staying)
        assert status == 200 and json.loads(answer)["choices"] == alone
        assert server.metric("d5p4_cancelled_prompts_total") == 1


def test_a_client_that_leaves_in_the_moment_it_came_does_not_stop_the_worker():
    """The worker waits a moment for company; who woke it may be gone by then."""
    with running(Slow(0.0)) as server:
        for _ in range(50):
            wire = server.connect()
            wire.sendall(request({"prompt": "abc", "max_tokens": 2}))
            time.sleep(0.002)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            wire.close()
        assert server.post(prompt="abc", max_tokens=2).status_code == 200


def test_the_lineup_outlives_a_job_that_leaves_while_it_lingers():
    class Job:
        alike = ("", 1)

    lineup, taken = Lineup(4), []
    worker = threading.Thread(target=lambda: taken.append(lineup.take(lambda batch, job: True)), daemon=True)
    worker.start()
    for _ in range(5):
        gone = Job()
        lineup.add([gone])
        lineup.discard(gone)
        time.sleep(0.02)
    assert worker.is_alive() and taken == []
    stays = Job()
    lineup.add([stays])
    worker.join(5)
    assert taken == [[stays]]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_hundreds_that_leave_mid_stream(count):
    with running(Slow(0.002), limits={"max_queue": 2000}) as server:
        expected = server.post(**LONG).json()["choices"]
        for start in range(0, count, 50):
            wires = [server.connect() for _ in range(50)]
            for number, wire in enumerate(wires):
                wire.sendall(request(LONG | {"stream": True, "seed": start + number, "history": number % 2 == 0}))
            for wire in wires[::2]:
                wire.recv(100)
            for wire in wires:
                wire.close()
        assert server.post(**LONG).json()["choices"] == expected
        until(lambda: idle(server))
        until(lambda: not server.server.server_state.tasks and not server.engine._live)
        answered, left = server.metric("d5p4_answers_total") / 2, server.metric("d5p4_cancelled_prompts_total")
        assert answered + left == count + 2 and answered < count / 2  # hardly anybody was decoded for nothing


def test_time_runs_out():
    with running(Slow(0.05), limits={"timeout": 0.4}) as server:
        start = time.monotonic()
        with pytest.raises(openai.InternalServerError) as raised:
            server.client(max_retries=2).completions.create(model=NAME, **LONG)
        assert raised.value.status_code == 503 and raised.value.code == "timeout"
        assert "longer than 0.4 s" in raised.value.message
        assert time.monotonic() - start < 2  # the client was told not to try again
        until(lambda: idle(server))
        calls = len(server.model.calls)
        assert calls < 40
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as streamed:
            events = streamed.read().decode().strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert server.post(prompt="abc", max_tokens=2).status_code == 200


def test_time_runs_while_a_prompt_is_encoded():
    model = Slow(0.0)
    with running(model, limits={"timeout": 0.3}) as server:
        model.tokenizer.encode = lambda text: time.sleep(1.0) or [1]
        start = time.monotonic()
        found = server.post(prompt="abc", max_tokens=2)
        assert found.status_code == 503 and found.json()["error"]["code"] == "timeout"
        assert time.monotonic() - start < 0.9


def test_only_clients_that_left_count_as_cancelled():
    with running(Faulty({"x": "nan"})) as server:
        assert server.post(prompt=["xbc", "al"], n=1).status_code == 500  # which do not share a decode
        assert server.metric("d5p4_cancelled_prompts_total") == 0
