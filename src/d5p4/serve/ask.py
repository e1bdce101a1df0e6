"""From a request's body to prompts that can be decoded, or a sentence that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import D5P4Error
from ..generate import Occurrences, chosen_seed, schedule_for
from ..jobs.budget import default_budget
from ..prompts import Request, encode, plan
from ..settings import Settings
from ..types import Model
from .errors import ApiError, not_possible
from .limits import DRAWN_A_ROW, LARGEST_HISTORY, MOST_HISTORIES, Limits
from .schema import Asked, ChatRequest, CompletionRequest

LONGEST_TOKEN = 256  # characters; only runs of blanks come near


@dataclass(frozen=True)
class Ask:
    """A request, understood."""

    body: Asked
    settings: Settings
    seed: int
    prompts: list[Any]  # as asked
    requests: list[Request]
    keys: list[int]
    alike: list[tuple[str, int]]  # for each prompt, what it must share with another to share its decode


def understand(model: Model, body: Asked, limits: Limits, fixed: dict[str, Any]) -> Ask:
    """`fixed`: options of `d5p4.generate` that the server decides."""
    prompts = _prompts(model, body)
    field = "messages" if isinstance(body, ChatRequest) else "prompt"
    try:
        options = body.options()
        if options["k"] > 1 and "distinct" not in model.generation_defaults:
            options.setdefault("distinct", True)
        chat = None if isinstance(body, ChatRequest) else False
        settings = Settings.make(model, **options, **fixed, chat=chat, logprobs=True)
        if "max_tokens_per_forward" not in fixed | dict(model.generation_defaults):
            budget = default_budget(model, settings.deterministic)
            settings = replace(settings, max_tokens_per_forward=budget)
        if settings.spec.finish is not None:
            settings.spec.finish(settings, None, None)  # it checks what there is to rank by
        _check_pool(settings, limits)
        if settings.distinct and "spare" not in options | dict(model.generation_defaults):
            settings = replace(settings, spare=settings.k if settings.k > 1 else 0)  # so that n answers differ
        _check_size(settings, body, limits)
        if len(prompts) > limits.max_queue:
            raise ApiError(400, f"there are {len(prompts)} prompts; this server takes {limits.max_queue}", "prompt")
        if body.history and len(prompts) > MOST_HISTORIES:
            raise ApiError(400, f"history is kept for up to {MOST_HISTORIES} prompts, not {len(prompts)}", "history")
        _check_texts(model, prompts, field)
        ids = [encode(model, prompt, chat, number) for number, prompt in enumerate(prompts)]
        _check_prompts(ids, limits, field)
        given = body.length() is not None
        settings = _within(model, settings, given, max(map(len, ids)), limits)
        requests = [plan(model, row, settings, given, number) for number, row in enumerate(ids)]
        lengths = [len(request.window(model.mask_id)) for request in requests]
        for length in sorted(set(lengths)):
            if limits.max_gen_length is not None and length > limits.max_gen_length:
                most = limits.max_gen_length
                raise ApiError(400, f"max_tokens={length}: this server writes at most {most} tokens", "max_tokens")
            if len(schedule_for(length, settings).steps) > limits.max_steps:
                raise ApiError(400, f"{length} steps, one a token: this server takes {limits.max_steps}; set steps")
    except D5P4Error as error:
        raise not_possible(error, field, len(prompts)) from error
    name = json.dumps(settings.to_dict(), sort_keys=True)
    return Ask(
        body=body,
        settings=settings,
        seed=chosen_seed(body.seed),
        prompts=prompts,
        requests=requests,
        keys=Occurrences().keys(ids, [None] * len(ids)),
        alike=[(name, length) for length in lengths],
    )


def _check_pool(settings: Settings, limits: Limits) -> None:
    """What the request asks for; spare beams that the server adds do not count."""
    if settings.pool_size > limits.max_pool:
        given = {"n": settings.k, "w": settings.w if settings.spec.wide else None, "spare": settings.spare or None}
        size = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        pool = f"a pool of {settings.pool_size} rows; this server takes {limits.max_pool}"
        raise ApiError(400, f"{size}: {pool}", "n")


def _check_size(settings: Settings, body: Asked, limits: Limits) -> None:
    selects = settings.spec.finish is None and settings.select_window is None
    drawn = 4 * settings.w * (settings.groups if selects else settings.pool_size) if settings.distinct else 0
    if drawn > (most := DRAWN_A_ROW * limits.max_pool):
        said = f"n={settings.k}, w={settings.w} and distinct draw {drawn} children a step; this server takes {most}"
        raise ApiError(400, f"{said}; lower w, or set distinct to false", "w")
    if (settings.steps or 0) > limits.max_steps:
        raise ApiError(400, f"steps={settings.steps}: this server takes at most {limits.max_steps}", "steps")
    if body.history and settings.pool_size > LARGEST_HISTORY:
        said = f"history is kept for pools of up to {LARGEST_HISTORY} rows, not {settings.pool_size}"
        raise ApiError(400, f"{said}; lower n, w or spare", "history")


def _check_texts(model: Model, prompts: Sequence[Any], field: str) -> None:
    """A text far beyond what the model holds is not worth the seconds that encoding it takes."""
    most = LONGEST_TOKEN * model.max_length
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else [part["content"] for part in prompt if isinstance(part, dict)]
        if (size := sum(map(len, texts))) > most:
            said = f"the prompt has {size} characters, and the model holds {model.max_length} tokens"
            raise ApiError(400, said, field, "context_length_exceeded")


def _check_prompts(ids: Sequence[Sequence[int]], limits: Limits, param: str) -> None:
    most = limits.max_prompt_tokens
    longest = max(map(len, ids))
    if most is not None and longest > most:
        said = f"the prompt has {longest} tokens; this server takes {most}"
        raise ApiError(400, said, param, "context_length_exceeded")


def _within(model: Model, settings: Settings, given: bool, prompt: int, limits: Limits) -> Settings:
    """max_tokens is the most a client wants, so it gives way to the room the model has; a length nobody asked for also
    to the server's limit."""
    length = settings.gen_length or (model.max_length if model.carry_over else 128)
    most = max(1, model.max_length - prompt) if given else limits.max_gen_length
    return settings if most is None else replace(settings, gen_length=min(length, most))


def _prompts(model: Model, body: Asked) -> list[Any]:
    """One entry a prompt: text, ids or messages. A user's one message is plain text where there is no template."""
    if isinstance(body, ChatRequest):
        messages = [message.plain() for message in body.messages]
        if has_template(model):
            return [messages]
        if len(messages) > 1 or messages[0]["role"] != "user":
            said = "this model has no chat template, so it takes one message of the user's and no others"
            raise ApiError(400, f"{said}; leave them out, or use /v1/completions", "messages")
        return [messages[0]["content"]]
    assert isinstance(body, CompletionRequest)
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def has_template(model: Model) -> bool:
    try:
        return model.tokenizer is not None and model.tokenizer.chat([{"role": "user", "content": "a"}]) is not None
    except D5P4Error:  # it has one, which wants another conversation
        return True
