"""Bodies and bytes that no well-behaved client sends: always an answer in OpenAI's shape, never a 5xx."""

import json
from contextlib import ExitStack
from unittest import mock

import pytest
from pydantic import ValidationError

import d5p4.serve.server
from d5p4.serve.errors import ApiError
from d5p4.serve.requests import request_models
from tests.fake import FakeModel
from tests.serve.running import Gated, request, response, rest, running, until

GOOD = {"prompt": "abc", "max_tokens": 2, "seed": 1}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def small():
    with running(FakeModel(), limits={"max_body": 4096, "max_pool": 16}) as server:
        yield server


@pytest.fixture(autouse=True, scope="module")
def still_right(server):
    """After whatever the tests did, the next client gets the same answer."""
    before = server.post(**GOOD).json()["choices"]
    yield
    assert server.post(**GOOD).json()["choices"] == before


def refused(response, status=400, about=None):
    assert response.status_code == status, (about, response.text[:300])
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


MALFORMED = [
    *rb"""
{
null
[]
"abc"
1
{}
{'prompt': 'abc'}
{"prompt": "abc"
{"prompt": "ab
{"prompt": "abc",}
{"prompt": "abc"} {}
{"prompt": "abc", "seed": 1e999}
{"prompt": "abc", "temperature": NaN}
{"prompt": "abc", "temperature": -Infinity}
{"prompt": "a\u0000b"}
{"prompt": "\ud800"}
{"\ud800": 1, "prompt": "abc"}
{"prompt": "abc", "stop": "\ud800"}
{"prompt": "abc", "method": "\ud800"}
{"prompt": ["a", "\udfff b"]}
{"messages": [{"role": "\ud800", "content": "a"}]}
{"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}
{"prompt": "abc", "w": 1, "w": "x"}
""".split(b"\n"),
    b"\xff\xfe\x00",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a\x00b"}',
    b"\x00" * 100,
    b'{"prompt": "abc", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "abc", "beta": ' + b"9" * 4000 + b"}",
    b'{"prompt": [' + b"9" * 4000 + b"]}",
    '{"prompt": "ε😀\u202e"}'.encode(),
    '{"п": 1, "prompt": "a"}'.encode(),
    b'\xef\xbb\xbf{"prompt": "abc", "n": 0}',
    '{"prompt": "abc", "n": 0}'.encode("utf-16"),
]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_malformed_bodies(server, path):
    for body in MALFORMED:
        if path == CHAT:
            body = body.replace(b'"prompt": "', b'"messages": [{"role": "user", "content": "', 1)
        refused(server.raw(body, path), about=body[:60])


def test_deep_nesting(server):
    for depth in (50, 200, 500, 800, 900, 950, 975, 990, 2000, 100_000):
        for inside in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
            refused(server.raw(b'{"prompt": ' + inside + b"}"), about=depth)
            body = b'{"prompt": "abc", "max_tokens": 1, "metadata": {"a": ' + inside + b"}}"
            assert server.raw(body).status_code in (200, 400)
            refused(server.raw(b'{"tool_choice": ' + inside + b', "messages": []}', CHAT))


def test_content_types(server):
    body = json.dumps(GOOD).encode()
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/json"):
        headers = {} if kind is None else {"content-type": kind}
        refused(server.http.post("/v1/completions", content=body, headers=headers), 415, kind)
    assert server.raw(body, **{"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_many_mistakes_cost_no_more_than_one(server):
    """After the first few nothing more is looked at: a body may hold a million."""
    many = 10_000
    completion, chat = request_models()
    bodies = [
        (completion, b'{"prompt": [' + b",".join([b"[]"] * many) + b"]}"),
        (completion, b'{"prompt": "a", ' + b",".join(b'"x%d":1' % i for i in range(many)) + b"}"),
        (chat, b'{"messages": [' + b",".join([b"{}"] * many) + b"]}"),
        (chat, b'{"messages": [{"role": "user", "content": [' + b",".join([b"1"] * many) + b"]}]}"),
        (completion, b'{"prompt": "a", "stop": [' + b",".join([b"1"] * many) + b"]}"),
    ]
    for kind, body in bodies:
        with pytest.raises((ValidationError, ApiError)) as raised:
            kind.model_validate_json(body)
        assert isinstance(raised.value, ApiError) or raised.value.error_count() < 5
        refused(server.raw(body, CHAT if kind is chat else "/v1/completions"))


def test_a_body_that_is_too_large(small):
    assert "larger than 4096 bytes" in refused(small.raw(b"x" * 5000), 413)["message"]
    refused(small.raw(b"x" * 6_000_000), 413)

    def chunks():
        for _ in range(50):
            yield b"x" * 1000

    refused(small.raw(chunks()), 413)
    with small.connect() as wire:  # a client that asks first gets the answer before it sends
        wire.sendall(request(b"", expect="100-continue", **{"content-length": "99999999999"}))
        assert b" 413 " in wire.recv(1000)
    for length in ("9" * 19, "9" * 30, "9" * 5000, "-1", "1, 2", "x"):
        with small.connect() as wire:
            wire.sendall(request(b"", expect="100-continue", connection="close", **{"content-length": length}))
            assert rest(wire).split()[1] in (b"413", b"400"), length
    assert small.post(**GOOD).status_code == 200


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: "
GARBAGE = [
    b"\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    POST + b"chunked\r\n\r\nzz\r\nnot a chunk\r\n",
    POST + b"chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    POST + b"gzip\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
]


def test_bytes_that_are_no_request(small):
    for data in GARBAGE:
        with small.connect() as wire:
            wire.sendall(data)
            answer = wire.recv(100)
            assert answer == b"" or int(answer.split()[1]) < 500, data[:50]
    assert small.http.get("/healthz").status_code == 200


def test_slow_senders_are_cut_off_and_others_are_not():
    """A head or a body that does not end, and a second request on a connection; but not a client that waits."""
    with running(Gated()) as server, ExitStack() as wires:
        one, body, head, waits = (wires.enter_context(server.connect()) for _ in range(4))
        server.model.turns.release(2)
        one.sendall(request(GOOD))
        assert response(one)[0] == 200
        waits.sendall(request(GOOD | {"seed": 2}))
        until(lambda: server.metric("d5p4_running_prompts") == 1)
        with mock.patch.object(d5p4.serve.server, "SECONDS_TO_SEND", 0.5):
            body.sendall(request(GOOD)[:-5])
            for wire in (one, head):
                wire.sendall(b"POST /v1/comp")
            assert [rest(wire) for wire in (one, head, body)] == [b""] * 3
        server.model.gate.set()
        assert response(waits)[0] == 200
    with mock.patch.object(d5p4.serve.server, "MOST_CONNECTIONS", 1), running(lambda: None) as full:
        assert full.http.get("/healthz").status_code == 503
