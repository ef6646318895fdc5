"""Demotion: blocks in the arena are written to the tiers below, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from retain.block import Block, open_object
from retain.errors import StoreError, StoreFull
from retain.header import BlockHeader
from retain.stores.base import Buffer

from .ledger import Ledger
from .place import Arena
from .tier import Tier
from .workers import Workers

WRITERS = 1
"""Threads that write: one, for on a small machine a second takes the engine's core and gains nothing."""

MAKE_ROOM_TRIES = 8
"""How many objects are evicted, at the most, for one that the medium refuses although the tier's capacity
allows it.
"""


@dataclass(eq=False)
class Job:
    """One block on its way to one tier."""

    tier: Tier
    header: BlockHeader
    slot: int
    cancelled: bool = field(default=False)


class Demoter:
    """Writes each block once to each lower tier. A job holds a lease on its block in the arena until it is
    done.
    """

    def __init__(self, arena: Arena, below: Sequence[Tier], ledger: Ledger) -> None:
        self._arena = arena
        self._below = tuple(tier for tier in below if tier.shared is None or tier.shared.writable)
        self._ledger = ledger
        self._workers = Workers("retain-write", WRITERS)
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Writes that are not finished."""
        return len(self._jobs)

    def submit(self, header: BlockHeader, slot: int) -> None:
        """Write the block in `slot` to every lower tier. Takes over one lease on the slot."""
        jobs = [Job(tier, header, slot) for tier in self._below]
        if not jobs:
            self._arena.tier.release([slot])
            return
        with self._lock:
            self._jobs.update(jobs)
        self._workers.submit(lambda: self._run(jobs))

    def cancel(self, which: Callable[[bytes, Job], bool]) -> None:
        """Call off the jobs for which `which(key, job)` is true: nothing of them will be found afterwards."""
        with self._lock:
            for job in self._jobs:
                if which(job.header.key, job):
                    job.cancelled = True

    def flush(self, timeout: float) -> bool:
        return self._workers.wait_idle(timeout)

    def close(self) -> None:
        self.cancel(lambda key, job: True)
        self._workers.wait_idle(5.0)
        self._workers.stop()

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                try:
                    if not job.cancelled:
                        self._write(job)
                except Exception as error:
                    self._ledger.failure(f"a block could not be written to the {job.tier.name} tier", error)
        finally:
            with self._lock:
                self._jobs.difference_update(jobs)
            self._arena.tier.release([jobs[0].slot])

    def _write(self, job: Job) -> None:
        tier = job.tier
        header = replace(job.header, codec=tier.codec.name)
        name = header.name
        if tier.find(name) is not None:
            return
        if tier.leaving(name):  # a reader still has the one that was dropped: this one stays in memory
            self._ledger.count("refused_blocks")
            return
        if tier.shared is not None and (kept := tier.shared.sizes([name])[0]) is not None:
            tier.note(name, header.parent, kept)  # another host was faster
            return
        chunks = self._chunks(job)
        size = sum(len(chunk) for chunk in chunks)
        tenant = tier.tenants.whose(header)
        if not tier.room.make(size, tenant):
            self._ledger.failure(
                f"a block does not fit the {tier.name} tier", f"{size} bytes, capacity {tier.capacity}"
            )
            return
        try:
            self._put(tier, name, chunks)
        except BaseException:
            tier.room.give_back(size, tenant)
            raise
        with tier.lock:
            tier.room.give_back(size, tenant)
            if job.cancelled:
                tier.store.delete(name)
                return
            if tier.find(name) is None:  # else a lookup has asked the server meanwhile
                tier.insert(header, name, size)
        self._ledger.count("written_objects")
        self._ledger.count("written_bytes", size)

    def _chunks(self, job: Job) -> list[Buffer]:
        view = self._arena.view(job.slot)
        if view is None:
            raise StoreError("the block left the arena before it was written")
        if job.tier.codec.name == "raw":
            return [view]
        _, arrays = open_object(view)
        tokens = arrays.pop("tokens")
        return Block(job.header, tokens, arrays).encode(job.tier.codec)

    def _put(self, tier: Tier, name: str, chunks: Sequence[Buffer]) -> None:
        for _ in range(MAKE_ROOM_TRIES):
            try:
                tier.store.write(name, chunks)
                return
            except StoreFull:
                # The medium is fuller than the tier's capacity allows for: others write there too.
                if tier.shared is not None or not tier.room.evict_one():
                    raise
        tier.store.write(name, chunks)
