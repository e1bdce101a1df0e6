"""Clients that go away, and requests whose time is over: their slots are free and nothing is decoded for them."""

import json
import logging
import threading

import openai
import pytest

from tests.serve.running import NAME, Gated, request, response, running, until

LONG = {"prompt": "abc", "max_tokens": 60, "n": 2, "seed": 1}  # 60 steps


def idle(server):
    return server.metric("d5p4_running_prompts") == server.metric("d5p4_waiting_prompts") == 0


def cancelled(server):
    return server.metric("d5p4_cancelled_prompts_total")


def test_a_client_that_leaves_stops_its_decode():
    """One hangs up, one closes the stream of its library."""
    with running(Gated()) as server:
        wire = server.connect()
        wire.sendall(request(LONG))
        until(server.model.entered.is_set)
        wire.close()
        until(lambda: cancelled(server) == 1)
        stream = server.client().completions.create(model=NAME, stream=True, **LONG | {"max_tokens": 59})
        stream.close()
        until(lambda: cancelled(server) == 2)
        server.model.gate.set()
        until(lambda: idle(server))
        assert len(server.model.calls) <= 2  # the forward that was under way
        assert server.post(prompt="abc", max_tokens=2).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_leaving_when_a_part_of_the_prompts_is_done(streamed, caplog):
    """Prompts that do not share a decode: the first is finished when the client goes."""
    with running(Gated()) as server, caplog.at_level(logging.WARNING):
        with server.connect() as wire:
            server.model.turns.release()
            body = {"prompt": ["a", "all"], "max_tokens": 1, "seed": 1, "stream": streamed}  # the second has holes
            wire.sendall(request(body))
            until(lambda: server.metric("d5p4_answers_total") == 1)
        until(lambda: cancelled(server) == 1)
        server.model.gate.set()
        until(lambda: idle(server) and not server.server.server_state.tasks)
        assert server.post(prompt="abc", max_tokens=2).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_who_leaves_the_queue_frees_its_place():
    with running(Gated(), limits={"max_queue": 2}) as server:
        with server.connect() as first, server.connect() as second:
            first.sendall(request({"prompt": "a", "max_tokens": 1}))
            until(server.model.entered.is_set)
            second.sendall(request({"prompt": ["a", "b"], "max_tokens": 1}))
            until(lambda: server.metric("d5p4_waiting_prompts") == 2)
            assert server.post(prompt="a").status_code == 429
        until(lambda: server.metric("d5p4_waiting_prompts") == 0)
        until(lambda: cancelled(server) == 3)
        server.model.gate.set()
        assert server.post(prompt="a", max_tokens=1).status_code == 200
        assert len(server.model.calls) == 2  # what was left in the queue was never decoded


def test_others_in_the_batch_go_on():
    """One of two that share a call leaves; the other gets its answer, the same as ever."""
    body = LONG | {"max_tokens": 8}
    with running(Gated()) as server:
        server.model.gate.set()
        alone = server.post(**body).json()["choices"]
        server.model.gate.clear()
        with server.connect() as first, server.connect() as leaving, server.connect() as staying:
            first.sendall(request(body | {"n": 1, "max_tokens": 1}))  # behind it the others queue up
            until(lambda: server.metric("d5p4_running_prompts") == 1)
            leaving.sendall(request(body | {"prompt": "cba", "seed": 2}))
            staying.sendall(request(body))
            until(lambda: server.metric("d5p4_waiting_prompts") == 2)
            server.model.calls.clear()
            server.model.turns.release(4)
            until(lambda: len(server.model.calls) == 4)
            assert server.metric("d5p4_running_prompts") == 2
            leaving.close()
            until(lambda: cancelled(server) == 1)
            server.model.gate.set()
            status, answer = response(staying)
        assert status == 200 and json.loads(answer)["choices"] == alone


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.full)])
def test_many_that_leave_mid_stream(count):
    with running(Gated(), limits={"max_queue": 2000}) as server:
        for start in range(0, count, 20):
            wires = [server.connect() for _ in range(20)]
            for number, wire in enumerate(wires):
                wire.sendall(request(LONG | {"stream": True, "seed": start + number, "history": number % 2 == 0}))
            for wire in wires[::2]:
                assert b"200 OK" in wire.recv(100)
            for wire in wires:
                wire.close()
        until(lambda: not server.engine.live and not server.server.server_state.tasks)
        server.model.gate.set()
        until(lambda: idle(server))
        assert server.post(**LONG | {"max_tokens": 2}).status_code == 200
        assert server.metric("d5p4_answers_total") == 2  # nobody was decoded for nothing


def test_time_runs_out():
    """While a request is decoded, while it waits and while its prompt is encoded."""
    encoded = threading.Event()
    with running(Gated(), limits={"timeout": 0.5}) as server:
        with pytest.raises(openai.InternalServerError) as raised:
            server.client(max_retries=2).completions.create(model=NAME, **LONG)
        assert raised.value.status_code == 503 and raised.value.code == "timeout"
        assert "longer than 0.5 s" in raised.value.message
        route = {"route": "/v1/completions", "status": "503"}
        until(lambda: server.metric("d5p4_requests_total", **route) == 1)  # it was told not to try again
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as streamed:
            events = streamed.read().decode().strip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        server.model.gate.set()
        until(lambda: idle(server))
        assert len(server.model.calls) <= 2
        until(lambda: server.post(prompt="abc", max_tokens=2).status_code == 200)
        server.model.tokenizer.encode = lambda text: encoded.wait(60) and [1]
        reply = server.post(prompt="abc", max_tokens=2)
        encoded.set()
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "timeout"
