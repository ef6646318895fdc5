"""Room: what keeps a tier within its capacity and its tenants within their quotas, and what pins may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from .ledger import Ledger
from .tenants import NOBODY

if TYPE_CHECKING:
    from .tier import Tier

PINNED_SHARE = 2
"""Pins take at most one part in so many of a tier, where the tier's rules say nothing else."""

STAYING = 16
"""How many objects in a row may be kept back from eviction, to be written below first."""


class Room:
    """The room of one tier. Safe from several threads.

    Whatever calls for room is given it by evicting: first what no prompt can reach, then what the tier's
    policy names. A tenant over its quota makes room among its own blocks.
    """

    def __init__(self, tier: Tier, ledger: Ledger) -> None:
        self.reserved = 0
        self.pinned_bytes = 0
        self.may_go: Callable[[int], bool] | None = None
        """Asked before an object is evicted; False keeps it back, for it is being written below."""
        self.making_way = 0
        """How many objects are being written below, so that they may go."""
        self._tier = tier
        self._ledger = ledger
        self._reserved_of: Counter[str] = Counter()
        self._to_delete: list[str] = []

    def make(self, size: int, tenant: str = NOBODY) -> bool:
        """Evict until `size` more bytes of a tenant fit, and hold them; False (holding nothing) where that
        cannot be.
        """
        tier = self._tier
        if tier.bounded and not tier.indexed.is_set():
            return False  # how much there is already is not known yet
        tier.gaps.settle()
        with tier.lock:
            tier.expire()
            fits = self._within_quota(size, tenant)
            while fits and tier.used + size > tier.capacity:
                fits = self._evict()
            if fits:
                self.reserved += size
                self._reserved_of[tenant] += size
        self._delete_evicted()
        return fits

    def give_back(self, size: int, tenant: str = NOBODY) -> None:
        """Give back bytes held by `make`."""
        with self._tier.freed:
            self.reserved -= size
            self._reserved_of[tenant] -= size
            if self._reserved_of[tenant] <= 0:
                del self._reserved_of[tenant]
            self._tier.freed.notify_all()

    def within_quota(self, size: int, tenant: str) -> bool:
        """Whether `size` more bytes are within a tenant's quota, perhaps after evicting some of its own."""
        with self._tier.lock:
            return self._within_quota(size, tenant)

    def keep_quotas(self) -> None:
        """Evict what tenants have beyond their quotas: what earlier runs left, under other rules."""
        tier = self._tier
        with tier.lock:
            for tenant in [tenant for tenant, _, _ in tier.spaces.shares()]:
                self._within_quota(0, tenant)

    def evict_one(self) -> bool:
        """Remove the least valuable object that nobody leases or pins; False where there is none."""
        self._tier.gaps.settle()
        with self._tier.lock:
            self._tier.expire()
            gone = self._evict()
        self._delete_evicted()
        return gone

    def pin(self, slot: int) -> bool:
        """Keep an object from being evicted; False where pins have taken the room that is meant for them."""
        tier = self._tier
        bound = tier.capacity // PINNED_SHARE if tier.rules.pins is None else tier.rules.pins
        with tier.lock:
            record = tier.index.record(slot)
            if not record.pinned:
                if self.pinned_bytes + record.size > bound:
                    return False
                tier.index.pin(slot)
                self.pinned_bytes += record.size
            return True

    def unpin(self, slot: int) -> bool:
        """Undo `pin`; whether the object was pinned."""
        tier = self._tier
        with tier.lock:
            if not tier.index.unpin(slot):
                return False
            self.pinned_bytes -= tier.index.record(slot).size
            return True

    # with the tier's lock held

    def _within_quota(self, size: int, tenant: str) -> bool:
        quota = None if tenant == NOBODY else self._tier.rules.quota(tenant)
        spaces = self._tier.spaces
        while quota is not None and spaces.held(tenant) + self._reserved_of[tenant] + size > quota:
            slot = spaces.victim(tenant)
            if slot is None:
                return False
            parent = self._tier.index.record(slot).parent
            self._let_go(slot)
            spaces.went(tenant, parent)
        return True

    def _evict(self) -> bool:
        # Plain LRU is what its name says, so that it can be compared with what others measure.
        slot = None if self._tier.policy == "lru" else self._tier.gaps.victim(self._tier)
        for _ in range(STAYING if slot is None else 0):
            slot = self._tier.index.victim()
            if slot is None or self.may_go is None or self.may_go(slot):
                break
            slot = None
        if slot is None:
            return False
        self._let_go(slot)
        return True

    def _let_go(self, slot: int) -> None:
        tier = self._tier
        size = tier.index.record(slot).size
        if tier.shared is None:
            tier.delete(slot)
        else:
            if tier.bounded:
                self._to_delete.append(tier.object_name(slot))
            tier.take_out(slot)
        if tier.shared is None or tier.bounded:
            self._ledger.count("evicted_objects")
            self._ledger.count("evicted_bytes", size)

    def _delete_evicted(self) -> None:
        """Without the lock: a server is asked to delete what was evicted."""
        if self._to_delete:
            with self._tier.lock:
                names, self._to_delete = self._to_delete, []
            self._tier.delete_many(names)
