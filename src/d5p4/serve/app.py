"""The HTTP app: OpenAI's routes, the playground, and what operators look at."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from ..__about__ import __version__
from ..types import Model
from ..view import page_folder
from .card import card
from .engine import Engine
from .errors import ApiError, json_response
from .guard import Guard
from .limits import Limits
from .replies import ChatCompletion, Completion, ErrorBody, ModelEntry, ModelList
from .respond import Reply
from .schema import Asked, ChatRequest, CompletionRequest
from .stream import EventStream
from .wait import attended, left

log = logging.getLogger("d5p4.serve")

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
}
NOT_HERE = "this is not served here; there are /v1/completions, /v1/chat/completions and /v1/models"
STREAM: dict[str, Any] = {"text/event-stream": {}}  # with stream: true
POSTED: dict[int | str, dict[str, Any]] = ERRORS | {200: {"content": STREAM}}


def create_app(
    model: Model | Callable[[], Model],
    *,
    name: str,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
    log_prompts: bool = False,
    failed: Callable[[BaseException], None] | None = None,
    **fixed: Any,
) -> FastAPI:
    """An ASGI app that serves one model.

    model     a loaded model, or a function that loads it; until it has, /readyz and requests are answered with 503
    name      what clients call the model
    api_key   a bearer token that requests must show
    hosts     names the server may be called by (None: any); keeps pages of other sites from reaching it by a name of
              their own
    log_prompts  write what is asked into the log
    failed    hears why the model could not be loaded
    fixed     options of `d5p4.generate` that the server decides: deterministic, max_tokens_per_forward
    """
    limits = limits or Limits()
    engine = Engine(_loader(model), limits, fixed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start(failed or (lambda error: None))
        yield
        await engine.stop()

    app = FastAPI(
        title="d5p4", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
        description="n different good answers from a masked diffusion language model.",
    )  # fmt: skip
    app.state.engine = engine
    app.add_middleware(Guard, limits=limits, metrics=engine.metrics, api_key=api_key, hosts=hosts)
    _answer_errors(app)
    _serve_page(app)
    _look_after(app, engine)
    started = int(time.time())

    told: dict[str, Any] = {}  # of the model, once it is there

    def entry() -> dict[str, Any]:
        model = engine.model
        if not told:
            told.update(card(model, limits))
        return {"id": name, "object": "model", "created": started, "owned_by": "d5p4", "d5p4": told}

    @app.get("/v1/models", response_model=ModelList, responses=ERRORS)
    async def models() -> Response:
        return json_response({"object": "list", "data": [entry()]})

    @app.get("/v1/models/{model:path}", response_model=ModelEntry, responses=ERRORS)
    async def one_model(model: str) -> Response:
        _check_name(model, name)
        return json_response(entry())

    async def serve(kind: type[Asked], request: Request) -> Response:
        end = asyncio.get_running_loop().time() + limits.timeout
        data = await request.body()
        body = await engine.valid(kind, data)
        if body.model is not None:
            _check_name(body.model, name)
        ask = await engine.understand(body, len(data), end)
        if log_prompts:
            log.info("asked: %r", ask.prompts)
        jobs = engine.submit(ask)
        reply = Reply(ask, engine.model, name)
        if body.stream:
            return EventStream(engine, jobs, reply, end)
        async with attended(engine, jobs, request.receive, end):
            try:
                finished = await engine.answers(jobs)
            except asyncio.CancelledError:
                if not left(jobs):
                    raise
                return Response(status_code=499)  # nobody reads it
        data = await asyncio.to_thread(lambda: reply.encoded(reply.whole(finished), finished))
        return Response(data, media_type="application/json")

    @app.post("/v1/completions", response_model=Completion, responses=POSTED, openapi_extra=_asks(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await serve(CompletionRequest, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=POSTED, openapi_extra=_asks(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await serve(ChatRequest, request)

    _describe(app)
    return app


def _asks(kind: type[Asked]) -> dict[str, Any]:
    """What a route takes, for the schema; the body is read and checked by hand, off the loop where it is large."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI) -> None:
    """The schema: with what requests hold, and without the 422 that FastAPI adds, for what is not valid is a 400."""
    written = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = written()
            for route in found["paths"].values():
                for operation in route.values():
                    operation["responses"].pop("422", None)
            schemas = found["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for kind in (CompletionRequest, ChatRequest):
                own = kind.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= own.pop("$defs", {})
                schemas[kind.__name__] = own
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _loader(model: Model | Callable[[], Model]) -> Callable[[], Model]:
    loaded: Any = model
    return (lambda: loaded) if hasattr(loaded, "body") else loaded


def _check_name(asked: str, name: str) -> None:
    if asked != name:
        raise ApiError(404, f"there is no model {asked!r} here; there is {name!r}", "model", "model_not_found")


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def ours(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def others(request: Request, error: HTTPException) -> Response:
        said = NOT_HERE if error.status_code == 404 else str(error.detail)
        found = ApiError(error.status_code, said).response()
        found.headers.update(error.headers or {})
        return found


def _serve_page(app: FastAPI) -> None:
    folder = page_folder()
    app.mount("/page", StaticFiles(directory=folder), name="page")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(folder / "index.html", headers={"cache-control": "no-cache"})


def _look_after(app: FastAPI, engine: Engine) -> None:
    @app.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    async def alive() -> Response:
        return json_response({"status": "alive"})

    @app.api_route("/readyz", methods=["GET", "HEAD"], include_in_schema=False)
    async def ready() -> Response:
        return json_response({"status": engine.state}, 200 if engine.state == "ready" else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
