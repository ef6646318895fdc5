"""The waiting line in front of the engine: bounded, first come first served, left at once by who hangs up."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("retain.gateway")


class Full(Exception):
    """As many requests wait as may."""


class Closed(Exception):
    """The line takes no more requests, for the server is stopping."""


@dataclass(eq=False)
class Job:
    """One request on its way through the line: what to do for it, and where its events go.

    `work` runs on the engine's thread and calls `emit`; the event loop takes the events from `events`.
    """

    work: Callable[[Job], None]
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def emit(self, event: Any) -> None:
        """Hand an event to the event loop; nothing happens when that has ended."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def queued_seconds(self) -> float:
        return (time.monotonic() if self.started is None else self.started) - self.entered


class Line:
    """The line and the thread that serves it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def enter(self, job: Job) -> None:
        """Queue a job. Raises Full or Closed."""
        with self._changed:
            if self._closed:
                raise Closed
            if len(self._waiting) >= self._limit:
                raise Full
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="retain-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def leave(self, job: Job) -> bool:
        """Cancel a job: if it waits, its place is free at once, and if it runs, it ends at its next step.

        Says whether it was still waiting.
        """
        job.cancel()
        with self._changed:
            waiting = job in self._waiting
            if waiting:
                self._waiting.remove(job)
                job.ended.set()
            self._changed.notify_all()
        return waiting

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return 0 if self._running is None else 1

    def close(self) -> None:
        """Take no more jobs; those inside are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def cancel_all(self) -> list[Job]:
        """Cancel what waits and what runs, and say which jobs these were."""
        with self._changed:
            jobs = [*self._waiting, *([self._running] if self._running else [])]
        for job in jobs:
            job.cancel()
        return jobs

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing waits or runs; whether that came about in `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._running is None, timeout)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running = job
                job.started = time.monotonic()
            try:
                job.work(job)
            except BaseException:  # a job's failure must not end the thread that serves all others
                log.exception("a request failed in a way that was not foreseen")
            finally:
                job.ended.set()
                with self._changed:
                    self._running = None
                    self._changed.notify_all()
