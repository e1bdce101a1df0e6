"""Prompts that wait for the worker: bounded, oldest first, alike ones together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from .job import Job

QUIET, LONGEST_LINGER = 0.004, 0.05
"""Seconds. A worker that was idle waits for others who come at the same time until none came for QUIET; a decode takes
hundreds of times that."""


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

    def take(self, fits: Callable[[Sequence[Job], Job], bool]) -> list[Job]:
        """The oldest job and those that can share its decode; waits for one. Empty when closed and nobody waits.

        fits(batch, job): whether one more job has room beside a batch.
        """
        with self._change:
            while not self._waiting:  # who woke us may have left by the time the others are here
                if self._closed:
                    return []
                self._change.wait_for(lambda: self._waiting or self._closed)
                self._linger()
            batch = [self._waiting[0]]
            for job in list(self._waiting)[1:]:
                if job.alike == batch[0].alike and fits(batch, job):
                    batch.append(job)
            taken = set(map(id, batch))
            self._waiting = deque(job for job in self._waiting if id(job) not in taken)
            return batch

    def _linger(self) -> None:
        end = time.monotonic() + LONGEST_LINGER
        while not self._closed and time.monotonic() < end:
            before = len(self._waiting)
            self._change.wait(QUIET)
            if len(self._waiting) == before:
                return
