"""Writing: what an engine computed goes to the cache in one thread behind the requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from retain.cache import BlockCache
from retain.codecs.base import Array
from retain.dtypes import check_range
from retain.header import BlockHeader
from retain.identity import TAIL_TOKENS, Chain, Tokens


class Writer:
    """Runs jobs one after the other in a thread of its own. What a job raises is counted by the cache, never
    raised."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._state = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, chain: Chain, run: Callable[[], None]) -> None:
        """Run a job soon; at once, in the caller's thread, once the writer is closed."""
        with self._state:
            if not self._closed:
                self._jobs.append(_Job(chain, run))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="retain-capture", daemon=True)
                    self._thread.start()
                self._state.notify_all()
                return
        self._guard(run)

    def settle(self, timeout: float, chain: Chain | None = None) -> bool:
        """Wait until no job is left, or none of a prompt that begins like `chain`; False when that takes
        longer."""
        with self._state:
            return self._state.wait_for(
                lambda: not any(self._concerns(job, chain) for job in self._pending()), timeout
            )

    def close(self, timeout: float) -> None:
        """Finish what was submitted, then end the thread. Idempotent."""
        self.settle(timeout)
        with self._state:
            self._closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _pending(self) -> list[_Job]:
        return [*self._jobs, *([self._running] if self._running else [])]

    @staticmethod
    def _concerns(job: _Job, chain: Chain | None) -> bool:
        if chain is None:
            return True
        same = min(TAIL_TOKENS, chain.tokens.size, job.chain.tokens.size)
        return job.chain.space == chain.space and np.array_equal(job.chain.tokens[:same], chain.tokens[:same])

    def _work(self) -> None:
        while True:
            with self._state:
                self._running = None
                self._state.notify_all()
                self._state.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                self._running = self._jobs.popleft()
                run = self._running.run
            self._guard(run)
            del run

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self._cache.failure("computed KV could not be stored", f"{type(error).__name__}: {error}")


def write(
    cache: BlockCache, header: BlockHeader, tokens: Tokens, fill: Callable[[Mapping[str, Array]], None]
) -> int:
    """Have `fill` write a block's arrays where the cache keeps them; how many tokens are kept thereby."""
    place = cache.reserve(header)
    if place is None:
        return 0
    try:
        place.tokens[:] = tokens
        fill(place.arrays)
        check_range(place.arrays, header.dtype)
    except BaseException:
        place.abandon()
        raise
    return header.count if place.commit().kept else 0


@dataclass(frozen=True)
class _Job:
    chain: Chain
    run: Callable[[], None]
