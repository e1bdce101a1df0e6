"""Who may come in, what operators see, and how a server starts and stops."""

import math
import threading
import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import d5p4
from d5p4.serve import Limits
from tests.fake import FakeModel
from tests.serve.models import Gated
from tests.serve.running import NAME, request, response, running, until

KEY = "a secret é"
GOOD = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked():
    with running(FakeModel(), api_key=KEY, hosts=["127.0.0.1", "localhost", "::1", "Box.Local"]) as server:
        yield server


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401), (b"", 401), (b"Bearer", 401), (b"Bearer wrong", 401), (b"Basic " + KEY.encode(), 401),
        (KEY.encode(), 401), (b"Bearer " + KEY.encode()[:-1], 401), (b"Bearer " + KEY.encode() + b"x", 401),
        (b"Bearer \xff\xfe", 401), (b"Bearer " + KEY.encode(), 200), (b"bearer  " + KEY.encode(), 200),
    ],
)  # fmt: skip
def test_the_key(locked, given, status):
    headers = [] if given is None else [(b"Authorization", given)]
    found = locked.http.get("/v1/models", headers=headers)
    assert found.status_code == status
    if status == 401:
        assert found.json()["error"]["code"] == "invalid_api_key" and found.headers["www-authenticate"] == "Bearer"
        assert KEY not in found.text


def test_what_the_key_guards(locked):
    for path in ("/", "/page/index.html", "/healthz", "/readyz"):
        assert locked.http.get(path).status_code == 200
    for path in ("/v1/models", "/v1/models/fake", "/metrics", "/openapi.json", "/v1/nothing", "/page"):
        assert locked.http.get(path).status_code == 401, path
    assert locked.post(**GOOD).status_code == 401
    assert locked.raw(b"{").status_code == 401


def test_the_client_s_exception():
    with running(FakeModel(), api_key="key") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").completions.create(model=NAME, **GOOD)
        assert server.client(api_key="key").completions.create(model=NAME, **GOOD).choices
        assert server.client(api_key="key").models.list().data


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:99", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200), ("box.local:80", 200),
        ("evil.example", 403), ("localhost.evil.example:80", 403), ("", 403), ("[evil", 403), ("127.0.0.1@evil", 403),
    ],
)  # fmt: skip
def test_names_the_server_is_called_by(locked, host, status):
    """A page of another site that lets its own name point here is refused, key or not."""
    with locked.connect() as wire:
        wire.sendall(request(b"", "/healthz", "GET", host=host or " "))
        found, body = response(wire)
    assert found == status
    if status == 403:
        assert b"--allowed-host" in body


def test_metrics():
    with running(FakeModel()) as server:
        server.post(prompt="abc", max_tokens=6, seed=1, n=3)
        server.post(prompt="abc", n=0)
        server.http.get("/v1/nothing/marked")
        server.http.get("/v1/models/marked")
        text = server.http.get("/metrics").text
        names = {family.name for family in text_string_to_metric_families(text)}
        assert names >= {
            "d5p4_requests", "d5p4_request_seconds", "d5p4_queue_seconds", "d5p4_decode_seconds", "d5p4_batch_prompts",
            "d5p4_rows", "d5p4_answer_tokens", "d5p4_answers", "d5p4_distinct_answers", "d5p4_cancelled_prompts",
            "d5p4_refused_requests", "d5p4_running_prompts", "d5p4_waiting_prompts", "d5p4_ready",
        }  # fmt: skip
        assert server.metric("d5p4_requests_total", route="/v1/completions", status="200") == 1
        assert server.metric("d5p4_requests_total", route="/v1/completions", status="400") == 1
        assert server.metric("d5p4_answers_total") == server.metric("d5p4_distinct_answers_total") == 3
        assert server.metric("d5p4_ready") == 1
        assert "marked" not in text


def test_a_page_may_load_nothing_from_elsewhere(server):
    found = server.http.get("/")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy
    assert "server" not in found.headers


def test_a_model_that_takes_time_to_load():
    gate = threading.Event()

    def load():
        gate.wait(30)
        return FakeModel()

    with running(load) as server:
        assert until(lambda: server.http.get("/healthz").status_code == 200)
        assert server.http.get("/readyz").status_code == 503
        assert server.http.get("/readyz").json() == {"status": "loading"}
        for call in (lambda: server.post(**GOOD), lambda: server.http.get("/v1/models")):
            found = call()
            assert found.status_code == 503 and found.json()["error"]["code"] == "loading"
            assert int(found.headers["retry-after"]) > 0
        assert server.metric("d5p4_ready") == 0
        gate.set()
        until(lambda: server.http.get("/readyz").status_code == 200)
        assert server.post(**GOOD).status_code == 200


def test_a_model_that_cannot_be_loaded_is_told():
    told = []

    def load():
        raise d5p4.D5P4Error("there is no such model")

    with running(load, failed=told.append) as server:
        until(lambda: told)
        assert server.http.get("/readyz").status_code == 503
    assert str(told[0]) == "there is no such model"


def test_stopping_finishes_what_is_here_and_refuses_what_comes():
    with running(Gated(), limits={"grace": 20.0}) as server:
        with server.connect() as runs, server.connect() as waits:
            runs.sendall(request(GOOD))
            until(server.model.entered.is_set)
            waits.sendall(request(GOOD | {"max_tokens": 3}))
            until(lambda: server.metric("d5p4_waiting_prompts") == 1)
            server.server.should_exit = True
            until(lambda: server.http.get("/readyz").status_code == 503)
            assert server.http.get("/readyz").json() == {"status": "stopping"}
            assert server.http.get("/healthz").status_code == 200
            found = server.post(**GOOD)
            assert (found.status_code, found.json()["error"]["code"]) == (503, "stopping")
            assert int(found.headers["retry-after"]) > 0
            server.model.gate.set()
            assert response(runs)[0] == response(waits)[0] == 200
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert not server.engine.worker.is_alive()


def test_stopping_when_the_grace_is_too_short():
    with running(Gated(), limits={"grace": 0.2}) as server, server.connect() as runs, server.connect() as waits:
        runs.sendall(request(GOOD))
        until(server.model.entered.is_set)
        waits.sendall(request(GOOD | {"max_tokens": 3}))
        until(lambda: server.metric("d5p4_waiting_prompts") == 1)
        start = time.monotonic()
        server.server.should_exit = True
        for wire in (runs, waits):
            status, body = response(wire)
            assert status == 503 and b'"code":"stopping"' in body
        assert time.monotonic() - start < 5
        server.model.gate.set()


@pytest.mark.parametrize("bad", [{"max_queue": 0}, {"timeout": -1.0}, {"grace": math.nan}, {"max_body": math.inf}])
def test_limits_that_are_none(bad):
    (name,) = bad
    with pytest.raises(d5p4.D5P4Error, match=name):
        Limits(**bad)
