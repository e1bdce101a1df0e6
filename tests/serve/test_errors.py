"""Bad requests are the client library's exceptions; the message names the bad value, `param` the field."""

from dataclasses import replace

import openai
import pytest
import torch

import d5p4
from d5p4.serve import Limits
from d5p4.serve.errors import not_possible
from d5p4.serve.limits import work
from d5p4.serve.requests import NEUTRAL, NEUTRAL_IN_CHAT, NEUTRAL_IN_COMPLETIONS
from tests.fake import FakeModel
from tests.serve.running import NAME, running

ASKED = {"model": NAME, "prompt": "abc", "max_tokens": 4}
CHAT = "/v1/chat/completions"
D5P4 = {"method": "d5p4"}
BAD = [
    ({"n": 0}, "n", "n=0 must be a whole number from 1 to 2147483648"),
    ({"n": 300}, "n", "n=300; this server takes at most 256"),
    (
        {"n": 200, "extra_body": {"spare": 200}},
        "n",
        "n=200 and spare=200 make a pool of 400 rows; this server takes at most",
    ),
    (
        {"n": 100, "extra_body": D5P4},
        "n",
        "n=100, w=4 and spare=0 make a pool of 400 rows; this server takes at most 256",
    ),
    ({"n": True}, "n", "n=True must be a whole number"),
    ({"temperature": "hot"}, "temperature", "temperature='hot' must be a number"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be a whole number from 1"),
    ({"seed": 2**63}, "seed", "seed=9223372036854775808 must be a whole number"),
    ({"stop": ["a"] * 5}, "stop", "must be a text or a list of at most 4 texts"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stream_options": {"usage": True}, "stream": True}, "stream_options", "must be an object with include_usage"),
    ({"logprobs": 9}, "logprobs", "logprobs=9 must be a whole number from 0 to 5 or true or false"),
    ({"logprobs": 3}, "logprobs", "logprobs=3: alternatives are not kept"),
    ({"best_of": 3}, "best_of", "best_of"),
    ({"extra_body": {"betta": 2}}, "betta", "'betta' is not a field of this request; did you mean beta?"),
    ({"extra_body": {"solver": "exact"}}, "solver", "'solver' is not a field"),
    ({"extra_body": {"steps": 5000}}, "steps", "steps=5000"),
    ({"extra_body": {"w": "4"}}, "w", "w='4' must be a whole number from 1"),
    ({"extra_body": {"distinct": 1}}, "distinct", "distinct=1 must be true or false"),
    ({"extra_body": {"return_token_ids": 1}}, "return_token_ids", "return_token_ids=1 must be true or false"),
    ({"extra_body": {"return_step_maps": "yes"}}, "return_step_maps", "return_step_maps='yes' must be true or false"),
    ({"extra_body": {"return_step_map": True}}, "return_step_map", "did you mean return_step_maps?"),
    ({"extra_body": {"beta": 1e40}}, "beta", "beta=1e+40 must be a number from 0 to 1e+30"),
    ({"extra_body": {"user": 5}}, "user", "user=5 must be a text"),
    ({"extra_body": {"metadata": 5}}, "metadata", "metadata=5 must be an object"),
    (
        {"n": 2, "extra_body": D5P4 | {"history": True, "w": 100}},
        "history",
        "history with a pool of 200 rows; this server takes at most 128",
    ),
    ({"n": 2, "extra_body": {"w": 2**30, "method": "independent", "distinct": True}}, "w", "w=1073741824"),
    ({"n": 2, "extra_body": {"w": 100, "method": "best-of-n", "distinct": True}}, "w", "draw 80000 children per step"),
    (
        {"n": 2, "extra_body": D5P4 | {"w": 100, "distinct": True, "select_window": [1, 2]}},
        "w",
        "draw 80000 children per step",
    ),
    ({"extra_body": {"guidance_window": [1]}}, "guidance_window", "guidance_window=[1] must be two numbers"),
    ({"prompt": "a" * 20000}, "prompt", "20000 characters"),
    ({"prompt": []}, "prompt", "prompt=[] must be a text, a list of token ids, or"),
    ({"prompt": [[]]}, "prompt", "prompt=[[]] must be"),
    ({"prompt": ["a", 1]}, "prompt", "prompt=['a', 1] must be"),
    ({"prompt": ["a"] * 257}, "prompt", "257 prompts; this server takes at most 256"),
]
OF_THE_LIBRARY = [
    ({"temperature": -1}, "temperature", "temperature=-1"),
    ({"temperature": 0, "n": 2, "extra_body": D5P4}, "temperature", "temperature=0"),
    ({"extra_body": {"w": 2}}, "w", "w=2 has no meaning at a temperature above 0"),
    ({"top_p": 1.5}, "top_p", "top_p=1.5"),
    ({"extra_body": {"method": "beam"}}, "method", "'beam'"),
    ({"extra_body": {"order": "up"}}, "order", "order='up'"),
    ({"extra_body": {"guidance": 0.5}}, "guidance", "guidance=0.5"),
    ({"extra_body": {"alpha": 2}}, "alpha", "alpha"),
    ({"prompt": "abcxyz"}, "prompt", "token id 23"),
    ({"prompt": [12]}, "prompt", "token id 12"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
]
"""Errors that the library raises and the server phrases (`not_possible`)."""


def test_a_bad_value_is_named(client):
    for given, param, words in BAD + OF_THE_LIBRARY:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**ASKED | given)
            pytest.fail(str(given)[:80])
        error = raised.value
        assert words in error.message, (given, error.message)
        assert (error.param, error.type) == (param, "invalid_request_error"), given
        assert "pydantic" not in error.message and "Input should" not in error.message


def test_facts_of_the_library_in_the_words_of_the_request():
    cases = [
        (d5p4.D5P4Error("must be less", option="k", value=9), 1, "n=9 must be less", "n"),
        (d5p4.D5P4Error("is too long", option="gen_length", value=9), 1, "max_tokens=9 is too long", "max_tokens"),
        (d5p4.D5P4Error("the prompt is empty", prompt=2), 3, "prompt 2: the prompt is empty", "prompt"),
        (d5p4.D5P4Error("the prompt is empty", prompt=0), 1, "the prompt is empty", "prompt"),
        (d5p4.D5P4Error("this is not possible"), 1, "this is not possible", None),
    ]
    for error, prompts, message, param in cases:
        answer = not_possible(error, "prompt", prompts)
        assert (answer.status_code, answer.message, answer.param) == (400, message, param)


REAL = {
    "echo": True,
    "suffix": "a",
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"1": 2},
    "tools": [{}],
    "tool_choice": "required",
    "functions": [{}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["audio"],
    "top_logprobs": 2,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "ignore_eos": True,
}


def test_what_is_not_done_is_refused_unless_it_asks_for_nothing(server):
    for name, neutral in (NEUTRAL | NEUTRAL_IN_CHAT | NEUTRAL_IN_COMPLETIONS).items():
        path = CHAT if name in NEUTRAL_IN_CHAT else "/v1/completions"
        asked = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else {"prompt": "abc"}
        for value in (*neutral, None):
            assert server.post(path, max_tokens=1, **asked, **{name: value}).status_code == 200, (name, value)
        reply = server.post(path, **asked, **{name: REAL[name]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name
        assert name in reply.json()["error"]["message"]


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


def test_a_request_that_is_too_much_work_is_refused_with_what_fits(monkeypatch):
    """Counted, not timed: rows, steps and tokens times the parameters of the model, two operations per parameter."""
    model, many = FakeModel(), d5p4.Settings(method="d5p4", k=64, spare=64)
    tree = d5p4.Settings(k=64, spare=64, params={"diversity": 1.0})
    whole = [work(model, settings, [(7, 4)]) for settings in (many, tree)]
    monkeypatch.setattr("d5p4.serve.limits.SELECTION", 0)  # which would hide the forwards of a model this small
    forwards = [work(model, settings, [(7, 4)]) for settings in (many, tree)]
    selection = [a - b for a, b in zip(whole, forwards, strict=True)]  # for large pools; a tree has one start there
    assert selection == [4 * 300 * 128**3 * 512, 4 * 300 * 128**2 * 512]
    parameters, tokens, steps = model.head.weight.numel(), 3 + 4, 4
    per_row = 2 * parameters * tokens * steps
    with running(model, limits={"max_work": 40 * per_row / 1e12}) as server:

        def error(**given):
            return server.post(**{"prompt": "abc", "max_tokens": 4, "seed": 1} | given).json().get("error")

        assert error(n=40) is None  # the rows of a tree
        assert error(n=41)["message"].endswith("the largest n that fits is 40") and error(n=41)["param"] == "n"
        assert error(n=41, spare=5)["message"].endswith("the largest n that fits is 35")
        assert error(n=5, spare=5, **D5P4) is None  # (5 + 5 spare) beams with 4 children: 40 rows
        assert error(n=6, spare=5, **D5P4)["message"].endswith("the largest n that fits is 5")
        assert error(n=21, guidance=1.5)["message"].endswith("the largest n that fits is 20")  # every row twice
        assert error(prompt=["abc", "abd"], n=21)["message"].endswith("the largest n that fits is 20")
        alone = error(w=41, **D5P4)
        assert alone["message"].endswith("per request; set steps to 3 or less") and alone["param"] == "steps"
        assert error(w=41, steps=3, **D5P4) is None
        assert server.client().models.retrieve(NAME).d5p4["limits"]["max_work"] == pytest.approx(40 * per_row / 1e12)


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_the_work_of_order_token_search_counts_every_search(monkeypatch):
    """Also if a step reveals several positions, so that there are more segments than the steps suggest."""
    monkeypatch.setattr("d5p4.serve.limits.SELECTION", 0)
    model, options = FakeModel(), dict(method="ots", k=2, gen_length=8, steps=4)
    per_row = 2 * model.head.weight.numel() * 10
    for params in ({"segment": 2}, {"segment": 1}, {}):
        result = d5p4.generate(model, "ab", seed=0, **options, **params)
        settings = d5p4.Settings.make(model, **options, **params)
        assert work(model, settings, [(10, 4)]) / per_row == int(result.rows_nominal), params


def test_the_work_that_a_server_allows_by_itself():
    """On a CPU, D5P4 with n = 64 of the shipped model's size is refused; one answer of the default length never is."""
    small = FakeModel(max_length=512)
    assert Limits().work_allowed(small) == 6e12
    small.head = replace(small.head, weight=torch.zeros(1, 10_000_000).expand(1000, -1))  # ten thousand million
    assert Limits().work_allowed(small) == work(small, d5p4.Settings(k=1), [(256, 128)]) > 6e12
    small.head = replace(small.head, weight=torch.zeros(1, 1).expand(1, 10_000_000))
    sizes = [(62, 48)]  # tokens per row and steps of a puzzle
    many, few = (work(small, d5p4.Settings(method="d5p4", k=n, spare=n), sizes) for n in (64, 8))
    assert many > 6e12 > few
