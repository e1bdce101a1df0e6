"""A job is one prompt of a request, on its way from the event loop to the worker's thread and back."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..generate import capacity, row_length
from ..prompts import Request
from ..result import Answers
from ..types import Model, Snapshot
from ..view import Recorder, drafts
from ..view.pieces import piece, token_name
from .errors import ApiError
from .requests import Ask, work

COMPARABLE = 1.5  # jobs whose work differs by less than this factor are about equal
DRAFT_SECONDS = 0.15  # the least time between two drafts of a prompt; a client that reads slowly gets fewer drafts


@dataclass(frozen=True)
class Finished:
    """The answers to one prompt, best first."""

    answers: Answers
    ended: list[bool]  # whether the model or a stop string ended the answer; if not, it fills all its positions
    right: list[bool] | None
    right_count: int | None  # the number of different right answers
    trace: dict[str, Any] | None


class Job:
    """One prompt to decode. The event loop makes the job, settles it and awaits `outcome`; the worker calls `step`."""

    def __init__(self, model: Model, ask: Ask, number: int, news: asyncio.Event) -> None:
        """`news` is set when a job has a new draft or its outcome."""
        self.ask, self.news, self.prompt = ask, news, ask.prompts[number]
        self.request, self.window, self.settings = ask.requests[number], ask.windows[number], ask.settings
        settings, columns = self.settings, row_length(model, self.request, self.settings)
        self.work = work(model, settings, [(self.request.length, settings.steps or self.window)])
        self.rank = int(math.log(self.work, COMPARABLE))
        self.share = settings.pool_size * columns / capacity(model, settings)
        # Rows of a call have the length of the longest one, so those of jobs that share a call are of similar length.
        alike = (columns, self.window) if settings.deterministic else (columns - 1).bit_length()
        self.kind: Any = (repr(replace(settings, gen_length=None)), alike)  # equal in all jobs that share a call
        self.created, self.loop = time.monotonic(), asyncio.get_running_loop()
        self.draft: dict[str, Any] | None = None  # the newest draft that was not sent yet
        self.drafted = -math.inf  # when the last draft was made, in seconds of the monotonic clock
        self.recorder: Recorder | None = None
        self.outcome: asyncio.Future[Finished] = self.loop.create_future()
        self.outcome.add_done_callback(self._notify)

    def _notify(self, outcome: asyncio.Future[Finished]) -> None:
        self.news.set()
        if not outcome.cancelled():
            outcome.exception()  # reading the error stops asyncio's warning about an error that nobody read

    @property
    def listens(self) -> bool:
        """Whether the job wants to know each step."""
        return self.recorder is not None or bool(self.ask.body.stream)

    def step(self, model: Model, shot: Snapshot, place: int) -> None:
        """Record a step, and make a draft if it is due. `place` is the index of this prompt in the snapshot."""
        if self.recorder is not None:
            self.recorder.step(shot, place)
        now = time.monotonic()
        if not self.ask.body.stream or self.draft is not None or now - self.drafted < DRAFT_SECONDS:
            return
        self.drafted = now
        shown = drafts(model, shot, place, self.window - self.request.append)
        draft = {"step": shot.taken[place] + 1, "steps": shot.most[place], "drafts": shown, "text": ""}
        if self.settings.k == 1:
            rows = shot.next_tokens[place, :, : self.window]
            rows = rows if shot.next_awake is None else rows[shot.next_awake[place]]
            draft["text"] = settled_text(model, self.request, rows.tolist(), self.settings.stop_strings or ())
        self.soon(self._show, draft)

    def _show(self, draft: dict[str, Any]) -> None:
        self.draft = draft
        self.news.set()

    def settle(self, outcome: Finished | ApiError) -> None:
        """Give the job its outcome (answers or an error), unless it already has one."""
        if self.outcome.done():
            return
        if isinstance(outcome, ApiError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    def soon(self, call: Callable[[Any], None], value: Any) -> None:
        """Make a call on the event loop. The worker's thread changes a job in no other way."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, value)


def settled_text(model: Model, request: Request, rows: Sequence[Sequence[int]], stops: Sequence[str]) -> str:
    """Return the beginning of the final text that can no longer change, while the rest is still being decoded.

    rows: the tokens of the window in each row of the next pool. The final answer will descend from one of these rows,
    and a revealed token never changes. So the tokens before the first mask are final if they are equal in all rows.
    The text of these tokens is final, except that its end may be an incomplete character or begin a stop string.
    """
    window = request.window(model.mask_id)
    ids, infills = request.ids + [model.mask_id] * request.append, request.append < len(window)
    for position, tokens in zip(window, zip(*rows, strict=True), strict=True):
        ids[position] = tokens[0] if len(set(tokens)) == 1 else model.mask_id
    ends = [i for i in range(len(request.ids), len(ids)) if ids[i] in model.eos_ids]
    masks = [i for i in window if ids[i] == model.mask_id]
    ids = ids[0 if infills else len(request.ids) : min([*ends, *masks, len(ids)])]
    while ids and _unfinished(model, ids[-1]):
        ids.pop()
    text = (" ".join(map(str, ids)) if model.tokenizer is None else model.tokenizer.decode(ids)).rstrip("\ufffd")
    ends = [i for stop in stops for i in range(len(text)) if stop.startswith(text[i : i + len(stop)])]
    return text[: min(ends, default=len(text))]  # where a stop string begins, or may begin


def _unfinished(model: Model, token: int) -> bool:
    """Return whether later tokens may change this token's text: it has no text or only some bytes of a character."""
    part = piece(model, token)
    return not part or isinstance(part, list) or (token_name(model.tokenizer, token) or "").startswith("<0x")
