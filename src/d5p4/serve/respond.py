"""Writes answers as OpenAI's responses and streams. The field `d5p4` holds facts that OpenAI's format lacks."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..__about__ import __version__
from ..prompts import Request
from ..result import COUNTS, Answers, finite, rounded
from ..store import json_bytes
from ..types import Model
from ..view.pieces import piece, spell
from .engine import Engine
from .errors import ApiError
from .job import Finished, Job
from .requests import Ask

Object = dict[str, Any]
STILL_HERE = 10.0  # seconds without data after which a comment is sent, so that proxies keep the connection
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Reply:
    """Makes the JSON body, or the chunks of the stream, that answers one request."""

    def __init__(self, ask: Ask, model: Model, name: str) -> None:
        self.ask, self.model = ask, model
        self.frame = {
            "id": f"{'chatcmpl' if ask.body.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"d5p4-{__version__}",
        }
        logprobs, options = getattr(ask.body, "logprobs", None), ask.body.stream_options
        self.wants_logprobs = logprobs is not None and logprobs is not False  # logprobs=0 asks for them, too
        self.wants_usage = options is not None and bool(options.include_usage)
        asked = {"token_ids": ask.body.return_token_ids, "step_map": ask.body.return_step_maps}
        self.no_tokens: Object = {name: [] for name, wanted in asked.items() if wanted}  # in chunks without tokens
        # As in vLLM's API, the ids of the prompt are a field of a chat response, but of every choice of a completion.
        ids = [{"prompt_token_ids": one.ids} if ask.body.return_token_ids else {} for one in ask.requests]
        self.reply_ids: Object = ids[0] if ask.body.chat else {}
        self.choice_ids: list[Object] = [{} if ask.body.chat else one for one in ids]

    def complete(self, finished: list[Finished]) -> Object:
        kind = "chat.completion" if self.ask.body.chat else "text_completion"
        message = {"role": "assistant", "refusal": None}
        choices = [
            choice | self.choice_ids[choice["index"] // self.ask.settings.k] | self._text("message", text, **message)
            for text, choice in self._choices(finished)
        ]
        facts = {"usage": self.usage(finished), "d5p4": self.about(finished)}
        return {"object": kind, "choices": choices} | self.frame | facts | self.reply_ids

    def opening(self) -> Iterator[Object]:
        """Yield the first chunks of a stream, one per prompt, because every prompt has one answer at least."""
        for prompt, ids in enumerate(self.choice_ids):
            yield self._first(prompt, ids | self._text("delta", "", role="assistant")) | self.reply_ids

    def draft(self, prompt: int, text: str, draft: Object) -> Object:
        """Return a chunk with new text of the first answer to a prompt, and drafts of all answers to that prompt."""
        return self._first(prompt, self._text("delta", text)) | {"d5p4": {"prompt": prompt} | draft}

    def _first(self, prompt: int, choice: Object) -> Object:
        """Return a chunk about the first answer to a prompt, which goes on."""
        return self._chunk({"index": prompt * self.ask.settings.k, "logprobs": None, "finish_reason": None} | choice)

    def closing(self, finished: list[Finished], sent: list[str]) -> Iterator[Object]:
        """Yield the last chunks of a stream. `sent` is the text of each prompt's first answer that the client has."""
        choices, k = list(self._choices(finished)), self.ask.settings.k
        for number, (text, choice) in enumerate(choices):
            rest = text.removeprefix(sent[number]) if k == 1 else text
            opened = choice["index"] % k == 0  # `opening` has sent a first chunk of this choice
            role, ids = ({}, {}) if opened else ({"role": "assistant"}, self.choice_ids[choice["index"] // k])
            about = {"d5p4": self.about(finished)} if number == len(choices) - 1 else {}
            yield self._chunk(choice | ids | self._text("delta", rest, **role)) | about
        if self.wants_usage:
            yield self._chunk() | {"usage": self.usage(finished)}

    def usage(self, finished: list[Finished]) -> Object:
        asked = sum(len(request.ids) for request in self.ask.requests)
        written = sum(len(ids) for one in finished for ids in one.answers.result.answers[one.answers.place])
        tokens = {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
        counts = {name: sum(getattr(one.answers, name) for one in finished) for name in COUNTS}
        return tokens | counts | {"seed": self.ask.seed}

    def about(self, finished: list[Finished]) -> Object:
        """Return the field `d5p4`: facts about all answers together, such as the number of distinct answers."""
        graded = [one.right_count for one in finished if one.right_count is not None]
        traces = [one.trace for one in finished if one.trace is not None]
        return {
            "seed": self.ask.seed,
            "method": self.ask.settings.method,
            "distinct": sum(one.answers.distinct for one in finished),
            "near_copies": sum(one.answers.near_copies for one in finished),
            "right": sum(graded) if graded else None,
            "score_kind": finished[0].answers.result.score_kind,
            "settings": self.ask.settings.options(),
        } | ({"history": traces} if traces else {})

    def _choices(self, finished: list[Finished]) -> Iterator[tuple[str, Object]]:
        """Yield for every answer its text, and its entry in the list `choices` without this text. The answers to prompt
        p have the indices p * n to p * n + n - 1; if there are fewer than n, the last indices are missing."""
        for prompt, (one, request) in enumerate(zip(finished, self.ask.requests, strict=True)):
            score, distance = rounded(one.answers.score), rounded(one.answers.distance)
            for i, text in enumerate(one.answers.texts):
                right = None if one.right is None else one.right[i]
                about = {"score": score[i], "distance": distance[i], "right": right}
                logprobs = self._logprobs(one, i, request) if self.wants_logprobs else None
                reason = "stop" if one.ended[i] else "length"
                entry = {"index": prompt * self.ask.settings.k + i, "logprobs": logprobs, "finish_reason": reason}
                yield text, entry | {"d5p4": about} | self._tokens(one.answers, i)

    def _tokens(self, answers: Answers, i: int) -> Object:
        """Return the token ids and the step map of an answer, if asked for. A stop string does not cut them, because
        the tokens before it may depend on the decoded tokens behind it."""
        steps = [step + 1 for step in answers.reveal_step[i]]
        lists = {"token_ids": answers.result.answers[answers.place][i], "step_map": steps}
        return {name: lists[name] for name in self.no_tokens}

    def _logprobs(self, one: Finished, i: int, request: Request) -> Object:
        """Return for each token of an answer the step that revealed the token, and its log-probability in that step.

        The list ends with the text, unless the request asks for token ids or step maps, which have all tokens."""
        answers, ids = one.answers, one.answers.result.answers[one.answers.place][i]
        chances, steps = finite(answers.logprobs[i]), answers.reveal_step[i]
        written = iter(zip(ids, chances, steps, strict=True))
        mask = self.model.mask_id
        given = request.ids if mask in request.ids else []  # the text of a filled-in prompt includes the prompt
        tokens = [next(written) if token == mask else (token, None, None) for token in given] + list(written)
        pieces = [piece(self.model, token) for token, _, _ in tokens]
        rows: list[Object] = []
        offsets: list[int] = [0]
        for part, text, (_, chance, step) in zip(pieces, spell(pieces), tokens, strict=True):
            if offsets[-1] >= len(one.answers.texts[i]) and one.ended[i] and not self.no_tokens:
                break
            data = part if isinstance(part, list) else list(part.encode("utf-8", "replace"))
            row = {"token": text or "", "logprob": chance, "bytes": data, "top_logprobs": [], "reveal_step": step}
            rows.append(row)
            offsets.append(offsets[-1] + len(text or ""))
        if self.ask.body.chat:
            return {"content": rows, "refusal": None}
        names = {"tokens": "token", "token_logprobs": "logprob", "reveal_step": "reveal_step"}
        lists = {name: [row[key] for row in rows] for name, key in names.items()}
        return lists | {"text_offset": offsets[: len(rows)], "top_logprobs": None}

    def _text(self, key: str, text: str, **others: Any) -> Object:
        """Return the text of a choice. In a chat, the text is the content of an object, which may have other fields."""
        return {key: others | {"content": text}} if self.ask.body.chat else {"text": text}

    def _chunk(self, *choices: Object) -> Object:
        kind = "chat.completion.chunk" if self.ask.body.chat else "text_completion"
        usage = {"usage": None} if self.wants_usage else {}
        return {"object": kind, "choices": [self.no_tokens | choice for choice in choices]} | self.frame | usage


class EventStream(StreamingResponse):
    """The response to a streamed request, as server-sent events.

    With n = 1, text is sent as soon as it is final. With n > 1, answers are sorted only at the end, so drafts are sent
    until then. At `end`, a time on the loop's clock, the request fails because it took too long.
    """

    def __init__(self, engine: Engine, jobs: list[Job], reply: Reply, end: float) -> None:
        super().__init__(self._events(), headers=STREAM_HEADERS)
        self.engine, self.jobs, self.reply, self.end = engine, jobs, reply, end
        self.sent = [""] * len(jobs)  # for each prompt, the part of its first answer's text that has been sent so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.engine.attend(self.jobs, receive, self.end):
            await self.stream_response(send)

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self.reply.opening():
            yield event(json_bytes(chunk))
        try:
            async for data in self._drafts():
                yield data
            finished = await self.engine.answers(self.jobs)
        except ApiError as error:
            yield event(bytes(error.response().body))
            return
        if finished is None:
            return
        chunks = self.reply.closing(finished, self.sent)
        for data in await asyncio.to_thread(lambda: [event(json_bytes(chunk)) for chunk in chunks]):
            yield data
        yield event(b"[DONE]")

    async def _drafts(self) -> AsyncIterator[bytes]:
        """Yield the newest draft of each prompt, or a comment after a long silence, until all prompts are finished."""
        while not all(job.outcome.done() for job in self.jobs):
            try:
                await asyncio.wait_for(self.jobs[0].news.wait(), STILL_HERE)
            except asyncio.TimeoutError:
                yield b": still here\n\n"
            self.jobs[0].news.clear()
            for number, job in enumerate(self.jobs):
                draft, job.draft = job.draft, None
                if draft is not None and not job.outcome.done():
                    text = draft.pop("text")
                    yield event(json_bytes(self.reply.draft(number, text.removeprefix(self.sent[number]), draft)))
                    self.sent[number] = text or self.sent[number]


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
