"""Prompts that wait for the worker: bounded, oldest first, alike ones together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from .job import Job

SHORTEST_PAUSE, LONGEST_PAUSE, PAUSES = 0.004, 0.05, 5
"""Seconds, and how many. Before a decode the worker waits for others who come at the same time, such as those who have
just been answered, until none came for a pause; all of it takes a small part of the time that a decode does."""


class Full(Exception):
    """There is no room for so many more."""


class Closed(Exception):
    """No more are taken."""


class Lineup:
    """Filled by the event loop, emptied by the worker."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: deque[Job] = deque()
        self._change = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Sequence[Job]) -> None:
        """All of them, or none."""
        with self._change:
            if self._closed:
                raise Closed
            if len(self._waiting) + len(jobs) > self.most:
                raise Full
            self._waiting.extend(jobs)
            self._change.notify()

    def discard(self, job: Job) -> None:
        """A job nobody wants any more; one that is being decoded is not here."""
        with self._change:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Take no more; those that wait are still given out."""
        with self._change:
            self._closed = True
            self._change.notify()

    def take(self, fits: Callable[[Sequence[Job], Job], bool], last: float = 0.0) -> list[Job]:
        """The oldest job and those that can share its decode; waits for one. Empty when closed and nobody waits.

        fits(batch, job): whether one more job has room beside a batch. last: seconds that the last decode took.
        """
        pause = min(max(0.02 * last, SHORTEST_PAUSE), LONGEST_PAUSE)
        with self._change:
            while True:  # who woke us may have left by the time the others are here
                self._change.wait_for(lambda: self._waiting or self._closed)
                self._linger(fits, pause)
                if self._waiting:
                    break
                if self._closed:
                    return []
            batch = self._batch(fits)
            taken = set(map(id, batch))
            self._waiting = deque(job for job in self._waiting if id(job) not in taken)
            return batch

    def _batch(self, fits: Callable[[Sequence[Job], Job], bool]) -> list[Job]:
        batch: list[Job] = []
        for job in self._waiting:
            if not batch or (job.alike == batch[0].alike and fits(batch, job)):
                batch.append(job)
        return batch

    def _linger(self, fits: Callable[[Sequence[Job], Job], bool], pause: float) -> None:
        """Wait while more keep coming and there is room for them."""
        end = time.monotonic() + PAUSES * pause
        while self._waiting and not self._closed and time.monotonic() < end:
            batch, before = self._batch(fits), len(self._waiting)
            if not fits(batch, batch[0]):
                return
            self._change.wait(pause)
            if len(self._waiting) == before:
                return
