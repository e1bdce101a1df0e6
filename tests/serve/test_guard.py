"""Who may come in, what operators see, and how a server starts and stops."""

import threading

import openai
import pytest

from d5p4.serve.server import allowed_names
from tests.fake import FakeModel
from tests.serve.running import NAME, Gated, response, running, until
from tests.serve.running import request as http

KEY = "a secret é"
GOOD = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked():
    with running(FakeModel(), api_key=KEY, hosts=["127.0.0.1", "localhost", "::1", "Box.Local"]) as server:
        yield server


def test_the_key(locked):
    key = KEY.encode()
    wrong = [None, b"", b"Bearer", b"Bearer wrong", b"Basic " + key, key, b"Bearer \xff\xfe"]
    for given in [*wrong, b"Bearer " + key[:-1], b"Bearer " + key + b"x"]:
        reply = locked.http.get("/v1/models", headers=[] if given is None else [(b"Authorization", given)])
        assert reply.status_code == 401, given
        assert reply.json()["error"]["code"] == "invalid_api_key" and reply.headers["www-authenticate"] == "Bearer"
        assert KEY not in reply.text
    for given in (b"Bearer " + key, b"bearer  " + key):
        assert locked.http.get("/v1/models", headers=[(b"Authorization", given)]).status_code == 200, given
    with pytest.raises(openai.AuthenticationError):
        locked.client(api_key="wrong").completions.create(model=NAME, **GOOD)


def test_what_the_key_guards(locked):
    for path in ("/", "/page/index.html", "/health", "/healthz", "/readyz", "/docs", "/openapi.json"):
        assert locked.http.get(path).status_code == 200
    for path in ("/v1/models", "/v1/models/fake", "/metrics", "/v1/nothing", "/page"):
        assert locked.http.get(path).status_code == 401, path
    assert locked.post(**GOOD).status_code == locked.raw(b"{").status_code == 401


def test_names_the_server_is_called_by(locked, server):
    """A page of another site that lets its own name point here is refused, key or not."""
    known = ("localhost", "LOCALHOST:99", "127.0.0.1:1", "[::1]:8000", "box.local:80")
    others = ("evil.example", "localhost.evil.example:80", " ", "[evil", "127.0.0.1@evil", "[::1]evil.example", "[::1")
    others += ("localhost:80:evil.example", "localhost:evil", "[::1]:80evil.example", "[localhost")
    for host in known + others:
        with locked.connect() as wire:
            wire.sendall(http(b"", "/healthz", "GET", host=host))
            status, body = response(wire)
        assert status == (200 if host in known else 403), host
        assert host in known or b"--allowed-host" in body
    assert allowed_names("0.0.0.0", []) is None and "box.local" in allowed_names("0.0.0.0", ["box.local"])
    assert allowed_names("127.0.0.1", []) is not None
    assert server.http.get("/healthz", headers={"host": "any.name"}).status_code == 200  # it has no names of its own


def test_metrics():
    with running(FakeModel()) as server:
        server.post(prompt="abc", max_tokens=6, seed=1, n=3)
        server.post(prompt="abc", n=0)
        server.http.get("/v1/nothing/marked")
        server.http.get("/v1/models/marked")
        text = server.http.get("/metrics").text
        for status in ("200", "400"):
            until(lambda: server.metric("d5p4_requests_total", route="/v1/completions", status=status) == 1)  # noqa: B023
        assert server.metric("d5p4_answers_total") == server.metric("d5p4_distinct_answers_total") == 3
        assert server.metric("d5p4_ready") == 1
        assert "marked" not in text


def test_pages_of_other_origins():
    """Only those of the origins that were given, errors included; the browser's question needs no key."""
    with running(FakeModel(), api_key=KEY, cors_origins=["https://a.example"]) as server:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            asked = server.http.options("/v1/completions", headers={"origin": origin} | ask)
            assert asked.headers.get("access-control-allow-origin") == allowed
            assert asked.status_code == (200 if allowed else 400)
            refused = server.http.get("/v1/models", headers={"origin": origin})
            assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, allowed)


def test_a_model_that_takes_time_to_load():
    gate = threading.Event()

    def load():
        gate.wait(60)
        return FakeModel()

    with running(load) as server:
        assert until(lambda: server.http.get("/healthz").status_code == 200)
        assert server.http.get("/readyz").status_code == 503
        assert server.http.get("/readyz").json() == {"status": "loading"}
        for call in (lambda: server.post(**GOOD), lambda: server.http.get("/v1/models")):
            reply = call()
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "loading"
            assert int(reply.headers["retry-after"]) > 0
        assert server.metric("d5p4_ready") == 0
        gate.set()
        until(lambda: server.http.get("/readyz").status_code == 200)
        assert server.post(**GOOD).status_code == 200


@pytest.fixture
def stopping(request):
    """A server that stops while one request is decoded and one waits, and their connections."""
    with (
        running(Gated(), limits={"grace": request.param}) as server,
        server.connect() as runs,
        server.connect() as waits,
    ):
        runs.sendall(http(GOOD))
        until(server.model.entered.is_set)
        waits.sendall(http(GOOD | {"max_tokens": 3}))
        until(lambda: server.metric("d5p4_waiting_prompts") == 1)
        server.server.should_exit = True
        yield server, (runs, waits)


@pytest.mark.parametrize("stopping", [100.0], indirect=True)
def test_stopping_finishes_what_is_here_and_refuses_what_comes(stopping):
    server, wires = stopping
    until(lambda: server.http.get("/readyz").status_code == 503)
    assert server.http.get("/readyz").json() == {"status": "stopping"}
    assert server.http.get("/healthz").status_code == 200
    reply = server.post(**GOOD)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stopping")
    assert int(reply.headers["retry-after"]) > 0
    server.model.gate.set()
    assert [response(wire)[0] for wire in wires] == [200, 200]
    server.thread.join(60)
    assert not server.thread.is_alive() and not server.engine.worker.is_alive()


@pytest.mark.parametrize("stopping", [0.2], indirect=True)
def test_stopping_when_the_grace_is_too_short(stopping):
    for wire in stopping[1]:
        status, body = response(wire)
        assert status == 503 and b'"code":"stopping"' in body
