"""Errors as OpenAI's clients read them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
import reprlib
import traceback
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import D5P4Error
from ..prompts import of_only_prompt
from ..store import json_bytes

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLOSE = {"Connection": "close"}  # the rest of the body will not be read
SENT_WITH: dict[int, dict[str, str]] = {401: {"WWW-Authenticate": "Bearer"}, 408: CLOSE, 413: CLOSE}
OUR_WORDS = {"k=": "n=", "gen_length": "max_tokens"}  # what the library calls a thing -> what the request does
UNKNOWN = "unknown_parameter"
LONGEST_VALUE = 80  # characters of a bad value that are shown


class ApiError(HTTPException):
    """What a request is answered with instead of answers."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        again: bool = True,
    ) -> None:
        """`again` False tells OpenAI's clients, which try most errors three times, that it would be no use."""
        headers = dict(SENT_WITH.get(status, {}))
        headers |= {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers | ({} if again else {"x-should-retry": "false"}))
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status_code, self.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def not_possible(error: D5P4Error, prompt: str = "prompt", prompts: int = 1) -> ApiError:
    """The library's complaint about a request, in the request's words; `prompt` is the field that holds its prompts."""
    message = of_only_prompt(error) if prompts == 1 else str(error)
    for ours, theirs in OUR_WORDS.items():
        message = re.sub(rf"\b{ours}", theirs, message)
    return ApiError(400, message, _at_fault(message, prompt))


def _at_fault(message: str, prompt: str) -> str | None:
    """The field a complaint is about."""
    named = re.search(r"\b([a-z_]+)=|has no parameter ([a-z_]+)|there is no (method)\b", message)
    if named is not None and not message.startswith(("prompt", "the prompt")):
        return next(name for name in named.groups() if name)
    return prompt if "prompt" in message or "token" in message else None


def not_valid(error: ValidationError) -> ApiError:
    """What is wrong with a body: of the ways a field may be, the one that comes nearest."""
    found = error.errors(include_url=False)
    first = next((one for one in found if not one["type"].endswith("_type")), found[0])
    path = [str(part) for part in first["loc"]]
    about = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {about.get('error', first['msg'])}")
    if first["type"] == "refused":
        return ApiError(400, about["said"], about["field"])
    if first["type"] == "unknown":
        return ApiError(400, f"{shown(about['field'])} is not a field of this request", about["field"], UNKNOWN)
    if not path:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}")
    param = path[0]
    named = ".".join(path) if len(path) > 1 and path[1].isdigit() else param  # messages.0.role
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{named} is not a field of this request", param, UNKNOWN)
    if first["type"] == "missing":
        return ApiError(400, f"{named} is missing", param, "missing_required_parameter")
    return ApiError(400, f"{named}={shown(first['input'])}: {first['msg']}", param)


def where(error: BaseException) -> str:
    """An error for the log: what kind and where, not its message, which may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"


def shown(value: Any) -> str:
    """A client's value, short, however long or deep it is."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST_VALUE
_SHORT.maxlevel = 3
