"""The ledger: what happened, counted; failures named once in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

log = logging.getLogger("retain.cache")

REPEAT_SECONDS = 60.0
"""A failure of the same kind is logged again only after this long; every one is counted."""

COUNTERS = (
    "lookups",
    "lookup_hits",
    "lookup_misses",
    "requested_tokens",
    "hit_tokens",
    "planned_away_tokens",
    "loads",
    "loaded_blocks",
    "loaded_bytes",
    "loaded_tokens",
    "stored_blocks",
    "stored_bytes",
    "joined_blocks",
    "joined_slices",
    "present_blocks",
    "refused_blocks",
    "written_objects",
    "written_bytes",
    "promoted_blocks",
    "prefetched_blocks",
    "probes",
    "declined_objects",
    "declined_bytes",
    "unchained_blocks",
    "refilled_blocks",
    "evicted_objects",
    "evicted_bytes",
    "expired_objects",
    "expired_bytes",
    "dropped_objects",
    "dropped_bytes",
    "adopted_objects",
    "asked_objects",
    "unanswered_lookups",
    "gone_objects",
    "audits",
    "audit_failures",
    "flights_joined",
)


class Ledger:
    """Counters that only rise. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._failures: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def count(self, name: str, n: int = 1) -> None:
        """Add `n` to counter `name`; a negative n is ignored, for a counter never falls."""
        if n > 0:
            with self._lock:
                self._counters[name] += n

    def failure(self, reason: str, detail: object) -> None:
        """Count a failure under `reason` (a few words, no data) and log it with its detail, at most once a
        minute.
        """
        now = time.monotonic()
        with self._lock:
            self._failures[reason] += 1
            times = self._failures[reason]
            due = now - self._logged.get(reason, -REPEAT_SECONDS) >= REPEAT_SECONDS
            if due:
                self._logged[reason] = now
        if due:
            log.warning("%s: %s (failure %d of this kind; treated as a miss)", reason, detail, times)

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def failures(self) -> dict[str, int]:
        with self._lock:
            return dict(self._failures)
