"""Demotion: blocks in the arena are written to the tiers below, when each tier's rules say so.

    back      soon after they are stored, in the background
    through   before the call that stores them returns
    evicted   when they leave memory, or when the cache closes

A tier that admits only what is reused takes a block when it is used for the first time after it was stored,
or stored again after memory evicted it unread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from retain.block import open_object
from retain.header import BlockHeader

from .ledger import Ledger
from .place import Arena
from .tier import Tier
from .waiting import Waiting
from .workers import Task, Workers
from .write import Job, Writer

WRITERS = 1
"""Threads that write: one, for on a small machine a second takes the engine's core and gains nothing."""

THROUGH_SECONDS = 10.0
"""How long a store waits, at the most, until the tiers that are written through have the block."""

REFILLED = 16
"""How many blocks that could not be written before are written when a tier takes writes again."""


class Demoter:
    """Writes each block once to each lower tier. A job holds a lease on its block in the arena until it is
    done. Safe from several threads.
    """

    def __init__(self, arena: Arena, below: Sequence[Tier], ledger: Ledger) -> None:
        self._arena = arena
        self._memory = arena.tier
        self._below = tuple(tier for tier in below if tier.shared is None or tier.shared.writable)
        self._ledger = ledger
        self._writer = Writer(arena, (arena.tier, *below), ledger)
        self._workers = Workers("retain-write", WRITERS)
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()
        self._waiting = Waiting()
        if any(tier.rules.writes == "evicted" or tier.rules.admit == "reused" for tier in self._below):
            self._memory.room.may_go = self._may_go
        if any(tier.rules.admit == "reused" for tier in self._below):
            self._memory.touched = self._used

    @property
    def pending(self) -> int:
        """Writes that are not finished."""
        return len(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether memory may have to wait for writes before it has room."""
        return bool(self._jobs) or bool(self._waiting)

    def submit(self, header: BlockHeader, slot: int, *, wait: bool = False) -> None:
        """See to it that the block in `slot` gets to the lower tiers as their rules say; with `wait`, return
        when those that are written through have it. Takes over one lease on the slot.
        """
        task = self._offer(header, slot, self._below)
        if wait and task is not None and any(tier.rules.writes == "through" for tier in self._below):
            try:
                task.result(THROUGH_SECONDS)
            except TimeoutError as error:
                self._ledger.failure("a block was not written through in time", error)

    def promoted(self, header: BlockHeader, slot: int, number: int) -> None:
        """A block was read from tier `number` into a slot of the arena: those above it that take what lies
        below them get it too. The slot is leased by the caller.
        """
        tiers = self._writer.tiers[1:number]
        above = [tier for tier in self._below if tier.rules.promote and tier in tiers]
        if above:
            self._memory.hold(slot)
            self._offer(header, slot, above, reused=True)

    def cancel(self, tiers: Iterable[Tier], which: Callable[[BlockHeader], bool]) -> None:
        """Call off what is on its way to these tiers and for which `which(header)` is true: nothing of it
        will be found there afterwards.
        """
        chosen = set(tiers)
        with self._lock:
            for job in self._jobs:
                if job.tier in chosen and which(job.header):
                    job.cancelled = True
            self._waiting.cancel(chosen, which)

    def flush(self, timeout: float) -> bool:
        """Write what waits for its eviction, and wait until all writes are done."""
        deadline = time.monotonic() + timeout
        for header, tiers in self._waiting.due():
            self._write_waiting(header, tiers)
        return self._workers.wait_idle(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self.cancel(self._below, lambda header: True)
        self._workers.wait_idle(5.0)
        self._workers.stop()

    # when

    def _offer(
        self, header: BlockHeader, slot: int, tiers: Sequence[Tier], *, reused: bool = False
    ) -> Task[None] | None:
        seen = reused or self._waiting.seen(header.name)
        now: list[Tier] = []
        later: list[Tier] = []
        for tier in tiers:
            known = seen or tier.rules.admit == "all"
            (now if known and tier.rules.writes != "evicted" else later).append(tier)
        if later:
            with self._lock:
                self._waiting.add(header, later, reused=seen)
        return self._start(header, slot, now)

    def _used(self, keys: Sequence[bytes]) -> None:
        """Blocks are used: tiers that have waited for that take them now."""
        for header, tiers in self._waiting.used(keys):
            self._write_waiting(header, tiers)

    def _may_go(self, slot: int) -> bool:
        """Whether a block may leave memory; False where it is written below first. The memory tier's lock is
        held.
        """
        name = self._memory.object_name(slot)
        header, tiers, declined = self._waiting.leaves(name)
        if declined:
            self._ledger.count("declined_objects", declined)
            self._ledger.count("declined_bytes", declined * self._memory.index.record(slot).size)
        if header is None or not tiers:
            return True
        self._memory.hold(slot)
        with self._lock:
            self._memory.room.making_way += 1
        task = self._start(header, slot, tiers)
        if task is not None:
            task.when_done(self._made_way)
        return False

    def _made_way(self, _: Task[None]) -> None:
        with self._lock:
            self._memory.room.making_way -= 1

    def _write_waiting(self, header: BlockHeader, tiers: Sequence[Tier]) -> None:
        slot = self._memory.find(header.name)
        if slot is not None and self._memory.acquire(slot, header.key):
            self._start(header, slot, tiers)

    def _start(self, header: BlockHeader, slot: int, tiers: Sequence[Tier]) -> Task[None] | None:
        """Write the block in `slot` to these tiers, in the background. Takes over one lease on the slot."""
        jobs = [Job(tier, header, slot) for tier in tiers]
        if not jobs:
            self._memory.release([slot])
            return None
        with self._lock:
            self._jobs.update(jobs)
        return self._workers.submit(lambda: self._run(jobs))

    def _run(self, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                if not job.cancelled and self._writer.write(job):
                    self._refill(job.tier)
        finally:
            with self._lock:
                self._jobs.difference_update(jobs)
            self._memory.release([jobs[0].slot])

    def _refill(self, tier: Tier) -> None:
        """A tier takes writes: those that failed before are tried again, while memory has the blocks."""
        for name in self._writer.owed(tier, REFILLED):
            slot = self._memory.find(name)
            if slot is None:
                continue
            key = bytes.fromhex(name.partition(".")[0])
            if self._memory.acquire(slot, key):
                view = self._arena.view(slot)
                if view is None:
                    self._memory.release([slot])
                else:
                    self._start(open_object(view)[0].header, slot, [tier])
