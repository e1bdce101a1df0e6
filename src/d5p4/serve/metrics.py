"""What Prometheus is told. Labels are routes and statuses, never what a client wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..types import Result

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """A registry of its own, so that several apps can live in one process."""

    def __init__(self, waiting: Callable[[], int], ready: Callable[[], bool]) -> None:
        own = CollectorRegistry()
        self.registry = own
        self.requests = Counter("d5p4_requests", "Requests answered", ["route", "status"], registry=own)
        self.seconds = Histogram(
            "d5p4_request_seconds", "From a request's head to the end of its response", ["route"],
            buckets=SECONDS, registry=own,
        )  # fmt: skip
        self.waited = Histogram(
            "d5p4_queue_seconds", "A prompt's time before its decode", buckets=SECONDS, registry=own
        )
        self.decoding = Histogram("d5p4_decode_seconds", "A batch's decode", buckets=SECONDS, registry=own)
        self.batch = Histogram("d5p4_batch_prompts", "Prompts decoded together", buckets=SIZES, registry=own)
        self.rows = Counter("d5p4_rows", "Distinct rows that went through the model", registry=own)
        self.tokens = Counter("d5p4_answer_tokens", "Tokens of answers", registry=own)
        self.answers = Counter("d5p4_answers", "Answers given", registry=own)
        self.distinct = Counter("d5p4_distinct_answers", "Different answers, counted by prompt", registry=own)
        self.cancelled = Counter("d5p4_cancelled_prompts", "Prompts whose client went away", registry=own)
        self.refused = Counter("d5p4_refused_requests", "Requests refused because the queue was full", registry=own)
        self._decoded = Gauge("d5p4_running_prompts", "Prompts being decoded", registry=own)
        Gauge("d5p4_waiting_prompts", "Prompts in the queue", registry=own).set_function(waiting)
        Gauge("d5p4_ready", "Whether the model is loaded", registry=own).set_function(lambda: float(ready()))

    @contextmanager
    def running(self, prompts: int) -> Iterator[None]:
        self._decoded.inc(prompts)
        try:
            yield
        finally:
            self._decoded.dec(prompts)

    def answered(self, result: Result, place: int) -> None:
        self.rows.inc(int(result.rows[place]))
        self.answers.inc(len(result.answers[place]))
        self.distinct.inc(int(result.distinct[place]))
        self.tokens.inc(sum(map(len, result.answers[place])))

    def text(self) -> bytes:
        return generate_latest(self.registry)
