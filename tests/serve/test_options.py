"""Every option that a client may give reaches the decode, and the server's schema says what it takes and answers."""

import random

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

import d5p4
from d5p4.options import public, registered_parameters
from d5p4.serve.errors import http_name
from d5p4.serve.requests import decoding_fields, request_models
from tests.fake import FakeModel, fitting
from tests.serve.running import NAME, running

FORMS = {"regex": "[a-c]+", "grammar": 'start: "a" | "b"', "choices": ["ab", "c"]}


def turned(parameter):
    """Return a value of an option that is not its default."""
    default, option = parameter.default, parameter.option
    if parameter.name in FORMS:
        return FORMS[parameter.name]
    if parameter.choices:
        return next(name for name in parameter.choices if name not in (default, "d5p4"))
    if parameter.kind in (bool, tuple, list):
        return not default if parameter.kind is bool else [0, 2] if parameter.kind is tuple else ["zz"]
    if option.most is not None and option.most < 10**6:
        return (default or option.most) / 2
    return (default or option.least or 0) + 1


def test_an_option_arrives(server):
    body = {"prompt": "abc", "n": 2, "max_tokens": 4, "seed": 1, "method": "d5p4"}
    plain, own = server.post(**body).json()["d5p4"]["settings"], registered_parameters()
    for name, parameter in public("http").items():
        if name == "json_schema":
            continue  # the letters of this model write no JSON (see test_forms.py)
        value = turned(parameter)
        reply = server.post(**body | {http_name(name): value})
        assert reply.status_code == 200, (name, value, reply.text)
        arrived = reply.json()["d5p4"]["settings"]
        assert arrived[name] == value != plain.get(name), name
        changed = {key for key in plain | arrived if plain.get(key) != arrived.get(key)}
        also = {"stop", "order", "eos"} if name in FORMS else {"stop"}  # an adaptive rule turns `stop` on
        assert changed - own.keys() - also <= {name}, name
    for name, (parameter, owners) in own.items():
        if name in decoding_fields():
            kind = next(kind for kind in ("METHODS", "ORDERS", "REVEALS") if owners[0] in getattr(d5p4, kind))
            owner = {kind.lower()[:-1]: owners[0]}
            reply = server.post(prompt="abc", n=2, max_tokens=2, **owner, **{name: turned(parameter)})
            assert reply.status_code == 200, (name, reply.text)
            assert reply.json()["d5p4"]["settings"][name] == turned(parameter), name


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
def test_every_method_answers_as_offline(client, server):
    for method in d5p4.METHODS:
        ours = fitting({"method": method, "w": 2, "distinct": True, "spare": 3})
        reply = client.completions.create(model=NAME, prompt="abc", n=3, max_tokens=3, seed=7, extra_body=ours)
        result = d5p4.generate(server.model, "abc", k=3, gen_length=3, seed=7, chat=False, **ours)
        assert [choice.text for choice in reply.choices] == result.texts[0], method
        again = d5p4.generate(server.model, "abc", seed=reply.usage.seed, **reply.d5p4["settings"])
        assert again.texts == result.texts, method
        expected = result.score[0, : len(reply.choices)].tolist()
        assert [choice.d5p4["score"] for choice in reply.choices] == pytest.approx(expected, rel=1e-5)


EXTREME = (0, -1, 1, 2, 0.5, 1e-30, -1e-30, 1e-300, 1e30, -1e30, 1e300, 1e6, 2**31, 2**31 - 1, 2**63, -(2**63), 2**100)
WINDOWS = ([0, 0], [1, 2**31], [2, 1], [0, 0, 0])


@pytest.mark.parametrize("rounds", [30, pytest.param(4000, marks=pytest.mark.full)])
@pytest.mark.parametrize("carry_over", [False, True])
def test_extreme_numbers_are_answered_or_refused(carry_over, rounds):
    chance, seen = random.Random(1), set()
    fields = decoding_fields() | {"seed": None}
    usual = sorted({"seed"} | {http_name(name) for name in public("http")} - {"n", "max_tokens", "method"})
    model = FakeModel(carry_over=carry_over, max_length=24)
    with running(model, limits={"max_pool": 32, "max_gen_length": 16}) as server:
        for number in range(rounds):
            method = chance.choice(list(d5p4.METHODS))
            own = [name for name in d5p4.METHODS[method].parameters if name in fields]
            body = {"prompt": chance.choice(["abc", "", "all", ["a", "bb"]]), "n": chance.choice([1, 2, 3])}
            body |= {"max_tokens": 4, "method": method}
            for name in chance.sample(usual, chance.randint(1, 4)) + chance.sample(own, min(2, len(own))):
                kind = fields[name] and fields[name].kind
                known = {bool: (True, False), tuple: WINDOWS}.get(kind) or (kind and fields[name].choices)
                body[name] = chance.choice(known or EXTREME)
            if chance.random() < 0.1:
                body[chance.choice(["n", "max_tokens"])] = chance.choice(EXTREME)
            reply = server.post(**body)
            assert reply.status_code in (200, 400), (number, body, reply.text)
            assert reply.json().keys() & {"choices", "error"}
            seen.add(reply.status_code)
    assert seen == {200, 400}


@pytest.fixture(scope="module")
def tight():
    limits = {"max_pool": 8, "max_gen_length": 4, "max_prompt_tokens": 8, "max_steps": 8, "max_queue": 8}
    with running(FakeModel(max_length=16), limits=limits) as server:
        yield server


def test_the_schema_says_what_is_asked(tight):
    schema = tight.http.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}"}
    for route in schema["paths"].values():
        for operation in route.values():
            assert "422" not in operation["responses"] and "4XX" in operation["responses"]
    parts = schema["components"]["schemas"]
    assert "HTTPValidationError" not in parts
    for kind in request_models():
        assert decoding_fields().keys() <= parts[kind.__name__]["properties"].keys()
    assert "/openapi.json" in tight.http.get("/docs").text
    answer = schema["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("examples", [6, pytest.param(1000, marks=pytest.mark.full)])
def test_made_up_requests(tight, examples):
    """Every operation, with values that fit the schema and values that do not: never a 5xx."""
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    repeatable = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}
    described = schemathesis.openapi.from_dict(tight.http.get("/openapi.json").json())
    described.config.base_url = tight.url
    for parsed in described.get_all_operations():
        operation = parsed.ok()
        for mode in schemathesis.GenerationMode:
            if operation.method == "post" or mode is schemathesis.GenerationMode.POSITIVE:  # any text is a name

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(max_examples=examples, suppress_health_check=list(HealthCheck), **repeatable)
                def ask(case):
                    case.validate_response(case.call(timeout=600), checks=checks)  # however busy the machine is

                ask()
