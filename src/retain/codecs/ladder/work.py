"""How many threads the ladder uses: the parts of a block are coded side by side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class Crew:
    """Threads that all blocks share, started when they are first needed."""

    def __init__(self, threads: int) -> None:
        self._lock = threading.Lock()
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def set_threads(self, count: int) -> None:
        """Use at most this many threads for all blocks together."""
        if count < 1:
            raise ValueError(f"the ladder needs at least one thread, got {count}")
        with self._lock:
            if count != self._threads:
                self._threads, old, self._pool = count, self._pool, None
                if old is not None:
                    old.shutdown(wait=False)

    def side_by_side(self, work: Callable[[_Given], _Made], items: Sequence[_Given]) -> list[_Made]:
        """`work` of every item, in order; an exception of any is raised."""
        with self._lock:
            if self._pool is None and self._threads > 1:
                self._pool = ThreadPoolExecutor(self._threads, "retain-ladder")
            tasks = [] if self._pool is None else [self._pool.submit(work, item) for item in items]
        wait(tasks)  # all of them, before any may raise: none shall write where its caller has gone
        return [task.result() for task in tasks] if tasks else [work(item) for item in items]

    def forget(self) -> None:
        """Start anew: for a child process, which has none of its parent's threads."""
        self._lock = threading.Lock()
        self._pool = None


CREW = Crew(max(1, min(4, os.cpu_count() or 1)))
"""The threads of this process: 4 at most by default."""

os.register_at_fork(after_in_child=CREW.forget)
