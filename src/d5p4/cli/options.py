"""The options that `generate` and `compare` share, written once as dataclasses.

A command takes such a dataclass as one argument; `with_options` shows its fields to typer as options of their own.
None means "not given": it is left out of the call, so defaults and complaints are the library's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import D5P4Error


def _option(panel: str, help: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False)


def _alias(name: str) -> Any:
    return typer.Option(name, hidden=True)


DECODING, SELECTION, METHOD, RUNNING = "Decoding", "Quality and similarity", "The method's own", "Running"

ModelName = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A folder, a hub id such as org/name, or a shipped name.")
]
Device = Annotated[str | None, _option(RUNNING, "cuda, cuda:0, mps or cpu (the best there is).")]
Dtype = Annotated[str | None, _option(RUNNING, "bfloat16, float16, float32 or float64.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no notes.")]


@dataclass(frozen=True)
class Decoding:
    """Settings of a decode that every method has."""

    k: Annotated[int | None, _option(DECODING, "Answers a prompt (4).", "-k", "--k")] = None
    w: Annotated[int | None, _option(DECODING, "Children drawn of each answer at each step (4).", "-w", "--w")] = None
    gen_length: Annotated[int | None, _option(DECODING, "Tokens to write (128; MDLM: up to its length).")] = None
    steps: Annotated[int | None, _option(DECODING, "Steps in total (one a token).")] = None
    block_length: Annotated[int | None, _option(DECODING, "Decode in blocks of this length (one block).")] = None
    temperature: Annotated[float | None, _option(DECODING, "Of the token draw (1.0).")] = None
    top_k: Annotated[int | None, _option(DECODING, "Draw from the so many most probable tokens only.")] = None
    top_p: Annotated[float | None, _option(DECODING, "Draw from the tokens that make up this probability only.")] = None
    order: Annotated[
        str | None, _option(DECODING, "confidence, random, tempered, margin, entropy or ancestral (the model's).")
    ] = None
    order_temperature: Annotated[float | None, _option(DECODING, "Of the tempered order (0.1).")] = None
    guidance: Annotated[float | None, _option(DECODING, "Classifier-free guidance; 1 is off (1).")] = None
    guidance_window: Annotated[
        str | None, _option(DECODING, "Guide in these steps only, such as 0:64.", metavar="START:STOP")
    ] = None
    select_window: Annotated[
        str | None, _option(DECODING, "Select in these steps only; the last always selects.", metavar="START:STOP")
    ] = None
    distinct: Annotated[
        bool | None, _option(DECODING, "Draw more children and keep different ones.", "--distinct/--no-distinct")
    ] = None
    spare: Annotated[int | None, _option(DECODING, "Beams beyond k; the k best different are returned (0).")] = None
    eos: Annotated[str | None, _option(DECODING, "Reveal end-of-text: last, free or never.")] = None
    seed: Annotated[int | None, _option(DECODING, "Same seed, same answers (a fresh one, printed).")] = None
    chat: Annotated[
        bool | None, _option(DECODING, "Apply the chat template (where there is one).", "--chat/--no-chat")
    ] = None

    quality: Annotated[str | None, _option(SELECTION, "entropy, self-certainty or logprob.")] = None
    positions: Annotated[str | None, _option(SELECTION, "Quality over all or masked positions.")] = None
    normalise: Annotated[str | None, _option(SELECTION, "minmax, absolute or zscore.")] = None
    features: Annotated[str | None, _option(SELECTION, "flatten, mean, masked or non-masked.")] = None
    feature_layer: Annotated[str | None, _option(SELECTION, "model or head (the head's input).")] = None
    similarity: Annotated[str | None, _option(SELECTION, "cosine or rbf.")] = None
    gamma: Annotated[float | None, _option(SELECTION, "Of the rbf similarity (1.0).")] = None

    max_tokens_per_forward: Annotated[
        int | None, _option(RUNNING, "Cap on one forward (16384; 4096 if deterministic; in run by the model's size).")
    ] = None
    deterministic: Annotated[
        bool | None,
        _option(
            RUNNING,
            "Forwards of fixed shapes: the same bits whatever else is in the batch. Slower.",
            "--deterministic/--no-deterministic",
        ),
    ] = None

    num_return_sequences: Annotated[int | None, _alias("--num-return-sequences")] = None
    max_new_tokens: Annotated[int | None, _alias("--max-new-tokens")] = None
    cfg_scale: Annotated[float | None, _alias("--cfg-scale")] = None
    remasking: Annotated[str | None, _alias("--remasking")] = None
    alg: Annotated[str | None, _alias("--alg")] = None


@dataclass(frozen=True)
class Parameters:
    """What only some methods have; `d5p4 methods` says which."""

    beta: Annotated[
        float | None, _option(METHOD, "Weight of diversity (d5p4 family, k-dpp, partition-sample).")
    ] = None
    solver: Annotated[
        str | None, _option(METHOD, "local-search, one-start, k-starts, n-starts, exact or exhaustive (d5p4 family).")
    ] = None
    kernel: Annotated[str | None, _option(METHOD, "additive or multiplicative (k-dpp, partition-sample).")] = None
    alpha: Annotated[float | None, _option(METHOD, "Weight of dissimilarity (diverse-beam).")] = None
    form: Annotated[str | None, _option(METHOD, "mean or max similarity to those chosen (diverse-beam).")] = None
    starts: Annotated[str | None, _option(METHOD, "one, k or n (diverse-beam).")] = None
    score_temperature: Annotated[float | None, _option(METHOD, "Of the draw by quality (cat).")] = None
    rank: Annotated[str | None, _option(METHOD, "auto, entropy or logprob (best-of-n).")] = None
    repeats: Annotated[
        bool | None,
        _option(METHOD, "Keep the best even where texts repeat (best-of-n).", "--repeats/--no-repeats"),
    ] = None
    lam: Annotated[float | None, _option(METHOD, "Sharpness of the potential (e-smc).")] = None
    interval: Annotated[int | None, _option(METHOD, "Steps between resamplings (e-smc).")] = None
    weights: Annotated[str | None, _option(METHOD, "literal or textbook (e-smc).")] = None
    potential: Annotated[str | None, _option(METHOD, "max or mean (e-smc).")] = None
    resampling: Annotated[str | None, _option(METHOD, "multinomial or systematic (e-smc).")] = None
    ess: Annotated[float | None, _option(METHOD, "Resample below this share of effective particles (e-smc).")] = None
    incremental: Annotated[
        bool | None,
        _option(METHOD, "Count the reward from the last resampling (e-smc).", "--incremental/--no-incremental"),
    ] = None


def given(options: Decoding | Parameters) -> dict[str, Any]:
    """What was given on the command line, as keyword arguments of `d5p4.generate`."""
    named = {field.name: getattr(options, field.name) for field in fields(options)}
    return {
        name: _window(name, value) if name.endswith("_window") else value
        for name, value in named.items()
        if value is not None
    }


def _window(name: str, text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    try:
        return int(start), int(stop)
    except ValueError:
        raise D5P4Error(f"{name}={text!r} must be two step numbers START:STOP, such as 0:64") from None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass argument of a command by its fields, as typer sees it."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    def flat(parameter: inspect.Parameter) -> list[inspect.Parameter]:
        if parameter.name not in groups:
            return [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        hints = get_type_hints(parameter.annotation, include_extras=True)
        return [
            inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in fields(parameter.annotation)
        ]

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    shown = [p for parameter in signature.parameters.values() for p in flat(parameter)]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return call
