"""Requests: OpenAI's fields, and ours beside them (`extra_body` of the openai client)."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..methods import METHODS
from ..settings import Settings

STOPS = 4
Whole = Annotated[int, Field(ge=1, le=2**31)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Steps = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=2, max_length=2)]
First = Field(fail_fast=True)  # one thing wrong with a list is enough: a body can hold a million
Many = Field(min_length=1, max_length=4096)  # things that are looked at one by one
Texts = Annotated[list[str], Many, First]
Ids = Annotated[list[int], Field(min_length=1), First]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "top_logprobs": (0,), "min_p": (0,),
    "repetition_penalty": (1,), "ignore_eos": (False,),
}  # fmt: skip
"""Fields of OpenAI's and vLLM's that this server does not do, and the values that ask for nothing."""


def refused(field: str, said: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{said}", {"field": field, "said": said})


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(Strict):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="The name the server gave the model; may be left out.")
    n: Annotated[int, Field(ge=1, le=2**20)] | None = Field(None, description="So many different answers (1).")
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = Field(None, description="Of the token draw (1).")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="Same seed, same answers; a fresh one, told in usage."
    )
    stop: str | Annotated[list[str], Field(max_length=STOPS), First] | None = Field(
        None, description="Answers are cut before the first of these."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = Field(None, description="Length of the answer in tokens (the model's default).")

    method: str | None = Field(None, description="d5p4, independent, greedy-beam, ...: see `d5p4 methods`.")
    w: Whole | None = Field(None, description="Children drawn of each answer at each step (4).")
    steps: Whole | None = Field(None, description="Denoising steps in total (one a token).")
    block_length: Whole | None = None
    order: str | None = Field(None, description="confidence, random, tempered, margin, entropy or ancestral.")
    order_temperature: Number | None = None
    guidance: Number | None = Field(None, description="Classifier-free guidance; 1 is off.")
    guidance_window: Steps | None = Field(None, description="Guide in these steps only: [start, stop].")
    select_window: Steps | None = Field(None, description="Select in these steps only: [start, stop].")
    distinct: bool | None = Field(None, description="Draw more children and keep different ones (true where n > 1).")
    spare: Annotated[int, Field(ge=0, le=2**20)] | None = Field(
        None, description="Beams beyond n, of which the n best different ones are returned (n with distinct)."
    )
    history: bool | None = Field(None, description="Send every step's pool with the answers.")
    top_k: Whole | None = None
    eos: str | None = Field(None, description="Reveal end-of-text: last, free or never.")
    quality: str | None = None
    positions: str | None = None
    normalise: str | None = None
    features: str | None = None
    feature_layer: str | None = None
    similarity: str | None = None
    gamma: Number | None = None

    beta: Number | None = Field(None, description="Weight of diversity (d5p4 family, k-dpp, partition-sample).")
    kernel: str | None = None
    alpha: Number | None = Field(None, description="Weight of dissimilarity (diverse-beam).")
    form: str | None = None
    starts: str | None = None
    score_temperature: Number | None = None
    rank: str | None = None
    repeats: bool | None = None
    lam: Number | None = None
    interval: Whole | None = None
    weights: str | None = None
    potential: str | None = None
    resampling: str | None = None
    ess: Number | None = None
    incremental: bool | None = None

    # OpenAI's, without a meaning here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # OpenAI's and vLLM's, refused unless they ask for nothing (NEUTRAL)
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    min_p: Number | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name in body:
                if name not in cls.model_fields:
                    name = name.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no text
                    raise PydanticCustomError("unknown", "{field} is not known", {"field": name})
        return body

    @model_validator(mode="after")
    def _nothing_unsupported(self) -> Asked:
        for name, nothing in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in nothing:
                raise refused(name, f"{name} is not supported here; leave it out")
        if "" in self.stops:
            raise refused("stop", "stop holds an empty text, which every answer begins with; leave it out")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def options(self) -> dict[str, Any]:
        """What `d5p4.generate` is asked for, in its own words."""
        given = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        return given | {"k": self.n or 1, "gen_length": self.length()}

    def length(self) -> int | None:
        return self.max_tokens


_KNOWN = {field.name for field in fields(Settings)}.union(*(method.parameters for method in METHODS.values()))
OPTIONS = tuple(name for name in Asked.model_fields if name in _KNOWN and name != "history")
"""Fields that are options of `d5p4.generate` under the same name."""


class CompletionRequest(Asked):
    prompt: str | Ids | Texts | Annotated[list[Ids], Many, First] = Field(
        description="A text, token ids, or several of either. A text with mask tokens is filled in."
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | bool | None = Field(
        None, description="0, 1 or true: each token's log-probability at its reveal. Alternatives are not kept."
    )
    best_of: int | None = Field(None, description='n, or left out; for the best of n * w use method "best-of-n".')
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _one_alone(self) -> CompletionRequest:
        if self.logprobs is not None and self.logprobs > 1:
            said = f"logprobs={self.logprobs}: alternatives are not kept; 1 gives those of the tokens drawn"
            raise refused("logprobs", said)
        if self.best_of not in (None, self.n or 1):
            raise refused("best_of", 'best_of is not supported here; use method "best-of-n" with n and w')
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(max_length=4096), First] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Any], First] | None = None

    @model_validator(mode="after")
    def _text_alone(self) -> Message:
        if self.tool_calls:
            raise refused("messages", "tool_calls in messages are not supported here; leave them out")
        if isinstance(self.content, list) and any(part.type != "text" or part.text is None for part in self.content):
            raise refused("messages", "messages can hold text only")
        return self

    def plain(self) -> dict[str, str]:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text or "" for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Asked):
    messages: Annotated[list[Message], Many, First]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = Field(None, description="Each token's log-probability at its reveal.")
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: Annotated[list[str], First] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    def length(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens
