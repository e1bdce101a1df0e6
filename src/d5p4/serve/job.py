"""One prompt of a request, on its way from the event loop to the worker's thread and back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ..prompts import Request
from ..settings import Settings
from ..types import Snapshot
from ..view import Recorder, drafts
from .errors import ApiError

DRAFT_EVERY = 0.15  # seconds between two drafts of an answer; a client that reads slower sees fewer


@dataclass(frozen=True)
class Finished:
    """The answers to one prompt as plain data, best first; texts are cut where the request says."""

    texts: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    reveal_step: list[list[int]]
    ended: list[bool]  # by the model itself or by a stop; otherwise the canvas was full
    score: list[float | None]
    score_kind: str
    distance: list[float | None]
    right: list[bool] | None
    right_ones: int | None  # different right ones
    rows: int
    rows_nominal: int
    nfe: int
    history: bytes | None  # a trace as JSON


@dataclass(eq=False)
class Job:
    """Made on the event loop, which awaits `outcome`. The worker calls `step`, `finish` and `fail`."""

    prompt: Any  # as asked: text, ids or messages
    request: Request
    key: int
    seed: int
    settings: Settings
    alike: tuple[str, int]  # jobs that share it can share a decode
    streamed: bool
    history: bool
    stops: list[str]
    name: str = "this prompt"
    asked: float = field(default_factory=time.monotonic)
    draft: dict[str, Any] | None = None  # the newest that was not sent
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # there is a draft, or the outcome
    recorder: Recorder | None = None
    _drafted: float = 0.0

    def __post_init__(self) -> None:
        self.outcome: asyncio.Future[Finished] = self.loop.create_future()
        self.outcome.add_done_callback(self._told)

    def _told(self, outcome: asyncio.Future[Finished]) -> None:
        self.news.set()
        if not outcome.cancelled():
            outcome.exception()  # looked at, so that an error nobody waits for any more is not complained about

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for it any more: its client went away, its time is over, the server stops."""
        return self.outcome.done()

    def step(self, model: Any, shot: Snapshot, place: int) -> None:
        """On the worker's thread, after each step; `place` of this prompt in the snapshot."""
        if self.recorder is not None:
            self.recorder.step(shot, place)
        now = time.monotonic()
        if self.streamed and self.draft is None and now - self._drafted >= DRAFT_EVERY:
            self._drafted = now
            draft = {"step": shot.step + 1, "steps": shot.steps, "drafts": drafts(model, shot, place)}
            self._on_loop(self._show, draft)

    def finish(self, finished: Finished) -> None:
        self._on_loop(self._settle, finished, None)

    def fail(self, error: ApiError) -> None:
        self._on_loop(self._settle, None, error)

    def _show(self, draft: dict[str, Any]) -> None:
        self.draft = draft
        self.news.set()

    def _settle(self, finished: Finished | None, error: ApiError | None) -> None:
        if self.outcome.done():
            return
        if finished is not None:
            self.outcome.set_result(finished)
        elif error is not None:
            self.outcome.set_exception(error)

    def _on_loop(self, call: Any, *given: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *given)
