"""Responses: OpenAI's fields, and what our answers have beside them (`d5p4`)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


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
    reveal_step: int | None = Field(description="None, as the log-probability, where the token was given.")


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
