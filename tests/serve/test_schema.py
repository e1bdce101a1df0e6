"""Requests made up from the server's own schema: never a 5xx, and answers as the schema says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from d5p4.decode.measures import FEATURES, KINDS, NORMALISERS, POSITIONS, SIMILARITIES
from d5p4.methods import METHODS
from d5p4.project import ORDERS
from d5p4.serve.requests import NEUTRAL, NEUTRAL_IN_CHAT, NEUTRAL_IN_COMPLETIONS
from tests.fake import FakeModel, Letters
from tests.serve.running import NAME, running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
REPEATABLE = {"deadline": None, "derandomize": True, "database": None, "phases": [Phase.generate]}
LIMITS = {"max_pool": 8, "max_gen_length": 4, "max_prompt_tokens": 8, "max_steps": 8, "max_queue": 8}


class Polyglot(Letters):
    """Every character is a token."""

    def encode(self, text):
        return [ord(c) % 11 for c in text]


@pytest.fixture(scope="module")
def tight():
    model = FakeModel(max_length=16)
    model.tokenizer = Polyglot()
    with running(model, limits=LIMITS) as server:
        yield server


SENSIBLE = {
    "model": [NAME],
    "method": list(METHODS),
    "order": ["ancestral", *ORDERS],
    "eos": ["last", "free", "never"],
    "quality": list(KINDS),
    "positions": list(POSITIONS),
    "normalise": list(NORMALISERS),
    "features": list(FEATURES),
    "feature_layer": ["model", "head"],
    "similarity": list(SIMILARITIES),
    "n": [1, 2],
    "w": [1, 2, 4],
    "max_tokens": [1, 3],
    "steps": [None, 1],
    "block_length": [None, 1],
    "temperature": [0.5, 2.0],
    "guidance": [1.0, 1.5],
    "guidance_window": [None, [0, 1]],
    "select_window": [None, [0, 1]],
    "max_completion_tokens": [2],
    "best_of": [None],
    "seed": [1, 2**63 - 1],
}
for _name, _values in (NEUTRAL | NEUTRAL_IN_CHAT | NEUTRAL_IN_COMPLETIONS).items():
    SENSIBLE[_name] = [*_values, None]
"""Values that are not refused, so that what is made up gets as far as a decode."""


def narrowed(schema):
    for kind in ("CompletionRequest", "ChatRequest"):
        fields = schema["components"]["schemas"][kind]["properties"]
        for name, values in SENSIBLE.items():
            if name in fields:
                fields[name] = {"enum": values}
        for method in METHODS.values():
            for name in method.parameters:
                fields.pop(name, None)  # belong to one method each
        for name in ("top_logprobs", "stop"):
            fields.pop(name, None)
    return schema


def test_the_schema_says_what_is_answered(tight):
    schema = tight.http.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}"}
    for route in schema["paths"].values():
        for operation in route.values():
            assert "422" not in operation["responses"] and "4XX" in operation["responses"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "n", "stop", "beta", "guidance_window"} <= fields.keys()
    assert {"return_token_ids", "return_step_maps"} <= fields.keys()
    parts = schema["components"]["schemas"]
    assert {"token_ids", "step_map"} <= parts["Choice"]["properties"].keys() & parts["ChatChoice"]["properties"].keys()
    assert "prompt_token_ids" in parts["Choice"]["properties"].keys() & parts["ChatCompletion"]["properties"].keys()
    assert "/openapi.json" in tight.http.get("/docs").text
    answer = schema["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "text/event-stream"}


def check(tight, examples):
    """Every operation, with values that fit the schema and values that do not; then sensible ones."""
    seen = {}
    for change in (lambda schema: schema, narrowed):
        drive_all(tight, change(tight.http.get("/openapi.json").json()), examples, seen)
    return seen


def drive_all(tight, described, examples, seen):
    schema = schemathesis.openapi.from_dict(described)
    schema.config.base_url = tight.url
    for parsed in schema.get_all_operations():
        operation = parsed.ok()
        for mode in schemathesis.GenerationMode:
            if operation.method == "post" or mode is schemathesis.GenerationMode.POSITIVE:  # any text is a name
                drive(operation.as_strategy(generation_mode=mode), examples, seen)


def drive(strategy, examples, seen):
    @given(case=strategy)
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), **REPEATABLE)
    def ask(case):
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1

    ask()


@pytest.mark.parametrize("examples", [6, pytest.param(1000, marks=pytest.mark.full)])
def test_made_up_requests(tight, examples):
    seen = check(tight, examples)
    print(seen)
    assert seen[200] >= 5 and seen[400] >= 5, seen
