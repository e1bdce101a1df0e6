"""Prompts on their way from the event loop to the worker's thread and back, and the bounded queue they wait in."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..prompts import Request
from ..record import Answers
from ..settings import Settings
from ..types import Model, Snapshot
from ..view import Recorder, drafts
from .errors import ApiError
from .requests import Ask
from .settled import settled_text

DRAFT_SECONDS = 0.15  # between two drafts of an answer; a client that reads slowly gets fewer
SHORTEST_PAUSE, LONGEST_PAUSE, PAUSES = 0.004, 0.05, 5
"""Seconds, and how many. Before a decode the worker waits for others who ask at the same time, until none came for a
pause. A pause is a small part of the time that the last decode took."""


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping; ask again in a moment", code="stopping", retry_after=5)


@dataclass(frozen=True)
class Finished:
    """The answers to one prompt, best first."""

    answers: Answers
    texts: list[str]  # cut where the request says
    ended: list[bool]  # by the model or by a stop; otherwise the canvas was full
    right: list[bool] | None
    right_count: int | None  # number of different right answers
    trace: dict[str, Any] | None


@dataclass(eq=False)
class Job:
    """One prompt of a request. Made on the event loop, which awaits `outcome`; the worker calls step, finish, fail."""

    ask: Ask
    number: int  # of the prompt in the request
    name: str = "this prompt"
    created: float = field(default_factory=time.monotonic)
    draft: dict[str, Any] | None = None  # the newest that was not sent
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # there is a draft, or the outcome
    recorder: Recorder | None = None
    drafted: float = -math.inf  # when the last draft was made

    def __post_init__(self) -> None:
        self.outcome: asyncio.Future[Finished] = self.loop.create_future()
        self.outcome.add_done_callback(self._notify)

    def _notify(self, outcome: asyncio.Future[Finished]) -> None:
        self.news.set()
        if not outcome.cancelled():
            outcome.exception()  # marks it as seen: asyncio complains about errors that nobody awaits

    @property
    def request(self) -> Request:
        return self.ask.requests[self.number]

    @property
    def settings(self) -> Settings:
        return self.ask.settings

    @property
    def share_key(self) -> tuple[str, int]:
        return self.ask.share_keys[self.number]

    def step(self, model: Model, shot: Snapshot, place: int) -> None:
        """Called by the worker after every step; `place` is the row of this prompt in the snapshot."""
        if self.recorder is not None:
            self.recorder.step(shot, place)
        now = time.monotonic()
        if not self.ask.body.stream or self.draft is not None or now - self.drafted < DRAFT_SECONDS:
            return
        self.drafted = now
        draft = {"step": shot.step + 1, "steps": shot.steps, "drafts": drafts(model, shot, place), "text": ""}
        if self.settings.k == 1:
            rows = shot.next_tokens[place].tolist()
            draft["text"] = settled_text(model, self.request, rows, self.ask.body.stops)
        self._on_loop(self._show, draft)

    def finish(self, finished: Finished) -> None:
        self._on_loop(self._settle, finished)

    def fail(self, error: ApiError) -> None:
        self._on_loop(self._settle, error)

    def _show(self, draft: dict[str, Any]) -> None:
        self.draft = draft
        self.news.set()

    def _settle(self, outcome: Finished | ApiError) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, ApiError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    def _on_loop(self, call: Callable[[Any], None], argument: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, argument)


class Queue:
    """Jobs that wait: bounded, oldest first. The event loop fills it, the worker empties it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: deque[Job] = deque()
        self._change = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Sequence[Job]) -> bool:
        """Add all of them, or none where there is no room."""
        with self._change:
            if self._closed:
                raise stopping()
            if len(self._waiting) + len(jobs) > self.most:
                return False
            self._waiting.extend(jobs)
            self._change.notify()
            return True

    def discard(self, job: Job) -> None:
        with self._change:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Take no more jobs; those that wait are still given out."""
        with self._change:
            self._closed = True
            self._change.notify()

    def take(self, fits: Callable[[Sequence[Job], Job], bool], last: float = 0.0) -> list[Job]:
        """Wait for a job; return the oldest and those that can share its decode, or [] when closed and empty.

        fits(batch, job): whether one more job has room in a batch. last: seconds that the last decode took.
        """
        pause = min(max(0.02 * last, SHORTEST_PAUSE), LONGEST_PAUSE)
        with self._change:
            while True:  # the job that woke us may have left during the pauses
                self._change.wait_for(lambda: self._waiting or self._closed)
                self._linger(fits, pause)
                if self._waiting:
                    break
                if self._closed:
                    return []
            batch = self._batch(fits)
            self._waiting = deque(job for job in self._waiting if job not in batch)
            return batch

    def _batch(self, fits: Callable[[Sequence[Job], Job], bool]) -> list[Job]:
        batch: list[Job] = []
        for job in self._waiting:
            if not batch or (job.share_key == batch[0].share_key and fits(batch, job)):
                batch.append(job)
        return batch

    def _linger(self, fits: Callable[[Sequence[Job], Job], bool], pause: float) -> None:
        """Wait while more jobs keep coming and there is room for them."""
        end = time.monotonic() + PAUSES * pause
        while self._waiting and not self._closed and time.monotonic() < end:
            batch, before = self._batch(fits), len(self._waiting)
            if not fits(batch, batch[0]):
                return
            self._change.wait(pause)
            if len(self._waiting) == before:
                return
