"""The HTTP app: OpenAI's routes, the playground, health checks and metrics, and a guard that checks every request."""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from typing import Any, cast

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..__about__ import __version__
from ..errors import D5P4Error
from ..eval.graders import grader_of
from ..options import Settings, draws_first, registries
from ..resolve import resolve
from ..result import finite
from ..search import METHODS
from ..types import Model
from ..view import page_folder
from ..view.trace import describe
from .engine import Engine, Metrics
from .errors import ApiError, describe_failure, json_response
from .requests import Body, Limits, decoding_fields, not_valid, request_models, understand
from .respond import EventStream, Reply

log = logging.getLogger("d5p4.serve")

OPEN_PATHS = ("/health", "/healthz", "/readyz", "/docs", "/openapi.json", "/", "/favicon.ico")
"""Paths that need no key. The playground's files under /page/ need no key either."""
METHODS_LOGGED = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # all others are logged as "other"
HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")  # an address in brackets or a name, and a port
NO_SNIFF = (b"x-content-type-options", b"nosniff")
PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = [(b"content-security-policy", PAGE_POLICY), (b"referrer-policy", b"no-referrer")]
NOT_HERE = "this server has no such path; use /v1/completions, /v1/chat/completions or /v1/models"
LEFT = 499  # the log and the metrics have this status if the client left before the response; nobody gets it
READ_ANYWAY = 8 << 20  # of a body over the limit, this many more bytes are read, so that the client gets the error
ERRORS: dict[int | str, Any] = dict.fromkeys(("4XX", "5XX"), {"description": "An error in the form of OpenAI's API"})
STREAM: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}
EXAMPLES = [{"label": "a cold morning", "prompt": "It was a cold morning and", "max_tokens": 48}]
CHAT_EXAMPLES: list[dict[str, Any]] = [{"label": "a river", "prompt": "Name a river and say one thing about it."}]


def create_app(
    model: Model | Callable[[], Model],
    *,
    name: str,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
    cors_origins: Sequence[str] = (),
    log_prompts: bool = False,
    failed: Callable[[BaseException], None] | None = None,
    **fixed: Any,
) -> FastAPI:
    """Create an ASGI app that serves one model.

    model     a loaded model, or a function that loads one. While it loads, /readyz and all requests get status 503
    api_key   a bearer token that requests must send
    hosts     the host names that requests may use (None: any), so that no web page can point its own name here
    cors_origins  web pages of these origins, such as "https://example.org", may use the server ("*": all pages)
    failed    is called with the error if the model cannot be loaded, or cannot be used with `fixed`
    fixed     options that the server sets for all requests: deterministic, cache, max_tokens_per_forward
    """
    limits = limits or Limits()
    engine, loaded = Engine(limits), cast(Any, model)
    started, (completion_request, chat_request) = int(time.time()), request_models()

    def load() -> Model:
        served: Model = loaded if hasattr(loaded, "body") else loaded()
        resolve(served, fixed)  # raises an error now if no request could use these options with this model
        return served

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start(load, failed or (lambda error: None))
        yield
        await engine.stop()

    app = FastAPI(
        title="d5p4",
        version=__version__,
        description="n different good answers from a masked diffusion language model.",
        lifespan=lifespan,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        responses=ERRORS,
        dependencies=[Depends(HTTPBearer(auto_error=False))] if api_key else [],  # for the schema; Guard checks keys
    )
    app.state.engine = engine
    app.add_middleware(Guard, max_body=limits.max_body, metrics=engine.metrics, api_key=api_key, hosts=hosts)
    if cors_origins:  # added last, around Guard, so that web pages can read Guard's errors too
        origins = list(cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])

    @app.exception_handler(HTTPException)
    async def answer_error(_: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        message = {400: "the body cannot be read as JSON", 404: NOT_HERE}.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(_: Request, error: RequestValidationError) -> Response:
        return not_valid(error.errors(), error.body).response()

    def check_name(asked: str | None) -> None:
        if asked not in (None, name):
            raise ApiError(404, f"this server has no model {asked!r}, only {name!r}", "model", "model_not_found")

    @cache
    def entry() -> dict[str, Any]:
        about = card(engine.model, limits)
        return {"id": name, "object": "model", "created": started, "owned_by": "d5p4", "d5p4": about}

    async def answer(body: Body, request: Request) -> Response:
        check_name(body.model)
        end = asyncio.get_running_loop().time() + limits.timeout
        ask = await engine.within(end, lambda: understand(engine.model, body, limits, fixed))
        if log_prompts:
            log.info("asked: %r", ask.prompts)
        jobs, reply = engine.submit(ask), Reply(ask, engine.model, name)
        if body.stream:
            return EventStream(engine, jobs, reply, end)
        async with engine.attend(jobs, request.receive, end):
            finished = await engine.answers(jobs)
        if finished is None:
            return Response(status_code=LEFT)
        return await asyncio.to_thread(lambda: json_response(reply.complete(finished)))

    @app.post("/v1/completions", responses=STREAM)
    async def completions(body: completion_request, request: Request) -> Response:  # type: ignore[valid-type]
        return await answer(body, request)

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat_completions(body: chat_request, request: Request) -> Response:  # type: ignore[valid-type]
        return await answer(body, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [await asyncio.to_thread(entry)]})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        check_name(model)
        return json_response(await asyncio.to_thread(entry))

    folder = page_folder()
    unlisted: dict[str, Any] = {"methods": ["GET", "HEAD"], "include_in_schema": False}
    app.mount("/page", StaticFiles(directory=folder), name="page")

    @app.api_route("/", **unlisted)
    async def page() -> FileResponse:
        return FileResponse(folder / "index.html", headers={"cache-control": "no-cache"})

    @app.api_route("/health", **unlisted)
    @app.api_route("/healthz", **unlisted)
    async def alive() -> Response:
        return json_response({"status": "alive"})

    @app.api_route("/readyz", **unlisted)
    async def ready() -> Response:
        return json_response({"status": engine.state}, 200 if engine.state == "ready" else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def card(model: Model, limits: Limits) -> dict[str, Any]:
    """Return the field `d5p4` of a model in /v1/models. Its options have the names of the request's fields."""
    chat, defaults = bool(getattr(model.tokenizer, "has_chat", False)), model.generation_defaults
    task, fields = grader_of(model), decoding_fields()
    examples = defaults.get("examples") or [{"label": a, "prompt": b} for a, b in (task.examples if task else ())]

    def defaults_of(method: str) -> dict[str, Any]:
        """Return the options that a method uses with this model if a request names none."""
        try:
            options = Settings.make(model, method=method).options()
        except D5P4Error:  # the model's defaults do not fit this method
            return {}
        return {name: options[field.name] for name, field in fields.items() if field.name in options}

    options = {
        name: {"python": field.name, "kind": field.kind.__name__, "choices": field.choices}
        | {"help": field.option.help, "group": field.option.group}
        for name, field in fields.items()
    }
    methods = [
        {"name": one.name, "summary": one.summary, "tree": one.tree}
        | {"own": list(one.parameters), "defaults": defaults_of(one.name)}
        | {"unused": [name for name, field in fields.items() if field.name in one.unused]}
        for one in METHODS.values()
    ]
    _, orders, reveals = registries()
    about = {
        "description": task and task.about,
        "examples": examples or (CHAT_EXAMPLES if chat else EXAMPLES),
        "chat": chat,
        "default_method": defaults.get("method", Settings.method),
        "options": options,
        "methods": methods,
        "orders": [{"name": name, "draws_first": draws_first(name)} for name in orders],
        "reveals": [
            {"name": one.name, "adaptive": one.adaptive, "own": list(one.parameters)} for one in reveals.values()
        ],
        "limits": asdict(limits) | {"max_work": limits.work_allowed(model) / 1e12},
    }
    return finite(describe(model) | about)


class Guard:
    """ASGI middleware around the whole app. It refuses requests that are not allowed, and logs one line per request."""

    def __init__(
        self, app: ASGIApp, max_body: int, metrics: Metrics, api_key: str | None, hosts: Sequence[str] | None
    ) -> None:
        self.app, self.max_body, self.metrics = app, max_body, metrics
        self.key = None if api_key is None else sha256(api_key.strip().encode()).digest()
        self.hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, begun, size = time.monotonic(), 500, False, 0
        too_large = ApiError(413, f"the body is larger than {self.max_body} bytes")

        async def receive_some() -> Message:
            nonlocal size
            while True:
                message = await receive()
                size += len(message.get("body", b""))
                if size <= self.max_body:
                    return message
                if size > self.max_body + READ_ANYWAY or not message.get("more_body"):
                    raise too_large

        async def send_guarded(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                on_page = scope["path"] == "/" or scope["path"].startswith("/page/")
                message["headers"] = [*message["headers"], NO_SNIFF, *(PAGE_HEADERS if on_page else ())]
            await send(message)

        try:
            self._check(scope)
            if int(dict(scope["headers"]).get(b"content-length", 0)) > self.max_body + READ_ANYWAY:
                raise too_large
            await self.app(scope, receive_some, send_guarded)
        except ApiError as error:
            await error.response()(scope, receive, send_guarded)
        except Exception as error:
            log.error("a request failed: %s", describe_failure(error))
            if not begun:
                message = "the server failed to answer this request; its log says where"
                await ApiError(500, message).response()(scope, receive, send_guarded)
        finally:
            route, seconds = getattr(scope.get("route"), "path", "other"), time.monotonic() - start
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            method = scope["method"] if scope["method"] in METHODS_LOGGED else "other"
            log.info("%s %s %d %.0f ms", method, route, status, 1000 * seconds)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        parts = HOST.fullmatch(host)
        name = (parts[1] or parts[2]) if parts else host
        if self.hosts is not None and name not in self.hosts:
            message = f"this server does not accept the host name {name!r}"
            raise ApiError(403, f"{message}; to allow the name, start the server with --allowed-host {name}")
        if self.key is not None and not (scope["path"] in OPEN_PATHS or scope["path"].startswith("/page/")):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            digest = sha256(given.strip()).digest()  # its length is fixed, so all comparisons take the same time
            if scheme.lower() != b"bearer" or not hmac.compare_digest(digest, self.key):
                raise ApiError(401, "send the server's key as a bearer token", code="invalid_api_key")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":  # a page of another site can send this type only if CORS allows it
                raise ApiError(415, "the body must be JSON, with content-type application/json")
