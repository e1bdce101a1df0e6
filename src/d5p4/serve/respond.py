"""Finished prompts as OpenAI's response bodies and stream chunks, with what our answers have beside them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from ..__about__ import __version__
from ..store import json_bytes
from ..types import Model
from ..view.pieces import piece, spell
from .ask import Ask
from .job import Finished
from .schema import ChatRequest


class Reply:
    """The bodies of one response."""

    def __init__(self, ask: Ask, model: Model, name: str) -> None:
        self.ask, self.model, self.name = ask, model, name
        self.chat = isinstance(ask.body, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def encoded(self, body: dict[str, Any], finished: list[Finished]) -> bytes:
        """A body as JSON; traces, which are JSON already, take the place of their names."""
        data = json_bytes(body)
        if b'"history":[' in data:
            for i, one in enumerate(finished):
                data = data.replace(json_bytes(f"{self.id} {i}"), one.history or b"null", 1)
        return data

    def whole(self, finished: list[Finished]) -> dict[str, Any]:
        choices = [
            self._choice(index, answer, self._said(answer.text))
            for index, answer in enumerate(self._answers(finished))
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._frame(kind, choices) | {"usage": self.usage(finished), "d5p4": self.about(finished)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The first chunks: who speaks in each choice."""
        empty = {"logprobs": None, "finish_reason": None}
        said = {"delta": {"role": "assistant", "content": ""}} if self.chat else {"text": ""}
        for index in range(len(self.ask.prompts) * self.ask.settings.k):
            yield self._chunk([{"index": index, **said, **empty}])

    def draft(self, prompt: int, draft: dict[str, Any]) -> dict[str, Any]:
        """A chunk without text in the standard fields: what the answers to a prompt look like by now."""
        empty = {"index": prompt * self.ask.settings.k, "logprobs": None, "finish_reason": None}
        return self._chunk([empty | self._delta("")]) | {"d5p4": {"prompt": prompt} | draft}

    def chunks(self, finished: list[Finished]) -> Iterator[dict[str, Any]]:
        """The end of a stream: each answer, with the last of them what they are as a set, and the usage if asked."""
        answers = list(self._answers(finished))
        for index, answer in enumerate(answers):
            yield self._chunk([self._choice(index, answer, self._delta(answer.text)) | {"finish_reason": None}])
        for index, answer in enumerate(answers):
            end = self._choice(index, answer, {"delta": {}} if self.chat else {"text": ""}) | {"logprobs": None}
            last = {"d5p4": self.about(finished)} if index == len(answers) - 1 else {}
            yield self._chunk([end]) | last
        if self._tells_usage:
            yield self._chunk([]) | {"usage": self.usage(finished)}

    @property
    def _tells_usage(self) -> bool:
        options = self.ask.body.stream_options
        return options is not None and bool(options.include_usage)

    def usage(self, finished: list[Finished]) -> dict[str, Any]:
        asked = sum(len(request.ids) for request in self.ask.requests)
        written = sum(len(tokens) for one in finished for tokens in one.tokens)
        return {
            "prompt_tokens": asked,
            "completion_tokens": written,
            "total_tokens": asked + written,
            "rows": sum(one.rows for one in finished),
            "rows_nominal": sum(one.rows_nominal for one in finished),
            "nfe": sum(one.nfe for one in finished),
            "seed": self.ask.seed,
        }

    def about(self, finished: list[Finished]) -> dict[str, Any]:
        """What the answers are as sets."""
        texts = [set(one.texts) for one in finished]
        graded = [one.right_ones for one in finished if one.right_ones is not None]
        found = {
            "seed": self.ask.seed,
            "method": self.ask.settings.method,
            "distinct": sum(map(len, texts)),
            "right": sum(graded) if graded else None,
            "score_kind": finished[0].score_kind,
            "settings": self.ask.settings.options(),
        }
        history = [f"{self.id} {i}" for i, one in enumerate(finished) if one.history is not None]
        return found | ({"history": history} if history else {})

    def _answers(self, finished: list[Finished]) -> Iterator[_Answer]:
        for one, request in zip(finished, self.ask.requests, strict=True):
            for place in range(len(one.texts)):
                yield _Answer(one, place, request.ids)

    def _choice(self, index: int, answer: _Answer, said: dict[str, Any]) -> dict[str, Any]:
        wanted = self.ask.body.logprobs  # type: ignore[attr-defined]
        logprobs = None if wanted is None or wanted is False else answer.logprobs(self.model, self.chat)
        reason = "stop" if answer.stopped else "length"
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason, "d5p4": answer.about()}

    def _said(self, text: str) -> dict[str, Any]:
        if self.chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._frame("chat.completion.chunk" if self.chat else "text_completion", choices)
        return chunk | ({"usage": None} if self._tells_usage else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.name,
            "system_fingerprint": f"d5p4-{__version__}",
            "choices": choices,
        }


class _Answer:
    """One answer of a finished prompt."""

    def __init__(self, one: Finished, place: int, prompt: list[int]) -> None:
        self.one, self.place, self.prompt = one, place, prompt
        self.text, self.stopped = one.texts[place], one.ended[place]

    def about(self) -> dict[str, Any]:
        one, place = self.one, self.place
        right = None if one.right is None else one.right[place]
        return {"score": one.score[place], "distance": one.distance[place], "right": right}

    def _tokens(self, model: Model) -> list[tuple[int, float | None, int | None]]:
        """(token, its log-probability, its step) of the whole text; a filled text has tokens that were given."""
        one, place = self.one, self.place
        revealed = iter(zip(one.tokens[place], one.logprobs[place], one.reveal_step[place], strict=True))
        found: list[tuple[int, float | None, int | None]] = []
        if model.mask_id in self.prompt:
            found += [next(revealed) if token == model.mask_id else (token, None, None) for token in self.prompt]
        return [*found, *revealed]

    def logprobs(self, model: Model, chat: bool) -> dict[str, Any]:
        """Of the tokens that are in the text: each one's log-probability when it was revealed, and the step."""
        tokens = self._tokens(model)
        pieces = [piece(model, token) for token, _, _ in tokens]
        rows, offset = [], 0
        for part, text, (_, chance, step) in zip(pieces, spell(pieces), tokens, strict=True):
            if offset >= len(self.text) and self.stopped:
                break
            rows.append((text or "", chance, offset, step, part))
            offset += len(text or "")
        if chat:
            content = [
                {
                    "token": text, "logprob": chance, "top_logprobs": [], "reveal_step": step,
                    "bytes": part if isinstance(part, list) else list(part.encode("utf-8", "replace")),
                }
                for text, chance, _, step, part in rows
            ]  # fmt: skip
            return {"content": content, "refusal": None}
        texts, chances, offsets, steps = ([row[i] for row in rows] for i in range(4))
        return {
            "tokens": texts, "token_logprobs": chances, "top_logprobs": None, "text_offset": offsets,
            "reveal_step": steps,
        }  # fmt: skip
