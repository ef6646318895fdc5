"""Probing: what a tier costs is measured in the background, with little, where a plan decides against it.

A tier that is not read because it was slow would never be known to be fast again. Reading a small part of an
object, twice with two lengths, tells latency and bandwidth apart, and keeps no request waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from retain.errors import StoreError

from .ledger import Ledger
from .planner import Planner
from .results import Part
from .tier import Tier
from .workers import Workers

SHORT = 16 << 10
LONG = 512 << 10
"""Bytes that the two reads of a probe ask for: at 1 MB/s they take half a second."""


class Prober:
    """Measures tiers by reading beginnings of their objects."""

    def __init__(self, tiers: Sequence[Tier], ledger: Ledger, planner: Planner) -> None:
        self._tiers = tuple(tiers)
        self._ledger = ledger
        self._planner = planner
        self._workers = Workers("retain-probe", 1)
        self._closed = False

    def probe(self, parts: Sequence[Part]) -> None:
        """A plan leaves these parts where they are: see in the background whether that is still right."""
        seen: set[int] = set()
        for source in (source for part in parts for source in part.sources):
            tier = self._tiers[source.tier]
            if source.tier == 0 or source.tier in seen or self._closed or not tier.up:
                continue
            seen.add(source.tier)
            try:
                name = tier.object_name(source.slot)
            except IndexError:
                continue  # evicted meanwhile
            if self._planner.may_probe(tier.name):
                self._workers.submit(lambda tier=tier, name=name: self._measure(tier, name))  # type: ignore[misc]

    def close(self) -> None:
        self._closed = True
        self._workers.stop()

    def _measure(self, tier: Tier, name: str) -> None:
        began = time.perf_counter()
        try:
            buffer = memoryview(bytearray(LONG))
            for length in (SHORT, LONG):
                if self._closed:
                    return
                start = time.perf_counter()
                got = tier.store.read_into(name, buffer[:length])
                seconds = time.perf_counter() - start
                self._planner.observe_load(tier.name, 1, got, seconds)
            self._ledger.count("probes")
        except StoreError as error:
            self._ledger.failure(f"the {tier.name} tier could not be probed", error)
        except Exception as error:
            self._ledger.failure(f"probing the {tier.name} tier failed", f"{type(error).__name__}: {error}")
        finally:
            self._planner.probed(tier.name, time.perf_counter() - began)
