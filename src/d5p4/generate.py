"""`generate`: prompts in, k good and different answers each out."""

from __future__ import annotations

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .beams import ALONE, Beams
from .decode import decode
from .errors import D5P4Error, DuplicateAnswers
from .ops import kernels
from .prompts import Request, bucket, encode, layout, plan, split_prompts
from .rng import hash_rows, key_of, mix
from .schedule import make_schedule
from .settings import Settings, plain_number
from .types import Callback, Model, Result, Schedule


def generate(
    model: Model,
    prompts: Any = None,
    *,
    k: int | None = None,
    w: int | None = None,
    method: str | None = None,
    gen_length: int | None = None,
    steps: int | None = None,
    block_length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    order: str | None = None,
    order_temperature: float | None = None,
    guidance: float | None = None,
    guidance_window: tuple[int, int] | None = None,
    select_window: tuple[int, int] | None = None,
    distinct: bool | None = None,
    spare: int | None = None,
    eos: str | None = None,
    quality: str | None = None,
    positions: str | None = None,
    normalise: str | None = None,
    features: str | None = None,
    feature_layer: str | None = None,
    similarity: str | None = None,
    gamma: float | None = None,
    solver: str | None = None,
    references: Sequence[Any] | None = None,
    scorer: Callable[..., Any] | None = None,
    seed: int | None = None,
    keys: Sequence[int | str | None] | None = None,
    sets: int | None = None,
    chat: bool | None = None,
    max_tokens_per_forward: int | None = None,
    deterministic: bool | None = None,
    callback: Callback | None = None,
    history: bool | None = None,
    logprobs: bool | None = None,
    beams: Beams = ALONE,
    **parameters: Any,
) -> Result:
    """k answers for each prompt.

    What is left out comes from the model's generation_config.json (key `d5p4`), then from the paper.

    prompts          a string, strings, chat messages, token ids, or None: unconditional, `sets` times. A prompt with
                     mask tokens is filled in; nothing is appended to it unless gen_length is given
    k, w             answers a prompt (4); children drawn of each (4)
    method           "d5p4"; see `d5p4.METHODS`. Its own parameters (beta, alpha, ...) are keyword arguments
    gen_length       tokens to append: the model's length for MDLM, 128 otherwise
    steps            in total, spread evenly over blocks and positions: one a position
    block_length     decode the window in blocks of this length, left to right: one block
    temperature      of the token draw (1.0; 0 takes the most probable); top_k, top_p filter the draw
    order            "confidence", "random", "tempered", "margin", "entropy", or "ancestral" (MDLM's default)
    order_temperature  of the tempered order (0.1)
    guidance         classifier-free guidance g (1 is off); guidance_window: on steps start..stop-1 only
    select_window    select on steps start..stop-1 only (the last step always selects)
    distinct         draw more children and keep different ones (changes results)
    spare            keep so many beams beyond k, and return the k best of them whose texts differ (0); where there are
                     fewer, repeats come last
    eos              end-of-text is revealed "last" (LLaDA, Dream), "free"ly (the paper's runs; MDLM) or "never"
    quality          "entropy", "self-certainty", "logprob" over positions "all" or "masked", normalised by "minmax",
                     "absolute" or "zscore"
    features         "flatten", "mean", "masked", "non-masked" of feature_layer "model" or "head" (the head's input)
    similarity       "cosine" or "rbf" (gamma)
    solver           "local-search", "one-start", "k-starts", "n-starts", "exact", "exhaustive" for the DPP methods
    scorer, references  for best-of-n: scorer(texts), or scorer(text, reference) with one reference a prompt
    seed             None draws a fresh one and returns it
    keys             names of the prompts for the random streams; by default, and where one is None, a hash of the
                     tokens and how often the prompt came before in this call
    chat             None applies the chat template to text where the model has one; False never
    max_tokens_per_forward  caps one forward (16384; with deterministic 4096, and part of what decides the answers)
    deterministic    forwards of fixed shapes, so that on CUDA answers and scores in half precision are the same bits
                     whatever other prompts there are; slower
    callback         called with a `Snapshot` after each step; may return prompt numbers to drop
    history, logprobs  fill Result.history; Result.logprobs and reveal_step
    beams            `beams` of `d5p4.distributed.connect(...)`: each pool is spread over ranks, all of which make this
                     call and get the same result; seed must be given

    Aliases: num_return_sequences (k), max_new_tokens (gen_length), cfg_scale (guidance - 1), remasking and alg (order).
    """
    given = dict(
        k=k, w=w, method=method, gen_length=gen_length, steps=steps, block_length=block_length, temperature=temperature,
        top_k=top_k, top_p=top_p, order=order, order_temperature=order_temperature, guidance=guidance,
        guidance_window=guidance_window, select_window=select_window, distinct=distinct, spare=spare, eos=eos,
        quality=quality, positions=positions, normalise=normalise, features=features, feature_layer=feature_layer,
        similarity=similarity, gamma=gamma, solver=solver, chat=chat, max_tokens_per_forward=max_tokens_per_forward,
        deterministic=deterministic, history=history, logprobs=logprobs,
    )  # fmt: skip
    check_model(model)
    settings = Settings.make(model, **given, **parameters)
    _check_functions(callback=callback, scorer=scorer)
    if (scorer is not None or references is not None) and not settings.spec.scored:
        raise D5P4Error(f"scorer and references are for method 'best-of-n'; {settings.method!r} has no use for them")
    asked = split_prompts(prompts, sets)
    if prompts is None and settings.guidance != 1:
        raise D5P4Error(f"guidance={settings.guidance:g} strengthens a prompt, and there is none; use guidance=1")
    encoded = [encode(model, prompt, settings.chat, number) for number, prompt in enumerate(asked)]
    length_given = gives_length(given | parameters)
    requests = [plan(model, ids, settings, length_given, number) for number, ids in enumerate(encoded)]
    _check_lists(len(requests), references=references, keys=keys)
    if seed is None and beams.size > 1:
        raise D5P4Error("seed=None would be another seed on each rank; give one where beams are spread")
    result = run_requests(
        model, requests, prompt_keys(requests, keys), settings, chosen_seed(seed),
        scorer=scorer, references=references, callback=callback, beams=beams,
    )  # fmt: skip
    short = [i for i, answers in enumerate(result.answers) if answers and result.distinct[i] < settings.k]
    if short:
        warnings.warn(
            f"{len(short)} of {len(requests)} prompts have fewer than k={settings.k} different answers "
            f"(Result.distinct); raise temperature or w, use distinct=True, or spare=2",
            DuplicateAnswers,
            stacklevel=2,
        )
    return result


def check_model(model: Any) -> None:
    if not hasattr(model, "body") or not hasattr(model, "head"):
        raise D5P4Error(f"model is a {type(model).__name__}; d5p4.load or d5p4.wrap make one")


def gives_length(options: Mapping[str, Any]) -> bool:
    """Whether the caller's own options say how many tokens to append."""
    return options.get("gen_length") is not None or options.get("max_new_tokens") is not None


def _check_functions(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise D5P4Error(f"{name}={value!r} is not a function")


def _check_lists(prompts: int, **given: Any) -> None:
    """Each must be left out or have one entry a prompt."""
    for name, value in given.items():
        listed = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, (str, Mapping))
        if value is not None and not listed:
            raise D5P4Error(f"{name} must be a list with one entry a prompt, not {type(value).__name__}")
        if value is not None and len(value) != prompts:
            raise D5P4Error(f"there are {len(value)} {name} for {prompts} prompts")


def prompt_keys(requests: Sequence[Request], keys: Sequence[int | str | None] | None) -> list[int]:
    """One int64 a prompt: from the caller's name, or (None) from its tokens and how often they came before."""
    given = [plain_number(key) for key in keys] if keys is not None else [None] * len(requests)
    wrong = [key for key in given if key is not None and (not isinstance(key, (int, str)) or isinstance(key, bool))]
    if wrong:
        raise D5P4Error(f"key {wrong[0]!r} must be a whole number or text")
    named = Counter(key_of(key) for key in given if key is not None)
    if twice := [key for key in given if key is not None and named[key_of(key)] > 1]:
        raise D5P4Error(f"key {twice[0]!r} names two prompts; their random streams would be the same")
    return Occurrences().keys([request.ids for request in requests], given)


class Occurrences:
    """How often each prompt came before, and the keys that follow from it."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()

    def keys(self, rows: Sequence[Sequence[int]], names: Sequence[int | str | None]) -> list[int]:
        """The keys of the next prompts: of their token ids, unless the caller has a name for one."""
        hashes = hash_rows(rows)
        before = []
        for row in hashes.tolist():
            before.append(self._seen[row])
            self._seen[row] += 1
        own = mix(hashes, torch.tensor(before, dtype=torch.int64)).tolist()
        return [key if name is None else key_of(name) for key, name in zip(own, names, strict=True)]


def chosen_seed(seed: Any) -> int:
    """The caller's seed, or a fresh one for None."""
    seed = secrets.randbits(32) if seed is None else plain_number(seed)
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise D5P4Error(f"seed={seed!r} must be a whole number of 64 bits")
    return seed


def run_requests(
    model: Model,
    requests: Sequence[Request],
    keys: Sequence[int],
    settings: Settings,
    seed: int | Sequence[int],
    *,
    scorer: Callable[..., Any] | None = None,
    references: Sequence[Any] | None = None,
    callback: Callback | None = None,
    beams: Beams = ALONE,
) -> Result:
    """Decode requests in batches that share a schedule, and put the results back in order.

    seed: one for all, or one a request; the result names the first.
    """
    device = model.head.weight.device
    seeds = [seed] * len(requests) if isinstance(seed, int) else list(seed)
    if settings.deterministic:
        _check_steady(model.head.weight, settings)
    with beams.together():  # also what fails before and after a decode fails on all ranks
        parts: list[tuple[list[int], Result]] = []
        for length, numbers in batches(model, requests, settings):
            schedule = schedule_for(length, settings)
            fixed = _row_length(model, requests[numbers[0]], settings) if settings.deterministic else None
            batch = layout([requests[i] for i in numbers], model.mask_id, model.pad_id, device, fixed)
            result = decode(
                model,
                batch,
                schedule,
                settings,
                seed=torch.tensor([key_of(seeds[i]) for i in numbers], device=device),
                key=torch.tensor([keys[i] for i in numbers], device=device),
                numbers=torch.tensor(numbers, device=device),
                scorer=scorer,
                references=None if references is None else [references[i] for i in numbers],
                callback=callback,
                beams=beams,
            )
            parts.append((numbers, result))
        return replace(_merge(parts, model.pad_id), seed=seeds[0])


def schedule_for(length: int, settings: Settings) -> Schedule:
    """The steps of windows of one length; an error where there can be none, or k answers would be one."""
    schedule = make_schedule(length, settings.steps, settings.block_length, settings.order == "ancestral")
    if all(step.move == 1 for step in schedule.steps):
        settings.check_random("one step a block")
    return schedule


def _check_steady(weight: Tensor, settings: Settings) -> None:
    """Raise where numbers of a prompt would depend on the others all the same: plain similarities on CUDA."""
    exact = weight.dtype == torch.float64  # and ties are decided within 1e-9
    if weight.is_cuda and not exact and not kernels.usable(weight.detach(), settings.pool_size):
        raise D5P4Error(
            f"deterministic=True on {weight.device} needs the Triton kernels and pools of at most {kernels.MOST_ITEMS} "
            f"rows (here {settings.pool_size}); see that Triton runs and D5P4_KERNELS is not off, or load in float64"
        )


def batches(model: Model, requests: Sequence[Request], settings: Settings) -> Iterable[tuple[int, list[int]]]:
    """(window length, prompt numbers) of decode calls: one schedule each, pools within `settings.max_tokens_per_call`.

    Prompts of like length go together, so that little is padded; under `deterministic` those of one row length.
    """
    lengths = [_row_length(model, request, settings) for request in requests]
    alike: dict[tuple[int, int | None], list[int]] = {}
    for number, request in enumerate(requests):
        together = lengths[number] if settings.deterministic else None
        alike.setdefault((len(request.window(model.mask_id)), together), []).append(number)
    most = settings.max_tokens_per_call // settings.pool_size
    for (window, _), numbers in alike.items():
        numbers.sort(key=lambda number: requests[number].length)
        batch: list[int] = []
        for number in numbers:
            if batch and (len(batch) + 1) * lengths[number] > most:
                yield window, batch
                batch = []
            batch.append(number)
        yield window, batch


def _row_length(model: Model, request: Request, settings: Settings) -> int:
    return bucket(request.length, model.max_length) if settings.deterministic else request.length


def _merge(parts: Sequence[tuple[list[int], Result]], pad_id: int) -> Result:
    """Results of several decode calls as one, in prompt order, rows left-padded to one length."""
    order = [number for numbers, _ in parts for number in numbers]
    back = torch.tensor(order).argsort()
    longest = max(result.sequences.shape[-1] for _, result in parts)

    def pad(x: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(x, (longest - x.shape[-1], 0), value=value)

    def tensors(name: str) -> Tensor:
        joined = torch.cat([getattr(result, name) for _, result in parts])
        return joined[back.to(joined.device)]

    def lists(name: str) -> Any:
        if getattr(parts[0][1], name) is None:
            return None
        joined = [item for _, result in parts for item in getattr(result, name)]
        return [joined[i] for i in back.tolist()]

    sequences = torch.cat([pad(result.sequences, pad_id) for _, result in parts])
    attention = torch.cat([pad(result.attention_mask, 0) for _, result in parts])
    merged: dict[str, Any] = {
        "sequences": sequences[back.to(sequences.device)],
        "attention_mask": attention[back.to(attention.device)],
    }
    for name in ("answers", "texts", "lineage", "logprobs", "reveal_step", "history"):
        merged[name] = lists(name)
    for name in ("score", "logdet", "similarity", "distinct", "nfe", "rows", "rows_nominal"):
        merged[name] = tensors(name)
    return replace(parts[0][1], **merged)
