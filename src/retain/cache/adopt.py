"""Adopting: what earlier runs left in a tier, or other hosts in a shared one, enters its index."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from retain.errors import ForeignObject, InvalidObject, StoreError
from retain.header import Frame, parse_frame, split_name
from retain.identity import Tokens
from retain.stores.base import StoredObject

from .ledger import Ledger
from .tenants import UNKNOWN
from .tier import Tier
from .workers import Workers

HEAD_BYTES = 16 << 10
"""How much of an object is read to learn its header and token ids."""

HEADS_AT_ONCE = 8
"""Heads that are read from a shared tier at a time, when a call has to know them all."""

ADOPT_SECONDS = 1.0
"""How long opening a cache waits for the headers of what it found; the rest is read in the background."""


INDEX_SECONDS = 2.0
"""How long opening a cache waits for the list of what a tier of its own holds. A million objects take longer;
until then lookups ask the store itself, and nothing is written to a tier that has a capacity.
"""


class Adopter:
    """Scans tiers when a cache opens, and reads the headers of what it finds, all in the background."""

    def __init__(self, tiers: Sequence[Tier], ledger: Ledger) -> None:
        self._ledger = ledger
        self._workers = Workers("retain-adopt", 1)
        self._scanners = Workers("retain-scan", max(1, len(tiers)))
        self._closed = threading.Event()
        self._adopted: dict[str, threading.Event] = {}
        for tier in tiers:
            self._adopt(tier)

    def _adopt(self, tier: Tier) -> None:
        done = threading.Event()
        self._adopted[tier.name] = done
        if tier.shared is not None:
            if tier.shared.lists or tier.bounded:
                self._workers.submit(lambda: self._list(tier, done))
            else:
                done.set()
            return
        tier.indexed.clear()
        self._scanners.submit(lambda: self._index(tier, done))
        tier.indexed.wait(INDEX_SECONDS)
        done.wait(ADOPT_SECONDS if tier.indexed.is_set() else 0.0)

    def _index(self, tier: Tier, done: threading.Event) -> None:
        """Enter what a tier of this cache's own holds from earlier, the oldest first."""
        try:
            found = sorted(tier.store.scan(), key=lambda each: each.modified)
        except StoreError as error:
            if not self._closed.is_set():
                self._ledger.failure(f"the {tier.name} tier could not be scanned", error)
            tier.indexed.set()
            done.set()
            return
        adopted: list[StoredObject] = []
        for each in found:
            if self._closed.is_set():
                break
            try:
                if self._enter(tier, each):
                    adopted.append(each)
            except (ValueError, KeyError) as error:
                self._ledger.failure(
                    f"a foreign object lies in the {tier.name} tier and is left alone", error
                )
        self._ledger.count("adopted_objects", len(adopted))
        tier.indexed.set()
        if tier.room.make(0):
            tier.room.give_back(0)
        else:
            self._ledger.failure(f"the {tier.name} tier holds more than its capacity", f"{tier.used} bytes")
        self._workers.submit(lambda: self._learn(tier, adopted, done))

    def _enter(self, tier: Tier, found: StoredObject) -> bool:
        with tier.lock:
            if not tier.indexed.is_set() and (tier.find(found.name) is not None or tier.leaving(found.name)):
                return False  # a lookup was faster
            tier.adopt(found, max(0.0, time.time() - found.modified))
            return True

    def look(self, tier: Tier, names: Sequence[str]) -> int:
        """Enter those of these objects that a tier holds which is not listed yet; how many there are."""
        found = 0
        for name in names:
            try:
                size = tier.store.size(name)
                if (
                    size
                    and not tier.indexed.is_set()
                    and self._enter(tier, StoredObject(name, size, time.time()))
                ):
                    found += 1
            except (KeyError, ValueError, StoreError) as error:
                self._ledger.failure(f"the {tier.name} tier could not be asked", error)
                break
        return found

    def _list(self, tier: Tier, done: threading.Event) -> None:
        try:
            self.discover(tier)
            if tier.bounded and tier.room.make(0):  # what others have written counts too
                tier.room.give_back(0)
        finally:
            done.set()

    def discover(
        self, tier: Tier, keys: Collection[bytes] | None = None, *, headers: bool = False
    ) -> str | None:
        """Record what a shared tier's server lists, or of it what is of these keys; with `headers`, read
        those that tell to which space each belongs. What went wrong, None where nothing did.
        """
        now = time.time()
        try:
            for each in tier.store.scan():
                if self._closed.is_set():
                    return None
                with suppress(ValueError):
                    if keys is None or split_name(each.name)[0] in keys:
                        tier.note(each.name, UNKNOWN, each.size, max(0.0, now - each.modified))
        except StoreError as error:
            self._ledger.failure(f"the {tier.name} tier could not be listed", error)
            return f"it could not be listed: {error}"
        names = tier.unknown() if headers else []
        with ThreadPoolExecutor(HEADS_AT_ONCE, thread_name_prefix="retain-heads") as threads:
            troubles = [each for each in threads.map(lambda name: self._learn_one(tier, name), names) if each]
        return f"{len(troubles)} of its objects could not be read: {troubles[0]}" if troubles else None

    def _learn_one(self, tier: Tier, name: str) -> str | None:
        try:
            frame, _ = read_head(tier, name)
        except (InvalidObject, StoreError) as error:
            return str(error)
        if frame is not None:
            tier.learn(name, frame.header)
        return None

    def _learn(self, tier: Tier, adopted: Sequence[StoredObject], done: threading.Event) -> None:
        try:
            # The latest first: they are the likeliest to be asked for.
            for each in reversed(adopted):
                if self._closed.is_set():
                    return
                slot = tier.find(each.name)
                if slot is None:
                    continue
                try:
                    frame, _ = read_head(tier, each.name)
                except (ForeignObject, StoreError) as error:  # nothing that is known to be damaged
                    self._ledger.failure(f"an object of the {tier.name} tier cannot be used", error)
                    continue
                except InvalidObject:
                    frame = None
                if frame is None or frame.header.name != each.name or frame.size != each.size:
                    self._ledger.failure(f"a damaged object was removed from the {tier.name} tier", each.name)
                    tier.remove(slot)
                else:
                    tier.learn(each.name, frame.header)
            tier.room.keep_quotas()
        except Exception as error:
            self._ledger.failure(f"reading the headers of the {tier.name} tier failed", error)
        finally:
            done.set()

    def wait(self, tier: Tier, timeout: float = 60.0) -> None:
        """Wait until the headers of a tier's earlier objects are known, or it takes too long."""
        event = self._adopted.get(tier.name)
        if event is not None:
            event.wait(timeout)

    def close(self) -> None:
        self._closed.set()
        self._scanners.stop()
        self._workers.stop()


def read_head(tier: Tier, name: str) -> tuple[Frame | None, Tokens | None]:
    """The head of an object, Nones where there is no object. Raises InvalidObject, StoreError."""
    buffer = bytearray(HEAD_BYTES)
    got = tier.store.read_into(name, memoryview(buffer))
    if got == 0:
        return None, None
    frame = parse_frame(memoryview(buffer)[:got])
    first = frame.tensors[0]
    stop = frame.data_start + first.size
    if first.name != "tokens" or first.shape != (frame.header.count,):
        raise InvalidObject("the object does not begin with its token ids")
    if stop > got:
        buffer = bytearray(stop)
        if tier.store.read_into(name, memoryview(buffer)) < stop:
            raise InvalidObject("the object ends inside its token ids")
    return frame, np.frombuffer(bytes(buffer[frame.data_start : stop]), "<u4")
