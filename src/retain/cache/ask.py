"""Asking shared tiers: their servers know of objects that no index here does.

All keys of a prompt are asked in one round trip, of all shared tiers at a time. A request waits no longer
than a tier's server is known to take, and no longer than a small part of what computing would take; an answer
that comes later serves the next request.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from retain.errors import StoreError
from retain.fidelity import accepts, lineage_of, quality_of
from retain.header import object_name
from retain.model import ModelSpec, Slice

from .ledger import Ledger
from .planner import Planner
from .tier import Tier
from .workers import Task, Workers

ASKERS = 4
"""Threads that ask: each waits for a server nearly all of the time."""

MOST_PENDING = 8
"""Questions to one tier that are not answered yet; beyond them it is not asked."""

SHARE_OF_PREFILL = 0.03
"""How much of the time that computing the prompt would take may be spent asking, at the most: what is
found late serves the next request, and no request is to be more than 5 % slower for it."""

LEAST_SECONDS = 0.005


class Asker:
    """Asks tiers of which keys they hold objects, and records those in their indices."""

    def __init__(self, tiers: Sequence[Tier], ledger: Ledger, planner: Planner) -> None:
        self._tiers = tuple(tier for tier in tiers if tier.shared is not None)
        self._ledger = ledger
        self._planner = planner
        self._workers = Workers("retain-ask", ASKERS)
        self._pending: Counter[str] = Counter()
        self._late: set[str] = set()
        """Tiers that owe an answer which was waited for long enough: a request asks several times, and waits
        for such a tier once."""
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def ask(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        spec: ModelSpec,
        wanted: Slice,
        tokens: int,
        fidelity: str,
    ) -> bool:
        """Ask for the blocks (key, parent) of `rows`, for a prompt of which at most `tokens` would be used.

        A tier whose codec gives less than `fidelity` is not asked. Returns when every tier has answered or is
        not worth waiting for; whether one has found something.
        """
        asked = [
            (tier, task) for tier in self._tiers if (task := self._start(tier, rows, spec, wanted, fidelity))
        ]
        started = time.monotonic()
        found = 0
        for tier, task in asked:
            left = started + self._patience(tier, spec, tokens) - time.monotonic()
            try:
                found += task.result(max(0.0, left))
            except TimeoutError:
                self._ledger.count("unanswered_lookups")
                with self._lock:
                    if self._pending[tier.name]:
                        self._late.add(tier.name)
            except StoreError as error:
                self._ledger.failure(f"the {tier.name} tier could not be asked", error)
            except Exception as error:
                self._ledger.failure(
                    f"asking the {tier.name} tier failed", f"{type(error).__name__}: {error}"
                )
        return found > 0

    def close(self) -> None:
        self._workers.stop()

    def _patience(self, tier: Tier, spec: ModelSpec, tokens: int) -> float:
        if tier.shared is None or tier.name in self._late or self._pending[tier.name] > ASKERS:
            return 0.0
        prefill = self._planner.prefill_seconds(spec, 0, tokens)
        wait = tier.shared.wait
        return wait if prefill is None else min(wait, max(LEAST_SECONDS, SHARE_OF_PREFILL * prefill))

    def _start(
        self, tier: Tier, rows: Sequence[tuple[bytes, bytes]], spec: ModelSpec, wanted: Slice, fidelity: str
    ) -> Task[int] | None:
        # Hosts that share a tier use one codec for it: a block is found under that, and what was computed on
        # blocks of this very tier under the lineage that those have.
        quality = quality_of(tier.codec.name, None)
        lineages = list(dict.fromkeys((None, lineage_of(quality or "exact"))))
        if not tier.up or not rows or not accepts(fidelity, quality):
            return None
        with self._lock:
            if self._pending[tier.name] >= MOST_PENDING:
                return None
            self._pending[tier.name] += 1
        slices = dict.fromkeys((spec.whole, wanted))
        names = [
            (object_name(key, spec.variant, part, tier.codec.name, lineage), parent)
            for key, parent in rows
            for part in slices
            for lineage in lineages
        ]
        task = self._workers.submit(lambda: self._ask(tier, names))
        task.when_done(lambda _: self._ended(tier))
        return task

    def _ask(self, tier: Tier, names: Sequence[tuple[str, bytes]]) -> int:
        if tier.shared is None or not tier.up:
            return 0
        found = 0
        sizes = tier.shared.sizes([name for name, _ in names])
        for (name, parent), size in zip(names, sizes, strict=True):
            if size is not None:
                tier.note(name, parent, size)
                found += 1
        self._ledger.count("asked_objects", len(names))
        return found

    def _ended(self, tier: Tier) -> None:
        with self._lock:
            self._pending[tier.name] -= 1
            if not self._pending[tier.name]:
                self._late.discard(tier.name)
