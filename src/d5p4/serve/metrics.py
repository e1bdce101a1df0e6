"""Metrics for Prometheus. Labels are routes and statuses, never text from a client."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..result import Result

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one app. They have their own registry, so that one process can run several apps."""

    def __init__(self, waiting: Callable[[], int], running: Callable[[], int], ready: Callable[[], bool]) -> None:
        self.registry = own = CollectorRegistry()

        def seconds(name: str, help: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"d5p4_{name}_seconds", help, labels, buckets=SECONDS, registry=own)

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"d5p4_{name}", help, labels, registry=own)

        self.requests = counter("requests", "Requests answered", ("route", "status"))
        self.seconds = seconds("request", "Time from the head of a request to the end of its response", ("route",))
        self.waited = seconds("queue", "Time that a prompt waits for its decode")
        self.decoding = seconds("decode", "Time of the decode of a batch")
        self.batch = Histogram("d5p4_batch_prompts", "Prompts decoded together", buckets=SIZES, registry=own)
        self.rows = counter("rows", "Distinct rows that went through the model")
        self.tokens = counter("answer_tokens", "Tokens of all answers")
        self.answers = counter("answers", "Answers given")
        self.distinct = counter("distinct_answers", "Different answers to a prompt, added up over prompts")
        self.cancelled = counter("cancelled_prompts", "Prompts whose client left")
        self.refused = counter("refused_requests", "Requests refused because the queue was full")
        Gauge("d5p4_running_prompts", "Prompts being decoded", registry=own).set_function(running)
        Gauge("d5p4_waiting_prompts", "Prompts in the queue", registry=own).set_function(waiting)
        Gauge("d5p4_ready", "Whether the model is loaded", registry=own).set_function(lambda: float(ready()))

    def answered(self, result: Result, place: int) -> None:
        self.rows.inc(int(result.rows[place]))
        self.answers.inc(len(result.answers[place]))
        self.distinct.inc(int(result.distinct[place]))
        self.tokens.inc(sum(map(len, result.answers[place])))

    def text(self) -> bytes:
        return generate_latest(self.registry)
