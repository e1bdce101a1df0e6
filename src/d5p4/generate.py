"""`generate` takes prompts and returns k good and different answers to each."""

import secrets
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .decode.answers import merged
from .decode.batch import Arrivals
from .decode.cache import CACHE_BYTES, bytes_per_token
from .decode.loop import decode
from .decode.ranks import ALONE, Ranks
from .errors import D5P4Error, DuplicateAnswers
from .models import load
from .options import Settings, parameters_of, plain_number
from .progress import bar, both
from .prompts import Name, Request, layout, prepare, schedule_for
from .result import Result
from .rng import key_of
from .types import Callback, Model

BUCKET = 64  # under `deterministic`, all row lengths are multiples of this number
BASIC = tuple(name for name, p in parameters_of(Settings).items() if p.option.group == "basic")


def generate(
    model: Model | str | Path,
    prompts: Any = None,
    *,
    k: int | None = None,
    method: str | None = None,
    w: int | None = None,
    gen_length: int | None = None,
    steps: int | None = None,
    block_length: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    order: str | None = None,
    reveal: str | None = None,
    guidance: float | None = None,
    distinct: bool | None = None,
    spare: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    json_schema: dict[str, Any] | str | None = None,
    chat: bool | None = None,
    seed: int | None = None,
    progress: bool = False,
    callback: Callback | None = None,
    keys: Sequence[Name] | None = None,
    sets: int | None = None,
    scorer: Callable[..., Any] | None = None,
    references: Sequence[Any] | None = None,
    ranks: Ranks = ALONE,
    **others: Any,
) -> Result:
    """Return k answers for each prompt.

    model       the result of `d5p4.load` or `d5p4.wrap`, or a name to load
    prompts     text, a list of texts, chat messages, token ids, a tokenizer's output, or None for `sets` empty prompts.
                Mask tokens in a prompt are filled in. After such a prompt, tokens are written only with gen_length
    seed        the seed of all random numbers. None draws a fresh seed, which `Result.seed` returns
    progress    True shows a bar in the terminal or the notebook
    callback    a function that gets a `Snapshot` after each step. It may return the numbers of prompts to drop
    keys        one name per prompt, which selects the random stream of the prompt. If the name is None, the tokens of
                the prompt and the number of equal prompts before it in this call select the random stream
    scorer, references  for best-of-n. The scorer is called as scorer(texts), or as scorer(text, reference) if
                `references` has one reference per prompt
    ranks       `ranks` of `d5p4.distributed.connect(...)` divide each forward. All ranks make this call and get the
                same result

    Options that are left out come from the model's generation_config.json (key `d5p4`). [ ] shows all other defaults.
    <options>
    k             Answers per prompt. [4]
    method        Search method; `d5p4 methods` lists all. [tree]
    w             Children per beam and step. [4]
    gen_length    Tokens to write per answer. [128; MDLM: its length]
    steps         Denoising steps. [one per token]
    block_length  Tokens per block; blocks are decoded left to right. [the model's, or one block]
    temperature   Temperature; 0 takes the likeliest token. [1.0]
    top_p         Sample from the likeliest tokens of this total mass. [none]
    order         Which position is revealed next. [the model's]
    reveal        How many positions to reveal per step. [schedule]
    guidance      Scale of classifier-free guidance; 1 is off. [1.0]
    distinct      Draw children that differ (not for tree). [false]
    spare         Extra beams; the k best answers are returned. [0]
    stop_strings  Cut answers before these texts. [none]
    json_schema   Write JSON that this JSON schema allows. [free text]
    chat          Apply the chat template. [if there is one]

    Others, described in docs/options.md: regex, grammar, choices, top_k, min_p, order_temperature, stop, start,
    start_temperature, eos, guidance_window, select_window, quality, positions, normalise, features, feature_layer,
    similarity, gamma, max_tokens_per_forward, cache, deterministic, logprobs; and the parameters of the method.
    </options>
    """
    basic = {name: value for name, value in locals().items() if name in BASIC}
    if isinstance(model, (str, Path)):
        model = load(model)
    for name, value in (("callback", callback), ("scorer", scorer)):
        if value is not None and not callable(value):
            raise D5P4Error("is not a function", option=name, value=value)
    prepared = prepare(model, prompts, basic | others, keys=keys, sets=sets, scorer=scorer, references=references)
    settings, requests = prepared.settings, prepared.requests
    with bar("decoding", len(requests)) if progress else nullcontext() as advance:
        result = run_requests(
            model,
            requests,
            settings,
            ranks.agree_on(chosen_seed(seed)),
            scorer=scorer,
            references=references,
            callback=both(callback, advance),
            ranks=ranks,
        )
    if (text := few_answers(result)) and settings.method != "tree":  # a tree returns no text twice
        warnings.warn(text, DuplicateAnswers, stacklevel=2)
    return result


def few_answers(result: Result, flag: Callable[[str], str] | None = None) -> str:
    """Return advice if a prompt has fewer than k different answers, or else an empty text. `flag` turns the Python name
    of an option into the name to show."""
    settings = result.settings
    short = [int(result.distinct[i]) for i, answers in enumerate(result.answers) if answers or settings.form]
    short = [count for count in short if count < settings.k]
    if not short:
        return ""
    fact = f"only {short[0]} different text{'s' * (short[0] != 1)} for {settings.k} answers"
    if len(result.texts) > 1:
        fact = f"{len(short)} of {len(result.texts)} prompts have fewer than {settings.k} different answers"
    if settings.method == "tree":
        what = "top_k, top_p and min_p" if settings.form is None else f"{settings.form[0]} and gen_length"
        return f"{fact}: the search found no more ({what} may leave no more)"
    cure = f"{flag('method')} tree" if flag else "method='tree'"
    return f"{fact}; try {cure}, which returns no text twice"


def chosen_seed(seed: Any) -> int:
    seed = secrets.randbits(32) if seed is None else plain_number(seed)
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise D5P4Error("must be a whole number of 64 bits", option="seed", value=seed)
    return seed


def run_requests(
    model: Model,
    requests: Sequence[Request],
    settings: Settings,
    seed: int | Sequence[int],
    *,
    scorer: Callable[..., Any] | None = None,
    references: Sequence[Any] | None = None,
    callback: Callback | None = None,
    deliver: Callable[[int, Result, int], None] | None = None,
    ranks: Ranks = ALONE,
) -> Result:
    """Decode requests in batches. The result has the order of the requests.

    seed: one seed for all requests, or one per request. `Result.seed` is the first seed.
    deliver: a function that is called as soon as a request is finished, with its number, a result, and its index in it.
    """
    seeds = [seed] * len(requests) if isinstance(seed, int) else list(seed)

    def finished(result: Result, numbers: list[int]) -> None:
        for place, number in enumerate(numbers if deliver is not None else ()):
            assert deliver is not None
            deliver(number, replace(result, seed=seeds[number]), place)

    with ranks.together():  # if one rank fails, all ranks raise its error
        parts: list[tuple[list[int], Result]] = []
        for numbers in batches(model, requests, settings):
            some = [requests[number] for number in numbers]
            judged = None if references is None else [references[number] for number in numbers]
            new = arrivals(model, settings, some, [seeds[number] for number in numbers], numbers, judged)
            more: dict[str, Any] = {"scorer": scorer, "callback": callback, "deliver": finished, "ranks": ranks}
            parts.append((numbers, decode(model, new, settings, **more)))
        return replace(merged(parts, model.pad_id), seed=seeds[0])


def arrivals(
    model: Model,
    settings: Settings,
    requests: Sequence[Request],
    seeds: Sequence[int],
    numbers: Sequence[int],
    references: Sequence[Any] | None = None,
) -> Arrivals:
    """Return requests as prompts that begin together. Callbacks and error messages call them by their numbers."""
    device = model.head.weight.device
    shapes = [(len(r.window(model.mask_id)), 0 if settings.adaptive else r.offset(model)) for r in requests]
    known = {shape: schedule_for(model, settings, *shape) for shape in set(shapes)}
    fixed = row_length(model, requests[0], settings) if settings.deterministic else None
    return Arrivals(
        layout(requests, model.mask_id, model.pad_id, device, fixed),
        [known[shape] for shape in shapes],
        torch.tensor([key_of(seed) for seed in seeds], device=device),
        torch.tensor([r.key for r in requests], device=device),
        torch.tensor(numbers, device=device),
        references,
    )


def batches(model: Model, requests: Sequence[Request], settings: Settings) -> Iterable[list[int]]:
    """Divide requests among decode calls. Yield the prompt numbers of each call.

    The pools of a call have at most `settings.max_tokens_per_call` tokens, and its caches have about `CACHE_BYTES`.
    Prompts of similar length share a call, so that there is little padding. Under `deterministic`, only prompts of the
    same row length share a call. In a table of steps, the first block of all prompts of a call has the same offset, so
    that the prompts take their steps together.
    """
    lengths = [row_length(model, request, settings) for request in requests]
    alike: dict[tuple[int, int, int | None], list[int]] = {}
    for number, request in enumerate(requests):
        together = lengths[number] if settings.deterministic else None
        offset = 0 if settings.adaptive else request.offset(model)
        alike.setdefault((len(request.window(model.mask_id)), offset, together), []).append(number)
    most = capacity(model, settings) // settings.pool_size
    for numbers in alike.values():
        numbers.sort(key=lambda number: requests[number].length)
        batch: list[int] = []
        for number in numbers:
            if batch and (len(batch) + 1) * lengths[number] > most:
                yield batch
                batch = []
            batch.append(number)
        yield batch


def capacity(model: Model, settings: Settings) -> int:
    """Return how many tokens the pools of a call may have."""
    most = settings.max_tokens_per_call
    return most if settings.cache == "none" else min(most, CACHE_BYTES // bytes_per_token(model, settings))


def row_length(model: Model, request: Request, settings: Settings) -> int:
    """Return the number of columns that a request needs. Under `deterministic`, only requests that need the same number
    can share a call."""
    length = request.length + request.extra
    whole_buckets = -(-length // BUCKET) * BUCKET
    return max(length, min(whole_buckets, model.max_length)) if settings.deterministic else length
