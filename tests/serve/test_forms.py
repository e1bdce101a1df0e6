"""Constraints over HTTP: our names, those of OpenAI and of vLLM, and what is refused."""

import json
import re

import httpx
import openai
import pytest

from tests.serve.running import running
from tests.test_constraint import byte_level

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob", "Cem"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server():
    with running(byte_level(['{"name":"Ann","age":41}', "yes no maybe"] * 20)) as server:
        yield server


def test_the_openai_client_gets_different_objects_of_a_schema(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    messages = [{"role": "user", "content": "Who?"}]
    asked = dict(model="fake", messages=messages, n=4, seed=1, max_tokens=24, response_format=wanted)
    reply = server.client().chat.completions.create(**asked)
    objects = [json.loads(choice.message.content) for choice in reply.choices]
    assert all(own["name"] in ("Ann", "Bob", "Cem") and 1 <= own["age"] <= 99 and len(own) == 2 for own in objects)
    assert len({json.dumps(own) for own in objects}) == 4
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    streamed = [""] * 4
    for chunk in server.client().chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(map(json.loads, streamed)) == objects


FIELDS = [
    ({"guided_choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
    ({"choices": ["yes", "no"]}, "yes|no"),
    ({"regex": "[a-c]{2,4}"}, "[a-c]{2,4}"),
    ({"guided_regex": "x[0-9]"}, "x[0-9]"),
    ({"guided_grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
    ({"guided_json": {"type": "boolean"}}, "true|false"),
    ({"json_schema": '{"enum": [1, 2]}'}, "1|2"),
    ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
]


@pytest.mark.parametrize(("fields", "form"), FIELDS)
def test_every_name_of_a_constraint(server, fields, form):
    asked = dict(model="fake", prompt="Well?", max_tokens=12, n=2, seed=3, extra_body=fields)
    reply = server.client().completions.create(**asked)
    for choice in reply.choices:
        assert (choice.finish_reason == "stop") == bool(re.fullmatch(form, choice.text, re.S)), choice


def test_an_unfinished_answer_ends_by_its_length(server):
    fields = {"regex": "[a-z]{40}", "method": "independent"}
    reply = server.client().completions.create(model="fake", prompt="Well?", max_tokens=5, extra_body=fields)
    assert reply.choices[0].finish_reason == "length"


BAD = [
    ({"regex": "(a"}, "regex"),
    ({"regex": "a", "choices": ["b"]}, "choices"),
    ({"guided_json": [1]}, "guided_json"),
    ({"json_schema": {"type": "strin"}}, "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_choice": []}, "guided_choice"),
    ({"regex": "a", "order": "random"}, "order"),
    ({"regex": "a", "steps": 4}, "steps"),
]


@pytest.mark.parametrize(("fields", "name"), BAD)
def test_bad_constraints_get_status_400(server, fields, name):
    with pytest.raises(openai.BadRequestError) as raised:
        server.client().completions.create(model="fake", prompt="Well?", max_tokens=8, extra_body=fields)
    assert raised.value.param == name and "\n" not in raised.value.body["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200
