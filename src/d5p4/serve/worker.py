"""The one thread that owns the model: it loads it, then decodes what waits, alike prompts together."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import D5P4Error
from ..generate import run_requests
from ..jobs.decoder import NOT_FINITE, Decoder
from ..record import Answers, finite
from ..settings import Settings
from ..store import json_bytes
from ..types import Model, Result, Snapshot
from ..view import Recorder, count_right, grade
from .errors import ApiError, not_possible, where
from .job import Finished, Job
from .lineup import Lineup
from .metrics import Metrics

log = logging.getLogger("d5p4.serve")


class Worker(threading.Thread):
    """Started once. `model` is None until it is loaded; `failure` says why it never was."""

    def __init__(
        self, load: Callable[[], Model], lineup: Lineup, metrics: Metrics, loaded: Callable[[], None]
    ) -> None:
        super().__init__(name="d5p4-worker", daemon=True)
        self._load, self.lineup, self.metrics, self._loaded = load, lineup, metrics, loaded
        self.model: Model | None = None
        self.failure: BaseException | None = None
        self.halvings = 0  # of the token budget, after too little memory

    def run(self) -> None:
        try:
            self.model = self._load()
        except BaseException as error:
            self.failure = error
        self._loaded()
        last = 0.0
        while self.model is not None and (batch := self.lineup.take(self._fits, last)):
            start = time.monotonic()
            self._serve(self.model, batch)
            last = time.monotonic() - start

    def _fits(self, batch: Sequence[Job], job: Job) -> bool:
        settings = job.settings
        longest = max(other.request.length for other in (*batch, job))
        return (len(batch) + 1) * longest * settings.pool_size <= settings.max_tokens_per_call

    def _serve(self, model: Model, batch: list[Job]) -> None:
        """Every job of the batch gets an outcome, whatever happens; one that fails does not take others with it."""
        wanted = [job for job in batch if not job.unwanted]
        if not wanted:
            return
        try:
            self._decode(model, wanted)
            return
        except BaseException as error:
            if len(wanted) == 1:
                wanted[0].fail(_refused(error))
                return
        for job in wanted:  # outside of the block, whose error holds tensors
            self._serve(model, [job])

    def _decode(self, model: Model, batch: list[Job]) -> None:
        start = time.monotonic()
        for job in batch:
            self.metrics.waited.observe(max(0.0, start - job.asked))
        self.metrics.batch.observe(len(batch))

        def attempt(jobs: list[Job], settings: Settings) -> Result:
            def watch(shot: Snapshot) -> list[int]:
                """Who goes on hears of the step; who does not is dropped."""
                gone = []
                for place, number in enumerate(shot.prompts.tolist()):
                    if jobs[number].unwanted:
                        gone.append(number)
                    else:
                        jobs[number].step(model, shot, place)
                return gone

            for job in jobs:
                job.recorder = Recorder(model) if job.history else None  # an attempt before this one may have failed
            requests, keys, seeds = zip(*((job.request, job.key, job.seed) for job in jobs), strict=True)
            return run_requests(model, requests, keys, settings, seeds, callback=watch)

        with self.metrics.running(len(batch)):
            decoder = Decoder(attempt, batch[0].settings, patience=math.inf)
            decoder.halvings = self.halvings  # what was too much for one batch is too much for the next
            outcome = decoder.decode(batch)
            self.halvings = decoder.halvings
        seconds = time.monotonic() - start
        self.metrics.decoding.observe(seconds)
        for job, result, place in outcome.answered:
            if result.answers[place] and not job.unwanted:
                self.metrics.answered(result, place)
                job.finish(finished(model, job, result, place, seconds))
        for job, error in outcome.failed:
            caused = error == NOT_FINITE and job.settings.guidance != 1
            job.fail(ApiError(400 if caused else 500, error, "guidance" if caused else None))


def _refused(error: BaseException) -> ApiError:
    if isinstance(error, D5P4Error):
        return not_possible(error)
    log.error("a decode failed: %s", where(error))
    return ApiError(500, "the decode failed; the server's log says where")


def finished(model: Model, job: Job, result: Result, place: int, seconds: float) -> Finished:
    """Prompt number `place` of a result as plain data."""
    answers = Answers(result, place)
    assert result.logprobs is not None and result.reveal_step is not None
    window = len(job.request.window(model.mask_id))
    texts, stopped = zip(*(cut(text, job.stops) for text in answers.texts), strict=True)
    right = grade(model, job.prompt, texts)
    return Finished(
        texts=list(texts),
        tokens=result.answers[place],
        logprobs=finite(result.logprobs[place]),
        reveal_step=result.reveal_step[place],
        ended=[len(ids) < window or early for ids, early in zip(result.answers[place], stopped, strict=True)],
        score=_short(answers.score),
        score_kind=result.score_kind,
        distance=_short(answers.distance),
        right=right,
        right_ones=count_right(model, texts, right),
        rows=answers.rows,
        rows_nominal=answers.rows_nominal,
        nfe=answers.nfe,
        history=None if job.recorder is None else in_pieces(
            job.recorder.trace(job.prompt, result, place, job.seed, seconds)
        ),
    )  # fmt: skip


def _short(numbers: Sequence[float | None]) -> list[float | None]:
    """As many digits as are told apart."""
    return [None if number is None else round(number, 9) for number in numbers]


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop, and whether there was one."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return (text[: min(ends)], True) if ends else (text, False)


def in_pieces(trace: dict[str, Any]) -> bytes:
    """A trace as JSON, its pools one by one: writing a large object in one go would hold all other threads up."""
    rest = {name: value for name, value in trace.items() if name != "pools"}
    return json_bytes(rest)[:-1] + b',"pools":[' + b",".join(map(json_bytes, trace["pools"])) + b"]}"

