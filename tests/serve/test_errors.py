"""Bad requests are the client library's exceptions; the message names the bad value, `param` the field."""

import openai
import pytest

from d5p4.serve.schema import NEUTRAL, ChatRequest
from tests.fake import FakeModel
from tests.serve.running import NAME, running

ASKED = {"model": NAME, "prompt": "abc", "max_tokens": 4}
CHAT = "/v1/chat/completions"


BAD = [
    ({"n": 0}, "n", "n=0"),
    ({"n": 300}, "n", "a pool of 1200 rows; this server takes 256"),
    ({"temperature": -1}, "temperature", "temperature=-1"),
    ({"temperature": 0, "n": 2}, "temperature", "temperature=0"),
    ({"top_p": 1.5}, "top_p", "top_p=1.5"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ({"seed": 2**63}, "seed", "seed=9223372036854775808"),
    ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"logprobs": 9}, "logprobs", "logprobs=9"),
    ({"logprobs": 3}, "logprobs", "logprobs=3: alternatives are not kept"),
    ({"best_of": 3}, "best_of", "best_of"),
    ({"extra_body": {"method": "beam"}}, "method", "there is no method 'beam'"),
    ({"extra_body": {"order": "up"}}, "order", "order='up'"),
    ({"extra_body": {"guidance": 0.5}}, "guidance", "guidance=0.5"),
    ({"extra_body": {"alpha": 2}}, "alpha", "no parameter alpha"),
    ({"extra_body": {"betta": 2}}, "betta", "'betta' is not a field"),
    ({"extra_body": {"steps": 5000}}, "steps", "steps=5000"),
    ({"extra_body": {"w": "4"}}, "w", "w='4'"),
    ({"extra_body": {"history": True, "w": 100, "n": 2}}, "history", "pools of up to 128 rows"),
    ({"n": 2, "extra_body": {"w": 2**30, "method": "independent"}}, "w", "w=1073741824"),
    ({"n": 2, "extra_body": {"w": 100, "method": "best-of-n"}}, "w", "draw 160000 children a step"),
    ({"n": 2, "extra_body": {"w": 100, "select_window": [1, 2]}}, "w", "draw 160000 children a step"),
    ({"extra_body": {"guidance_window": [1]}}, "guidance_window", "guidance_window"),
    ({"extra_body": {"solver": "exact"}}, "solver", "solver"),
    ({"prompt": "abcxyz"}, "prompt", "the prompt holds token id 23"),
    ({"prompt": "a" * 65}, "prompt", "65 tokens"),
    ({"prompt": "a" * 20000}, "prompt", "20000 characters"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [[]]}, "prompt", "prompt"),
    ({"prompt": ["a", 1]}, "prompt", "prompt"),
    ({"prompt": [12]}, "prompt", "token id 12"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": ["a"] * 257}, "prompt", "257 prompts; this server takes 256"),
]


def test_a_bad_value_is_named(client):
    for given, param, said in BAD:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**ASKED | given)
            pytest.fail(str(given)[:80])
        error = raised.value
        assert said in error.message, given
        assert (error.param, error.type) == (param, "invalid_request_error"), given


REAL = {
    "echo": True, "suffix": "a", "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"1": 2},
    "tools": [{}], "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"},
    "response_format": {"type": "json_object"}, "modalities": ["audio"], "top_logprobs": 2,
    "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True,
}  # fmt: skip


def test_what_is_not_done_is_refused_unless_it_asks_for_nothing(server):
    for name, neutral in NEUTRAL.items():
        path = CHAT if name in ChatRequest.model_fields else "/v1/completions"
        asked = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else {"prompt": "abc"}
        for value in (*neutral, None):
            assert server.post(path, max_tokens=1, **asked, **{name: value}).status_code == 200, (name, value)
        found = server.post(path, **asked, **{name: REAL[name]})
        assert found.status_code == 400 and found.json()["error"]["param"] == name
        assert name in found.json()["error"]["message"]


def test_fields_without_a_meaning_here_are_taken(server):
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"}
    assert server.post(**ASKED, **ignored).status_code == 200
    chat = {"parallel_tool_calls": True, "reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k"}
    asked = {"messages": [{"role": "user", "content": "abc", "name": "me"}], "max_tokens": 2}
    assert server.post(CHAT, **asked, **chat).status_code == 200


def test_an_unknown_model(client):
    for call in (
        lambda: client.completions.create(**ASKED | {"model": "gpt"}),
        lambda: client.models.retrieve("gpt"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here; there is 'fake'") as raised:
            call()
        assert raised.value.code == "model_not_found"


PATHS = [
    ("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405),
    ("OPTIONS", "/v1/completions", 405), ("HEAD", "/v1/models", 405), ("PUT", "/", 405), ("BREW", "/", 405),
    ("POST", "/v1/completions/", 404), ("GET", "/page/../../etc/passwd", 404),
    ("GET", "/page/%2e%2e/%2e%2e/etc/passwd", 404), ("GET", "/docs", 404), ("HEAD", "/healthz", 200),
    ("HEAD", "/", 200), ("GET", "/page/index.html", 200), ("GET", "/page/", 404), ("GET", "/page/none.js", 404),
]  # fmt: skip


def test_paths_and_methods(server):
    for method, path, status in PATHS:
        headers = {"content-type": "application/json"} if method == "POST" else {}
        found = server.http.request(method, path, headers=headers)
        assert found.status_code == status, (method, path)
        if status >= 400 and method != "HEAD":
            error = found.json()["error"]
            assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
        assert found.headers["x-content-type-options"] == "nosniff"
        assert status != 405 or found.headers["allow"]


def test_limits_of_a_server():
    limits = {"max_prompt_tokens": 5, "max_gen_length": 8, "max_pool": 6, "max_steps": 4, "max_queue": 2}
    with running(FakeModel(), limits=limits) as server:
        def refused(**given):
            found = server.post(**{"prompt": "abc", "max_tokens": 4} | given)
            assert found.status_code == 400, found.text
            return found.json()["error"]

        assert server.post(prompt="abcde", max_tokens=4, n=1, w=6).status_code == 200
        assert refused(prompt="abcdef")["code"] == "context_length_exceeded"
        assert refused(max_tokens=9, steps=2)["param"] == "max_tokens"
        assert refused(n=2, w=4)["message"] == "n=2, w=4: a pool of 8 rows; this server takes 6"
        assert refused(n=7, method="independent")["param"] == "n"
        assert refused(max_tokens=5)["message"].startswith("5 steps, one a token: this server takes 4")
        assert refused(prompt=["a"] * 3)["param"] == "prompt"
        assert server.post(prompt="abc", steps=2).json()["usage"]["completion_tokens"] <= 8  # the default gives way
