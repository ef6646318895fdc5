"""Writing: one block out of the arena to one tier, never behind a hole that could not be filled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from retain.block import Block, open_object
from retain.errors import StoreError, StoreFull
from retain.header import BlockHeader
from retain.stores.base import Buffer

from .ledger import Ledger
from .place import Arena
from .tier import Tier

MAKE_ROOM_TRIES = 8
"""How many objects are evicted, at the most, for one that the medium refuses although the tier's capacity
allows it.
"""

OWED = 4096
"""How many blocks of a tier are remembered that it could not take."""

TRIES = 3
"""How often a block is tried again once its tier takes others."""

LONGEST_PATH = 64
"""How many owed blocks are written for the sake of one behind them."""


@dataclass(eq=False)
class Job:
    """One block on its way to one tier."""

    tier: Tier
    header: BlockHeader
    slot: int
    cancelled: bool = field(default=False)


@dataclass
class _Owed:
    name: str
    parent: bytes
    tries: int = 0


class Writer:
    """Writes jobs. `tiers` are all tiers of the cache, the arena's first. Safe from several threads.

    A block that a tier could not take is owed to it. What continues such a block is of no use there: so the
    owed one is written first, while memory has it, or else the one behind it is not written either.
    """

    def __init__(self, arena: Arena, tiers: Sequence[Tier], ledger: Ledger) -> None:
        self.tiers = tuple(tiers)
        self._arena = arena
        self._ledger = ledger
        self._owed: dict[str, OrderedDict[bytes, _Owed]] = {tier.name: OrderedDict() for tier in tiers}
        self._lock = threading.Lock()

    def owed(self, tier: Tier, most: int) -> list[str]:
        """The raw names of the first blocks that a tier could not take and that are worth another try."""
        with self._lock:
            found = []
            for each in self._owed[tier.name].values():
                if each.tries < TRIES:
                    each.tries += 1
                    found.append(each.name)
                if len(found) == most:
                    break
            return found

    def write(self, job: Job) -> bool:
        """Whether the tier has the block now. Never raises: what fails is counted, and owed."""
        tier, header = job.tier, job.header
        try:
            if self._follows(tier, header) and self._written(job):
                self._settle(tier, header)
                return True
        except Exception as error:
            self._ledger.failure(f"a block could not be written to the {tier.name} tier", error)
        if not job.cancelled:
            with self._lock:
                owed = self._owed[tier.name]
                owed.setdefault(header.key, _Owed(header.name, header.parent))
                while len(owed) > OWED:
                    owed.popitem(last=False)
        return False

    def _settle(self, tier: Tier, header: BlockHeader) -> None:
        with self._lock:
            self._owed[tier.name].pop(header.key, None)

    def _follows(self, tier: Tier, header: BlockHeader) -> bool:
        """Whether what comes before a block will be found, after writing what of it is owed."""
        if header.first == 0:
            return True
        path: list[str] = []
        parent = header.parent
        with self._lock:
            owed = self._owed[tier.name]
            while parent in owed and len(path) <= LONGEST_PATH:
                path.append(owed[parent].name)
                parent = owed[parent].parent
        filled = len(path) <= LONGEST_PATH and all(self._refill(tier, name) for name in reversed(path))
        if filled and any(each.holds(header.parent) for each in self.tiers):
            return True
        self._ledger.count("unchained_blocks")
        return False

    def _refill(self, tier: Tier, name: str) -> bool:
        memory = self._arena.tier
        slot = memory.find(name)
        if slot is None or not memory.acquire(slot, bytes.fromhex(name.partition(".")[0])):
            return False
        try:
            view = self._arena.view(slot)
            if view is None:
                return False
            header = open_object(view)[0].header
            if not self._written(Job(tier, header, slot)):
                return False
            self._settle(tier, header)
            self._ledger.count("refilled_blocks")
            return True
        finally:
            memory.release([slot])

    def _written(self, job: Job) -> bool:
        """Write a block; whether the tier has it now. Raises StoreError."""
        tier = job.tier
        header = replace(job.header, codec=tier.codec.name)
        name = header.name
        if tier.find(name) is not None:
            return True
        if header.lineage is not None and tier.equals(job.header.name):
            return True  # it was decoded from what lies there
        if tier.leaving(name):  # a reader still has the one that was dropped: this one stays in memory
            self._ledger.count("refused_blocks")
            return False
        if tier.shared is not None and (kept := tier.shared.sizes([name])[0]) is not None:
            tier.note(name, header.parent, kept)  # another host was faster
            return True
        chunks = self._chunks(job)
        size = sum(len(chunk) for chunk in chunks)
        tenant = tier.tenants.whose(header)
        if not tier.room.make(size, tenant):
            self._ledger.failure(
                f"a block does not fit the {tier.name} tier",
                f"{size} bytes, capacity {tier.capacity}, quota {tier.rules.quota(tenant)}",
            )
            return False
        try:
            self._put(tier, name, chunks)
        except BaseException:
            tier.room.give_back(size, tenant)
            raise
        with tier.lock:
            tier.room.give_back(size, tenant)
            if job.cancelled:
                tier.store.delete(name)
                return False
            if tier.find(name) is None:  # else a lookup has asked the server meanwhile
                tier.insert(header, name, size)
        self._ledger.count("written_objects")
        self._ledger.count("written_bytes", size)
        return True

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
