"""Errors as OpenAI's clients read them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import D5P4Error
from ..store import json_bytes

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
NAMES = {"k": "n", "gen_length": "max_tokens"}  # the library's name of an option -> the request's


class ApiError(HTTPException):
    """An error that becomes the response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        retry: bool = True,
    ) -> None:
        """OpenAI's clients repeat most failed requests; `retry=False` tells them that it would not help."""
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        headers |= {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers | ({} if retry else {"x-should-retry": "false"}))
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status_code, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status_code, self.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def not_possible(error: D5P4Error, prompt_field: str = "prompt", prompts: int = 1) -> ApiError:
    """The library's error in the request's words. `prompt_field` is the field that holds its `prompts` prompts."""
    option: Any = getattr(error, "option", None)
    number: int | None = getattr(error, "prompt", None)
    place = "the prompt" if number is not None and prompts == 1 else None
    phrase = getattr(error, "phrase", None)
    message = str(error) if phrase is None else phrase(NAMES, place)
    return ApiError(400, message, NAMES.get(option, option) or (None if number is None else prompt_field))


def describe_failure(error: BaseException) -> str:
    """An error for the log: its kind and place, without its message, which may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"
