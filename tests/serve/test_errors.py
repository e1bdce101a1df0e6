"""Bad requests are the client library's exceptions; the message names the bad value, `param` the field."""

import re
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch

import d5p4
from d5p4.serve import Limits
from d5p4.serve.errors import ApiError
from d5p4.serve.requests import IGNORED, NEUTRAL, work
from tests.fake import FakeModel
from tests.serve.running import NAME, running

ASKED = {"model": NAME, "prompt": "abc", "max_tokens": 4}
CHAT = "/v1/chat/completions"
D5P4 = {"method": "d5p4"}
BAD = [
    ({"n": 0}, "n", "n=0 must be a whole number of at least 1"),
    ({"n": 300}, "n", "n=300 and spare=0 make a pool of 300 rows; this server takes at most 256"),
    ({"n": 100} | D5P4, "n", "n=100, w=4 and spare=0 make a pool of 400 rows; this server takes at most 256"),
    ({"n": 100, "w": 200} | D5P4, "n", "n=100 with w=200 makes a pool of more than 16384 rows"),
    ({"k": 2}, "k", "'k' is not a field of this request; use n"),
    ({"temperature": "hot"}, "temperature", "temperature='hot' must be a number"),
    ({"temperature": 0, "n": 2} | D5P4, "temperature", "temperature=0.0 with order='confidence' is deterministic"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be a whole number of at least 1"),
    ({"prompt": "a" * 60, "max_tokens": 500}, "max_tokens", "max_tokens: the prompt has 60 tokens and asks for 500"),
    ({"early_stop": False}, "early_stop", "early_stop=False has no meaning for a tree"),
    ({"stop": ["a"] * 5}, "stop", "must be a text or a list of at most 4 texts"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stream_options": {"usage": True}, "stream": True}, "stream_options", "must be an object with include_usage"),
    ({"logprobs": 9}, "logprobs", "logprobs=9 must be a whole number from 0 to 5, or true or false"),
    ({"logprobs": 3}, "logprobs", "logprobs=3: alternatives are not kept"),
    ({"betta": 2}, "betta", "'betta' is not a field of this request; did you mean beta?"),
    ({"a" * 10**5: 2}, "a" * 10**5, "aaa' is not a field of this request"),
    ({"method": "beam"}, "method", "'beam'"),
    ({"steps": 5000}, "steps", "steps=5000"),
    ({"w": "4"}, "w", "w='4' must be a whole number of at least 1"),
    ({"return_token_ids": 1}, "return_token_ids", "return_token_ids=1 must be true or false"),
    ({"beta": 1e40}, "beta", "beta=1e+40 must be a number of at most 1e+30"),
    ({"user": 5}, "user", "user=5 must be a text"),
    ({"n": 2, "history": True, "w": 100} | D5P4, "history", "history with a pool of 200 rows; this server takes"),
    ({"n": 2, "w": 2**30, "method": "independent", "distinct": True}, "w", "w=1073741824"),
    ({"n": 2, "w": 100, "method": "best-of-n", "distinct": True}, "w", "draw 80000 children per step"),
    ({"prompt": "a" * 20000}, "prompt", "20000 characters"),
    ({"prompt": []}, "prompt", "prompt=[] must be a text, a list of token ids, or"),
    ({"prompt": ["a", 1]}, "prompt", "prompt=['a', 1] must be"),
    ({"prompt": ["a"] * 257}, "prompt", "257 prompts; this server takes at most 256"),
    ({"prompt": [12]}, "prompt", "token id 12"),
]


def test_a_bad_value_is_named_in_the_words_of_the_request(client):
    for given, param, words in BAD:
        with pytest.raises(openai.BadRequestError) as raised:
            client.post("/completions", body=ASKED | given, cast_to=object)
            pytest.fail(str(given)[:80])
        error = raised.value
        assert words in error.message, (given, error.message)
        assert (error.param, error.type) == (param, "invalid_request_error"), given
        assert "pydantic" not in error.message and "Input should" not in error.message
        python_names = re.search(r"\bk=|gen_length=|gen_length:|max_new_tokens", error.message)
        assert python_names is None, error.message


def test_what_is_not_done_is_refused_unless_it_asks_for_nothing(server):
    chat = {"messages": [{"role": "user", "content": "abc", "name": "me"}]}
    ignored = {name: {} if kind == dict[str, Any] else kind() for name, kind in IGNORED.items()}
    for path, asked in (("/v1/completions", {"prompt": "abc"}), (CHAT, chat)):
        neutral = {name: values[0] for name, values in NEUTRAL.items()}
        assert server.post(path, max_tokens=1, **asked, **neutral, **ignored).status_code == 200
        assert server.post(path, max_tokens=1, **asked, **dict.fromkeys(NEUTRAL)).status_code == 200
        for name in NEUTRAL:
            error = server.post(path, **asked, **{name: ["something"]}).json()["error"]
            assert error["param"] == name and name in error["message"]


def test_an_unknown_model(client):
    for call in (lambda: client.completions.create(**ASKED | {"model": "gpt"}), lambda: client.models.retrieve("gpt")):
        with pytest.raises(openai.NotFoundError, match="this server has no model 'gpt', only 'fake'") as raised:
            call()
        assert raised.value.code == "model_not_found"


PATHS = """
    GET /v1/nothing 404, GET /v1/completions 405, DELETE /v1/models 405, OPTIONS /v1/completions 405,
    HEAD /v1/models 405, PUT / 405, BREW / 405, POST /v1/completions/ 404, GET /page/../../etc/passwd 404,
    GET /page/%2e%2e/%2e%2e/etc/passwd 404, GET /docs 200, GET /redoc 404, HEAD /healthz 200, GET /health 200,
    HEAD / 200, GET /page/index.html 200, GET /page/ 404, GET /page/none.js 404
"""


def test_paths_and_methods(server):
    for method, path, code in (line.split() for line in PATHS.split(",")):
        status = int(code)
        headers = {"content-type": "application/json"} if method == "POST" else {}
        reply = server.http.request(method, path, headers=headers)
        assert reply.status_code == status, (method, path)
        if status >= 400 and method != "HEAD":
            error = reply.json()["error"]
            assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert status != 405 or reply.headers["allow"]


def test_limits_of_a_server():
    limits = {"max_prompt_tokens": 5, "max_gen_length": 8, "max_pool": 6, "max_steps": 4, "max_queue": 2}
    with running(FakeModel(), limits=limits) as server:

        def refused(**given):
            reply = server.post(**{"prompt": "abc", "max_tokens": 4} | given)
            assert reply.status_code == 400, reply.text
            return reply.json()["error"]

        assert server.post(prompt="abcde", max_tokens=4, n=1, w=6, method="d5p4").status_code == 200
        assert server.post(prompt="abcde", max_tokens=4, n=6).status_code == 200
        pool = "n=2, w=4 and spare=0 make a pool of 8 rows; this server takes at most 6"
        assert refused(prompt="abcdef")["code"] == "context_length_exceeded"
        assert refused(max_tokens=9, steps=2)["param"] == "max_tokens"
        assert refused(n=2, w=4, method="d5p4")["message"] == pool
        assert refused(n=7)["param"] == refused(n=6, spare=1)["param"] == "n"
        assert refused(max_tokens=5)["message"].startswith("this request takes 5 steps")
        assert refused(steps=5, max_tokens=8)["message"] == "steps=5; this server takes at most 4"
        assert refused(prompt=["a"] * 3)["param"] == "prompt"
        assert server.post(prompt="abc", steps=2).json()["usage"]["completion_tokens"] <= 8  # the default gives way


def test_a_request_that_is_too_much_work_is_refused_with_what_fits():
    """Counted, not timed: rows, steps and tokens times the parameters of the model, two operations per parameter."""
    model = FakeModel()
    model.head = replace(model.head, weight=torch.zeros(1, 1).expand(1, 10**9))  # the selection costs little beside it
    limits = Limits(max_work=40.5 * 2e9 * 7 * 4 / 1e12)  # 40 rows of 7 tokens, 4 steps

    def refusal(n, prompts=1, steps=4, **options):
        try:
            limits.check_work(model, [(7, steps)] * prompts, d5p4.Settings.make(model, k=n, **options))
        except ApiError as error:
            return error.param, re.split("fits is |set ", error.message)[1]
        return None

    assert refusal(40) is None and refusal(41) == ("n", "40")  # the rows of a tree
    assert refusal(41, spare=5) == ("n", "35")
    assert refusal(5, spare=5, **D5P4) is None and refusal(6, spare=5, **D5P4) == ("n", "5")  # beams of 4 children
    assert refusal(21, guidance=1.5) == refusal(21, prompts=2) == ("n", "20")  # every row twice; two prompts
    assert refusal(1, w=41, **D5P4) == ("steps", "steps to 3 or less") and refusal(1, steps=3, w=41, **D5P4) is None
    with running(FakeModel(), limits={"max_work": 1e-9}) as server:
        assert server.post(**ASKED).json()["error"]["param"] == "steps"
        assert server.client().models.retrieve(NAME).d5p4["limits"]["max_work"] == pytest.approx(1e-9)


def test_the_work_that_a_server_allows_by_itself():
    """One answer of the default length, whatever the size of the model."""
    model = FakeModel(max_length=512)
    assert Limits().work_allowed(model) == 6e12
    model.head = replace(model.head, weight=torch.zeros(1, 10_000_000).expand(1000, -1))  # ten thousand million
    assert Limits().work_allowed(model) == work(model, d5p4.Settings.make(model, k=1), [(256, 128)]) > 6e12
