"""Errors in the form that OpenAI's clients expect: a status, and {"error": {"message", "type", "param", "code"}}."""

import traceback
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import D5P4Error
from ..options import public
from ..store import json_bytes

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """OpenAI's clients repeat most failed requests. `retry=False` tells them not to repeat this one."""
        own = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        own |= {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, {**own, **(headers or {})} | ({} if retry else {"x-should-retry": "false"}))
        self.message, self.param, self.code = message, param, code

    def response(self) -> Response:
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status_code, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json_response({"error": error}, self.status_code, self.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def not_possible(error: D5P4Error, prompt_field: str = "prompt", prompts: int = 1) -> ApiError:
    """Turn the library's error into a response with the request's field names. `prompts` is the number of prompts."""
    param = http_name(error.option) if error.option is not None else None if error.prompt is None else prompt_field
    return ApiError(400, error.phrase(http_name, "" if prompts == 1 else None), param)


def http_name(option: str) -> str:
    """Return the name that an option has in requests."""
    parameter = public("http").get(option)
    return (parameter and parameter.option.http) or option


def describe_failure(error: BaseException) -> str:
    """Describe an error for the log by its type and place. Its message is left out because it may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"
