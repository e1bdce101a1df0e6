"""Ends a job within a timeout, with a message that names the rank, if one of its ranks has died or hangs.

Every rank writes a pulse into the store: a count that grows while its process lives, and the step of its main thread,
or that it waits. Every rank watches the pulse of the next rank. A rank is at fault if its pulse stops, if its process
ends without leaving the mesh, or if its main thread works but makes no step. The rank that notices a fault writes a
complaint into the store, which all ranks read. Ranks that wait stop at once; ranks that work may finish their work
within the timeout. The store hangs if its process does, so a second thread watches the one that talks to the store.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import TCPStore

from ..errors import D5P4Error

CURE = "finished work is kept: start the same command again"
UNFINISHED = 3  # the exit code of a rank that stops because another rank is at fault
GONE = "gone"  # a rank that leaves the mesh writes this into the store in place of its pulse


class RankLost(D5P4Error):
    """Another rank has died, hangs or has stopped. `reported` says whether that rank itself prints the reason."""

    def __init__(self, reason: str, reported: bool = False) -> None:
        super().__init__(reason)
        self.reported = reported


def in_short(error: BaseException) -> str:
    """Return the first line of an error's message, without a leading "[...]". If no text is left, return the type."""
    lines = str(error).strip().splitlines()
    return (re.sub(r"^\[[^\]]*\]\s*", "", lines[0]) if lines else "")[:160] or type(error).__name__


class Watchdog:
    """Watches the next rank. `connect` must return a new client of the store, for one thread alone."""

    def __init__(self, connect: Callable[[], TCPStore], rank: int, world: int, timeout: float, name: str) -> None:
        self.rank, self.world, self.timeout, self.name = rank, world, timeout, name
        self._connect = connect
        self._interval = min(5.0, timeout / 8)
        self._steps = 0
        self._waiting = 0
        self._pulse, self._state = "", "starts"  # of the watched rank
        self._asked = self._pulse_at = self._state_at = time.monotonic()  # when the store answered, and these changed
        self._closed = threading.Event()
        self._deserted = False
        self._store: TCPStore | None = None
        loops = (self._exchange, self._watch_the_store)
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()
        atexit.register(self._desert)

    def _desert(self) -> None:
        """Write a complaint into the store if this process exits before its rank has left the mesh."""
        if not self._closed.is_set():
            self._deserted = True
            self.close()

    def close(self) -> None:
        """Stop both threads. A thread that uses the store while the interpreter exits would crash the process."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def beat(self) -> None:
        """Count one more step of the main thread, so that other ranks see that it makes progress."""
        self._steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context, the main thread waits or works without reports, and does not count as hanging."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self.beat()

    def _exchange(self) -> None:
        try:
            self._store = store = self._connect()
            other = (self.rank + 1) % self.world
            pulse, failed_at = 0, None
            while not self._closed.wait(self._interval):
                pulse += 1
                store.set(self._key(self.rank), f"{pulse} {'waits' if self._waiting else f'step {self._steps}'}")
                text = store.get(self._key(other)).decode() if store.check([self._key(other)]) else ""
                self._asked = time.monotonic()
                if complaint := self._complaint(other, text):
                    self._end(complaint)
                if store.check([failure_key(self.name)]):
                    failed_at = failed_at or self._asked
                    if self._asked - failed_at > self.timeout:
                        self._end(store.get(failure_key(self.name)).decode())
            if self._deserted:
                self._complain(f"rank {self.rank} ended without leaving the mesh")
            store.set(self._key(self.rank), GONE)
        except Exception as error:
            if not self._closed.is_set():
                self._store = None
                self._end(f"rank 0, which runs the store, has ended ({in_short(error)})")

    def _complaint(self, rank: int, text: str) -> str | None:
        """Return what is wrong with the watched rank, whose pulse is `text`, or None."""
        pulse, _, state = text.partition(" ")
        if pulse != self._pulse:
            self._pulse, self._pulse_at = pulse, self._asked
        if state != self._state or state == "waits":
            self._state, self._state_at = state, self._asked
        if pulse == GONE:
            return None
        if self._asked - self._pulse_at > self.timeout:
            return f"rank {rank} has sent no pulse for {self.timeout:g} s; its process has died or is stopped"
        if self._asked - self._state_at > self.timeout:
            return f"rank {rank} has made no step for {self.timeout:g} s, so it hangs"
        return None

    def _watch_the_store(self) -> None:
        while not self._closed.wait(self._interval):
            if time.monotonic() - self._asked > self.timeout + 2 * self._interval:
                self._store = None
                self._end(f"rank 0, which runs the store, has not answered for {self.timeout:g} s")

    def _key(self, rank: int) -> str:
        return f"{self.name}/pulse/{rank}"

    def _complain(self, complaint: str) -> None:
        """Write a complaint into the store, unless the store already has a complaint."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.compare_set(failure_key(self.name), "", complaint)

    def _end(self, complaint: str) -> None:
        self._complain(complaint)
        text = f"error: rank {self.rank} of {self.world} stops: {complaint}; {CURE}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        if self.rank == 0:
            time.sleep(1)  # the store may end with this process, so give other ranks time to read the complaint
        os._exit(UNFINISHED)


def failure_key(name: str) -> str:
    """Return the key in the store under which a job writes the reason why it stops."""
    return f"{name}/failed"
