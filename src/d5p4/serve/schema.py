"""Requests and responses: OpenAI's fields, and ours beside them (`extra_body` of the openai client)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

STOPS = 4
Whole = Annotated[int, Field(ge=1, le=2**31)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Steps = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=2, max_length=2)]
First = Field(fail_fast=True)  # one thing wrong with a list is enough: a body can hold a million
Texts = Annotated[list[str], Field(min_length=1), First]
Ids = Annotated[list[int], Field(min_length=1), First]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "top_logprobs": (0,),
}  # fmt: skip
"""Fields of OpenAI's that this server does not do, and the values that ask for nothing."""


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
        None, description="Beams beyond n, of which the n best different ones are returned (half of n with distinct)."
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
    # OpenAI's, refused unless they ask for nothing (NEUTRAL)
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
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


OPTIONS = (
    "temperature", "top_p", "method", "w", "steps", "block_length", "order", "order_temperature", "guidance",
    "guidance_window", "select_window", "distinct", "spare", "top_k", "eos", "quality", "positions", "normalise",
    "features", "feature_layer", "similarity", "gamma", "beta", "kernel", "alpha", "form", "starts",
    "score_temperature", "rank", "repeats", "lam", "interval", "weights", "potential", "resampling", "ess",
    "incremental",
)  # fmt: skip
"""Fields that are options of `d5p4.generate` under the same name."""


class CompletionRequest(Asked):
    prompt: str | Ids | Texts | Annotated[list[Ids], Field(min_length=1), First] = Field(
        description="A text, token ids, or several of either. A text with mask tokens is filled in."
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | bool | None = Field(
        None, description="Each token's log-probability at its reveal; alternatives are not kept, so 0 to 5 are alike."
    )
    best_of: int | None = Field(None, description='n, or left out; for the best of n * w use method "best-of-n".')
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _no_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise refused("best_of", 'best_of is not supported here; use method "best-of-n" with n and w')
        return self


class TextPart(Strict):
    type: str
    text: str | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], First] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _text_alone(self) -> Message:
        if isinstance(self.content, list) and any(part.type != "text" or part.text is None for part in self.content):
            raise refused("messages", "messages can hold text only")
        return self

    def plain(self) -> dict[str, str]:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text or "" for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Asked):
    messages: Annotated[list[Message], Field(min_length=1), First]
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


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    rows: int = Field(description="Distinct rows that went through the model.")
    rows_nominal: int = Field(description="Rows the paper would count.")
    nfe: int = Field(description="Steps with a forward.")
    seed: int


class AboutSet(BaseModel):
    """What the answers are as a set (field `d5p4` of a response)."""

    seed: int
    method: str
    distinct: int = Field(description="How many of the texts differ, counted by prompt.")
    score_kind: str
    settings: dict[str, Any]
    right: int | None = Field(description="Different right answers, where the model's task can be checked.")
    history: list[dict[str, Any]] | None = Field(None, description="A trace for each prompt (history: true).")


class AboutChoice(BaseModel):
    """What an answer is in its set (field `d5p4` of a choice)."""

    score: float | None
    distance: float | None = Field(description="To the nearest other answer: 1 minus their similarity.")
    right: bool | None


class LegacyLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: None = None
    text_offset: list[int]
    reveal_step: list[int | None] = Field(description="None, as the log-probability, where the token was given.")


class Choice(BaseModel):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str
    d5p4: AboutChoice


class Completion(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    d5p4: AboutSet


class TokenLogprob(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[Any]
    reveal_step: int


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: str
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    d5p4: AboutChoice


class ChatCompletion(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    d5p4: AboutSet


class ModelEntry(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    d5p4: dict[str, Any] = Field(description="What the model is, its defaults, the methods and this server's limits.")


class ModelList(BaseModel):
    object: str
    data: list[ModelEntry]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
