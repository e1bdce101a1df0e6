"""Errors as OpenAI's clients read them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import D5P4Error

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OUR_WORDS = {"k=": "n=", "gen_length": "max_tokens"}  # what the library calls a thing -> what the request does
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
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers | ({} if again else {"x-should-retry": "false"}))
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status_code, self.headers)


def encoded(value: Any) -> bytes:
    """JSON; half surrogate pairs, which UTF-8 does not have, stay escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, "application/json")


def not_possible(error: D5P4Error) -> ApiError:
    """The library's complaint about a request, in the request's words."""
    message = str(error)
    for ours, theirs in OUR_WORDS.items():
        message = re.sub(rf"\b{ours}", theirs, message)
    named = re.match(r"(?:prompt \d+: )?([a-z_]+)=", message)
    return ApiError(400, message, named[1] if named else None)


def not_valid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    param = next((part for part in path if not part.isdigit()), None)
    if param is None:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{shown(param)} is not a field of this request", param, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    said = first["msg"].removeprefix("Value error, ")
    message = said if said.startswith(param) else f"{param}={shown(first['input'])}: {said}"
    return ApiError(400, message, param)


def shown(value: Any) -> str:
    text = ascii(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."
