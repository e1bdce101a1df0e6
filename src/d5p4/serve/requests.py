"""Turns the body of a request into prompts that can be decoded, or into an error that says what is wrong or too much.

A request may have OpenAI's fields and every option of a decode (with the openai client, these go into `extra_body`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Optional

from annotated_types import Ge, Le, Len, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from ..errors import D5P4Error, nearest, shown
from ..generate import chosen_seed
from ..jobs.decoder import default_budget, weight_count
from ..jobs.reader import HALF_PAIR
from ..options import Parameter, ServerLimits, Settings, load_plugins, public, registered_parameters
from ..prompts import Request, default_length, prepare
from ..types import Model
from .errors import ApiError, http_name, not_possible

CHARACTERS_PER_TOKEN = 256  # no token is longer, so a model of n tokens cannot hold more than 256 n characters
First = Field(fail_fast=True)  # report only the first error in a list; a body can hold a million errors
Ids = Annotated[list[int], MinLen(1), First]
Texts = Annotated[list[str], Len(1, 4096), First]
Several = Annotated[list[Ids], Len(1, 4096), First]
Stops = Annotated[list[str], MaxLen(4), First]
Seed = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
Number = Annotated[float, Ge(-1e30), Le(1e30)]
Window = Annotated[list[Annotated[int | float, Ge(0), Le(2**31)]], Len(2, 2)]
Whole = Annotated[int, Ge(-(2**31)), Le(2**31)]
TYPES: dict[type, Any] = {int: Whole, float: Number, bool: bool, str: str, tuple: Window, object: Number | str}
TYPES[list] = str | Stops
NAMED = {"json_schema": dict[str, Any] | bool | str, "choices": Texts}  # types of options that are not those of others
"""The types of options. Their ranges are checked with all other rules when a request is prepared."""
UNUSED_TEXTS = ("user", "service_tier", "safety_identifier", "prompt_cache_key", "reasoning_effort", "verbosity")
IGNORED = dict.fromkeys(UNUSED_TEXTS, str) | {"store": bool, "parallel_tool_calls": bool, "metadata": dict[str, Any]}
"""Fields of OpenAI's API that this server accepts and ignores, with their types."""
NEUTRAL: dict[str, list[Any]] = {"frequency_penalty": [0], "presence_penalty": [0], "repetition_penalty": [1]}
NEUTRAL |= {"ignore_eos": [False], "logit_bias": [{}], "echo": [False], "suffix": [""]}
NEUTRAL |= {"tools": [[]], "functions": [[]], "tool_choice": ["none", "auto"], "function_call": ["none", "auto"]}
NEUTRAL |= {"modalities": [["text"]], "top_logprobs": [0]}
"""Fields of OpenAI's and vLLM's APIs that this server does not support, with the values that have no effect."""
GUIDED = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choices"}
GUIDED = {f"guided_{name}": ours for name, ours in GUIDED.items()}
"""vLLM's names of constraints, and ours."""
WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
WORDS |= {tuple: "two numbers [start, stop]", object: "a number or a text", dict[str, Any]: "an object"}
WORDS |= dict.fromkeys(("stream", "history", "return_token_ids", "return_step_maps"), WORDS[bool])
WORDS |= {
    "prompt": "a text, a list of token ids, or a list of up to 4096 texts or lists of token ids",
    "messages": "a list of messages, each with a role and a text as its content",
    "stop": "a text or a list of at most 4 texts",
    "stream_options": "an object with include_usage",
    "response_format": "an object such as {'type': 'json_schema', 'json_schema': {'schema': {...}}}",
    "json_schema": "a JSON schema",
    "choices": "a list of texts",
    "logprobs": "a whole number from 0 to 5, or true or false",
    "model": "a text",
    "seed": "a whole number of 64 bits",
    "max_completion_tokens": "a whole number of at least 1",
    "best_of": "a whole number",
}
"""What a field must be, by its name or by its type."""

HISTORY_ROWS = 128  # the most rows per pool with `history`; a step stores a similarity for every pair of rows
HISTORY_PROMPTS = 16  # the most prompts with `history`; the history of one prompt may be tens of megabytes
CHILDREN_PER_ROW = 64  # with `distinct`, a step may draw at most this number times `max_pool` children
WORK = {"cuda": 100_000.0, "mps": 100.0, "cpu": 6.0}
"""Work allowed per request by kind of device, in units of 10^12 floating-point operations: about one minute on two CPU
cores, and about five minutes on one large GPU."""
SELECTION = 300  # the factor in `work`, from the time on a CPU with 128 beams and pools of 512 rows


def decoding_fields() -> dict[str, Parameter]:
    """Return {name in the request: option} for every option of a decode and every parameter of a method."""
    load_plugins()
    known = public("http") | {name: parameter for name, (parameter, _) in registered_parameters().items()}
    return {option.option.http or name: option for name, option in known.items() if "http" not in option.option.hidden}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Annotated[str, Len(1, 64)]
    content: str | Annotated[list[dict[str, Any]], MaxLen(4096), First] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Any], First] | None = None

    def plain(self) -> dict[str, str]:
        """Return only the role and the text of this message."""
        if self.tool_calls:
            raise ApiError(400, "tool_calls in messages are not supported here; leave them out", "messages")
        parts = self.content if isinstance(self.content, list) else [{"type": "text", "text": self.content or ""}]
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            raise ApiError(400, "messages can hold text only; leave out all other parts", "messages")
        text = "".join(part["text"] for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Body(Strict):
    """The fields that completions and chat completions have in common, without the options of a decode."""

    chat: ClassVar[bool] = False
    field: ClassVar[str] = "prompt"  # the name of the field that holds the prompts

    model: str | None = Field(None, description="The name of the model; may be left out.")
    seed: Seed | None = Field(None, description="The same seed gives the same answers. The usage names the seed.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = Field(None, description="A JSON schema that the answers must have.")
    history: bool | None = Field(None, description="Return the pool of every step with the answers.")
    return_token_ids: bool | None = Field(None, description="Return the token ids of the prompt and of every answer.")
    return_step_maps: bool | None = Field(None, description="Return the step that revealed each token, counted from 1.")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        for name in body if isinstance(body, dict) else ():
            if name not in cls.model_fields:
                known = http_name(name)
                hint = f"use {known}" if known != name else nearest(name[:80], cls.model_fields)
                message = f"{shown(name)} is not a field of this request{hint and '; '}{hint}"
                raise ApiError(400, message, name, "unknown_parameter")
        return body

    def prompts(self) -> list[Any]:
        """Return texts, lists of token ids, or conversations."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `d5p4.generate`, without the options that the request leaves out."""
        values = {option.name: getattr(self, name, None) for name, option in decoding_fields().items()}
        values |= {ours: value for name, ours in GUIDED.items() if (value := getattr(self, name, None)) is not None}
        if (schema := self._schema()) is not None:
            values["json_schema"] = schema
        return {"k": 1} | {name: value for name, value in values.items() if value is not None}

    def _schema(self) -> Any:
        """Return the JSON schema of OpenAI's `response_format`, or None for free text."""
        wanted, name = self.response_format or {"type": "text"}, "response_format"
        given = wanted.get("json_schema")
        schema = given.get("schema") if isinstance(given, dict) else None
        known = {"text": None, "json_object": {"type": "object"}, "json_schema": schema}
        kind = wanted.get("type")
        if kind not in known or (kind == "json_schema" and schema is None):
            raise ApiError(400, f"{name}={shown(wanted)} must be {WORDS[name]}", name)
        return known[kind]

    @model_validator(mode="after")
    def _check(self) -> Body:
        """Raise an error for fields that are not supported and would change the answers."""
        for name, nothing in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in nothing:
                raise ApiError(400, f"{name} is not supported here; leave it out", name)
        return self


class CompletionRequest(Body):
    prompt: str | Ids | Texts | Several = Field(
        description="A text, a list of token ids, or a list of several of these. Mask tokens in a text are filled in."
    )
    logprobs: Annotated[int, Ge(0), Le(5)] | bool | None = Field(
        None, description="0, 1 or true: return each token's log-probability when it was revealed."
    )
    best_of: int | None = Field(None, description='n, or left out. For the best of n * w use the method "best-of-n".')

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.logprobs is not None and self.logprobs > 1:
            message = f"logprobs={self.logprobs}: alternatives are not kept; use 1 for the tokens of the answer"
            raise ApiError(400, message, "logprobs")
        if self.best_of not in (None, self.options()["k"]):
            raise ApiError(400, 'best_of is not supported here; use method "best-of-n" with n and w', "best_of")
        return self

    def prompts(self) -> list[Any]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


class ChatRequest(Body):
    chat = True
    field = "messages"

    messages: Annotated[list[Message], Len(1, 4096), First]
    max_completion_tokens: Annotated[int, Ge(1), Le(2**31)] | None = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description="Return each token's log-probability when it was revealed.")

    def options(self) -> dict[str, Any]:
        length = {} if self.max_completion_tokens is None else {"gen_length": self.max_completion_tokens}
        return length | super().options()

    def prompts(self) -> list[Any]:
        """Return one conversation, or its text if it is a single message of the user."""
        messages = [message.plain() for message in self.messages]
        alone = len(messages) == 1 and messages[0]["role"] == "user"
        return [messages[0]["content"] if alone else messages]


def request_models() -> tuple[type[Body], type[Body]]:
    """Return pydantic models of the requests to both routes, with the parameters of every registered method."""
    extra: dict[str, Any] = {name: (Any, None) for name in NEUTRAL}
    extra |= {name: (Optional[kind], None) for name, kind in IGNORED.items()}  # noqa: UP045
    fields = decoding_fields()
    for name, option in (fields | {name: fields[ours] for name, ours in GUIDED.items()}).items():
        kind = NAMED.get(option.name, TYPES[option.kind])
        extra[name] = (Optional[kind], Field(None, description=option.option.help))  # noqa: UP045
    completion = create_model(CompletionRequest.__name__, __base__=CompletionRequest, **extra)
    return completion, create_model(ChatRequest.__name__, __base__=ChatRequest, **extra)


def not_valid(errors: Sequence[Any], body: Any) -> ApiError:
    """Return an error that says in plain words why pydantic refuses a body."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON; the error is at character {path[0]}")
    if not path or not isinstance(body, dict):
        return ApiError(400, f"the body must be a JSON object, not {shown(body)}")
    name = str(path[0])
    if name not in body:
        return ApiError(400, f"{name} is missing", name, "missing_required_parameter")
    option, most = decoding_fields().get(GUIDED.get(name, name)), first.get("ctx", {}).get("le")
    words = WORDS.get(GUIDED.get(name, name)) or WORDS[option.kind if option else IGNORED[name]]
    if option:
        words = f"{words} {option.range() if most is None else f'of at most {most:g}'}".strip()
    return ApiError(400, f"{name}={shown(body[name])} must be {words}", name)


class Limits(ServerLimits):
    """The limits of a server, and what they refuse."""

    def work_allowed(self, model: Model) -> float:
        """Return how many operations a request may take. By default, one answer of default length is always allowed."""
        if self.max_work is not None:
            return 1e12 * self.max_work
        length = model.generation_defaults.get("length") or default_length(model, Settings())
        default = work(model, Settings.make(model, k=1), [(min(2 * length, model.max_length), length)])
        return max(1e12 * WORK.get(model.head.weight.device.type, WORK["cpu"]), default)

    def check(self, settings: Settings, requests: Sequence[Request], window: int, history: bool, field: str) -> None:
        """Raise an error if a request is beyond a limit. window: the number of tokens of the longest answer."""
        rows, steps, tokens = settings.pool_size, settings.steps or window, max(len(one.ids) for one in requests)
        finishes = settings.spec.search(settings).finishes
        parents = rows if finishes or settings.select_window is not None else settings.groups
        children = 4 * settings.w * parents if settings.distinct else 0
        wide = f", w={settings.w}" if settings.spec.branches else ""
        pool = f"n={settings.k}{wide} and spare={settings.spare} make a pool of {rows} rows"
        draws = f"w={settings.w} and distinct draw {children} children per step (lower w, or set distinct to false)"
        cases: list[tuple[int, int | None, str, str]] = [
            (rows, self.max_pool, "n", pool),
            (children, CHILDREN_PER_ROW * self.max_pool, "w", draws),
            (tokens, self.max_prompt_tokens, field, f"the prompt has {tokens} tokens"),
            (window, self.max_gen_length, "max_tokens", f"max_tokens={window}"),
            (steps, self.max_steps, "steps", f"this request takes {steps} steps (set steps to a lower number)"),
            (rows * history, HISTORY_ROWS, "history", f"history with a pool of {rows} rows"),
            (len(requests) * history, HISTORY_PROMPTS, "history", f"history with {len(requests)} prompts"),
        ]
        for value, most, param, subject in cases:
            if most is not None and value > most:
                code = "context_length_exceeded" if param == field else None
                raise ApiError(400, f"{subject}; this server takes at most {most}", param, code)

    def check_work(self, model: Model, prompts: Sequence[tuple[int, int]], settings: Settings) -> None:
        """Raise an error if a request is too much work. The message says what would fit. prompts: see `work`."""
        allowed, n = self.work_allowed(model), settings.k
        fitting = next((k for k in range(n, 0, -1) if work(model, replace(settings, k=k), prompts) <= allowed), 0)
        if fitting == n:
            return
        if fitting:
            message = f"n={n} is more work than this server does per request; the largest n that fits is {fitting}"
            raise ApiError(400, message, "n")
        per_step = work(model, replace(settings, k=1), [(tokens, 1) for tokens, _ in prompts])
        steps = int(allowed / per_step)
        advice = f"set steps to {steps} or less" if steps else "ask for fewer prompts or tokens"
        raise ApiError(400, f"even n=1 is more work than this server does per request; {advice}", "steps")


def work(model: Model, settings: Settings, prompts: Sequence[tuple[int, int]]) -> float:
    """Return the number of floating-point operations of a request in the worst case, when all rows of a pool differ.

    prompts: (tokens per row, steps) of each prompt. A forward takes two operations per parameter and token. Guidance
    runs every row twice. A selection of g beams from N candidates takes as long as SELECTION g^2 N s operations, where
    s is the number of starts of the selection. A method may say how many more pools it runs, and what N s is (`cost`).
    """
    rows = settings.pool_size * (1 if settings.guidance == 1 else 2)
    per_token = 2.0 * weight_count(model) * rows
    search = settings.spec.search(settings)
    operations = 0.0
    for tokens, steps in prompts:
        pools, compared = search.cost(settings, steps)
        operations += per_token * tokens * (steps + pools) + SELECTION * settings.groups**2 * compared * steps
    return operations


@dataclass(frozen=True)
class Ask:
    """A request that is ready to be decoded."""

    body: Body
    settings: Settings
    seed: int
    prompts: list[Any]  # as the client sent them: texts, lists of token ids, or messages
    requests: list[Request]
    windows: list[int]  # the number of tokens to decode per prompt


def understand(model: Model, body: Body, limits: Limits, fixed: dict[str, Any]) -> Ask:
    """Check a request and prepare it. `fixed` holds the options of `d5p4.generate` that the server sets."""
    prompts, field = body.prompts(), body.field
    if len(prompts) > limits.max_queue:
        raise ApiError(400, f"there are {len(prompts)} prompts; this server takes at most {limits.max_queue}", "prompt")
    _check_text(model, prompts, field, getattr(body, "stop", None) or ())
    options = body.options()
    if (steps := options.get("steps", 0)) > limits.max_steps:
        raise ApiError(400, f"steps={steps}; this server takes at most {limits.max_steps}", "steps")
    options |= fixed | {"chat": None if body.chat else False, "logprobs": True}
    try:
        prepared = prepare(model, prompts, options, budget=default_budget(model))
        settings, requests, longest = prepared.settings, prepared.requests, limits.max_gen_length
        if longest and not prepared.length_given and any(one.append > longest for one in requests):
            settings = replace(settings, gen_length=longest)
            requests = [replace(one, append=min(one.append, longest)) for one in requests]
        windows = [len(request.window(model.mask_id)) for request in requests]
        limits.check(settings, requests, max(windows), bool(body.history), field)
        sizes = [(one.length, settings.steps or window) for one, window in zip(requests, windows, strict=True)]
        limits.check_work(model, sizes, settings)
    except D5P4Error as error:
        raise not_possible(error, field, len(prompts)) from error
    return Ask(body, settings, chosen_seed(body.seed), prompts, requests, windows)


def _check_text(model: Model, prompts: Sequence[Any], field: str, stops: Sequence[str]) -> None:
    """Refuse a text that is not valid, or that is so long that encoding it would take seconds."""
    for name, text in [*((field, _text_of(prompt)) for prompt in prompts), ("stop", "".join(stops))]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiError(400, f"{name} is {HALF_PAIR}; leave it out", name) from None
        if name == field and len(text) > CHARACTERS_PER_TOKEN * model.max_length:
            message = f"the prompt has {len(text)} characters, but the model holds only {model.max_length} tokens"
            raise ApiError(400, message, field, "context_length_exceeded")


def _text_of(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(text for message in prompt if isinstance(message, dict) for text in message.values())
