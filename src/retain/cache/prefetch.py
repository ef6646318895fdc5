"""Prefetching: what continues a hit is brought up into memory while the hit itself is used.

A kept chain is often longer than the prompt that reads its first part: a conversation that is taken up again,
an agent's run that is repeated. Only room that is free is used, for nobody has asked for these blocks yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from retain.model import Slice

from .ledger import Ledger
from .read import Reader, Want, release
from .results import Part, Source
from .tier import Tier
from .workers import Workers

SECONDS = 10.0
"""How long one block is waited for, at the most."""

MOST_PENDING = 4
"""Chains that are followed at a time; beyond them a hit is not followed."""

BRANCHES = 4
"""How many of the blocks that continue another are looked at, those used last first."""


class Prefetcher:
    """Follows chains, at most `blocks` blocks beyond a hit; 0 follows nothing."""

    def __init__(self, tiers: Sequence[Tier], reader: Reader, ledger: Ledger, blocks: int) -> None:
        self._tiers = tuple(tiers)
        self._reader = reader
        self._ledger = ledger
        self._blocks = blocks
        self._workers = Workers("retain-prefetch", 1)
        self._pending = 0
        self._lock = threading.Lock()
        self._closed = False

    def follow(self, want: Want, wanted: Slice, parts: Sequence[Part]) -> None:
        """A hit was read, some of it from below memory: bring up what continues it, in the background."""
        if not self._blocks or not any(source.tier for part in parts for source in part.sources):
            return
        with self._lock:
            if self._pending >= MOST_PENDING or self._closed:
                return
            self._pending += 1
        self._workers.submit(lambda: self._follow(want, wanted, parts[-1].key))

    def close(self) -> None:
        self._closed = True
        self._workers.stop()

    def _follow(self, want: Want, wanted: Slice, key: bytes) -> None:
        try:
            for _ in range(self._blocks):
                found = self._next(want, wanted, key)
                if found is None or self._closed:
                    return
                part, resident = found
                if not resident:
                    rows = self._reader.pieces(want, [part], time.perf_counter() + SECONDS)
                    release(rows)
                    if not rows:
                        return
                    self._ledger.count("prefetched_blocks")
                key = part.key
        except Exception as error:
            self._ledger.failure("prefetching failed", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._pending -= 1

    def _next(self, want: Want, wanted: Slice, key: bytes) -> tuple[Part, bool] | None:
        """The block that continues another, and whether memory has it; None where there is no room for it."""
        memory = self._tiers[0]
        for number, tier in enumerate(self._tiers):
            with tier.lock:
                accepted = tier.forms(want.spec, wanted, want.fidelity)
                for slot in tier.children(key, BRANCHES):
                    record = tier.index.record(slot)
                    if record.form not in accepted:
                        continue
                    source = Source(number, slot, tier.form(slot).slice, record.size)
                    if number and memory.used + record.size > memory.capacity:
                        return None
                    return Part(record.key, 0, 1, (source,)), number == 0
        return None
