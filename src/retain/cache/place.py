"""The arena: the memory tier as the place through which all blocks go, in and out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from retain.errors import StoreError, StoreFull
from retain.header import BlockHeader
from retain.stores.memory import MemoryStore

from .ledger import Ledger
from .tier import Tier

WRITE_SECONDS = 2.0
"""How long a place is waited for, at the most, where blocks have to be written below before they may go."""


class Arena:
    """Places for raw blocks in the memory tier; evicts to make room. Safe from several threads."""

    def __init__(self, tier: Tier, ledger: Ledger, expire: Callable[[], bool]) -> None:
        if not isinstance(tier.store, MemoryStore):
            raise TypeError("a cache's first tier is memory")
        self.tier = tier
        self._store = tier.store
        self._ledger = ledger
        self._expire = expire
        self._open: set[str] = set()
        self._open_lock = threading.Lock()

    def reserve(self, name: str, size: int, wait: float) -> memoryview | None:
        """A writable place of `size` bytes, evicting what is worth least; None when that is not enough within
        `wait` seconds.

        Raises KeyError when `name` is here already or on its way.
        """
        with self._open_lock:
            if name in self._open or self._store.size(name) is not None:
                raise KeyError(name)
            self._open.add(name)
        try:
            buffer = self._allocate(name, size, time.monotonic() + wait)
        except BaseException:
            self._forget(name)
            raise
        if buffer is None:
            self._forget(name)
        return buffer

    def commit(
        self, header: BlockHeader, name: str, size: int, *, leased: bool, ttl: float | None = None
    ) -> int:
        """Make a filled place visible, for `ttl` seconds at the most if given; its slot, leased once for the
        caller if asked.
        """
        try:
            with self.tier.lock:
                self._store.commit(name)
                slot = self.tier.insert(header, name, size, ttl)
                if leased:
                    self.tier.hold(slot)
                return slot
        finally:
            self._forget(name)

    def abandon(self, name: str) -> None:
        """Give a place back unfilled. Never raises: it may run when the cache is closed already."""
        with suppress(KeyError, StoreError):
            self._store.abandon(name)
        self._forget(name)
        with self.tier.freed:
            self.tier.freed.notify_all()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of places that are not committed yet."""
        return self._store.reserved_bytes

    def view(self, slot: int) -> memoryview | None:
        """The bytes in a slot, read-only; valid while the slot is leased."""
        return self._store.view(self.tier.object_name(slot))

    def _allocate(self, name: str, size: int, deadline: float) -> memoryview | None:
        if size > self.tier.capacity:
            return None
        written_by = time.monotonic() + WRITE_SECONDS
        while True:
            try:
                return self._store.reserve(name, size)
            except StoreFull:
                if self.tier.room.evict_one() or self._expire():
                    continue
                if self.tier.room.making_way:
                    deadline = max(deadline, written_by)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with self.tier.freed:
                    self.tier.freed.wait(min(left, 0.1))

    def _forget(self, name: str) -> None:
        with self._open_lock:
            self._open.discard(name)
