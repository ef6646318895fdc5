"""Tenants: whose blocks a space holds, and how much of a tier each tenant has."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from retain._native import Index
from retain.header import BlockHeader
from retain.identity import salt_of, space_of

NOBODY = ""
"""The tenant of spaces without a salt, and of those of which nothing is known yet."""

UNKNOWN = b"\0" * 32
"""The parent and space of a record whose header has not been read yet."""

OWNED = 1 << 16
"""How many spaces are remembered as somebody's while no tier holds anything of them."""


@dataclass
class _Space:
    kin: bytes
    adapter: bytes | None
    tenant: str
    tiers: int = 0


class Tenants:
    """The tenant of each space. A tenant is the salt of a space; salts are digests, so that only names that
    were given here can be told from it, and other tenants go by the first digits of their space.

    Safe from several threads.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._salts = {name: salt_of(name) for name in names}
        self._spaces: dict[bytes, _Space] = {}
        self._owned: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self.changed = 0
        """Rises when a space that a tier holds gets another tenant."""

    def own(self, space: bytes, tenant: str) -> None:
        """A space belongs to a tenant: known to the engine, which makes the salt of a request."""
        with self._lock:
            if self._owned.get(space) == tenant:
                self._owned.move_to_end(space)
                return
            self._owned[space] = tenant
            while len(self._owned) > OWNED:
                self._owned.popitem(last=False)
            met = self._spaces.get(space)
            if met is not None and met.tenant != tenant:
                met.tenant = tenant
                self.changed += 1

    def enter(self, header: BlockHeader) -> None:
        """One more tier holds something of the space that a header names."""
        with self._lock:
            met = self._spaces.get(header.space)
            if met is None:
                met = _Space(header.kin, header.adapter, self._tenant(header))
                self._spaces[header.space] = met
            met.tiers += 1

    def leave(self, space: bytes) -> None:
        """One tier less holds something of a space."""
        with self._lock:
            met = self._spaces.get(space)
            if met is not None:
                met.tiers -= 1
                if met.tiers < 1:
                    del self._spaces[space]

    def of(self, space: bytes) -> str:
        """The tenant of a space."""
        met = self._spaces.get(space)
        return met.tenant if met is not None else self._owned.get(space, NOBODY)

    def whose(self, header: BlockHeader) -> str:
        """The tenant of a block's space, whether or not anything of it is held yet."""
        met = self._spaces.get(header.space)
        return self._tenant(header) if met is None else met.tenant

    def kin(self, space: bytes) -> bytes | None:
        """The kin of a space's model, None where no tier holds anything of it."""
        met = self._spaces.get(space)
        return None if met is None else met.kin

    def belongs(self, space: bytes, tenant: str) -> bool:
        """Whether a space is a tenant's, whether or not its name was given here."""
        if self.of(space) == tenant:
            return True
        met = self._spaces.get(space)
        return met is not None and space == space_of(met.kin, met.adapter, salt_of(tenant))

    def _tenant(self, header: BlockHeader) -> str:
        owner = self._owned.get(header.space)
        if owner is not None:
            return owner
        if header.space == space_of(header.kin, header.adapter, None):
            return NOBODY
        for name, salt in self._salts.items():
            if header.space == space_of(header.kin, header.adapter, salt):
                return name
        return f"~{header.space.hex()[:12]}"


class Spaces:
    """The spaces of which one tier holds objects, by number; how much each tenant has there, and which of its
    objects goes first.

    Within a tenant the object that was used longest ago goes first, children before their parents. Number 0
    is the unknown space. Not safe from several threads: the tier's lock guards it.
    """

    def __init__(self, index: Index, tenants: Tenants) -> None:
        self._index = index
        self._tenants = tenants
        self._spaces: list[bytes] = [UNKNOWN]
        self._numbers: dict[bytes, int] = {UNKNOWN: 0}
        self._unused: list[int] = []
        self._of: dict[str, set[int]] = {NOBODY: {0}}
        self._changed = tenants.changed
        self._orders: dict[str, list[tuple[int, int]]] = {}

    def __getitem__(self, number: int) -> bytes:
        return self._spaces[number]

    def known(self, space: bytes) -> int | None:
        """The number of a space, None where nothing of it is here."""
        return self._numbers.get(space)

    def number(self, header: BlockHeader) -> int:
        """The number of the space that a header names; something of it is about to enter."""
        number = self._numbers.get(header.space)
        if number is None:
            self._tenants.enter(header)
            if self._unused:
                number = self._unused.pop()
                self._spaces[number] = header.space
            else:
                number = len(self._spaces)
                self._spaces.append(header.space)
            self._numbers[header.space] = number
            self._of.setdefault(self._tenants.of(header.space), set()).add(number)
        return number

    def entered(self, number: int, slot: int) -> None:
        """An object has entered a slot."""
        if self._orders:
            order = self._orders.get(self.tenant(number))
            if order is not None:
                heapq.heappush(order, (self._index.record(slot).tick, slot))

    def left(self, number: int) -> None:
        """An object of a space has left: the last of it takes the number along."""
        if number == 0 or self._index.space_bytes(number)[0]:
            return
        space = self._spaces[number]
        tenant = self._tenants.of(space)
        numbers = self._numbers_of(tenant)
        numbers.discard(number)
        if not numbers:
            self._of.pop(tenant, None)
            self._orders.pop(tenant, None)
        del self._numbers[space]
        self._unused.append(number)
        self._tenants.leave(space)

    def tenant(self, number: int) -> str:
        """Whose a space is."""
        return self._tenants.of(self._spaces[number])

    def held(self, tenant: str) -> int:
        """How many bytes a tenant has here."""
        return sum(self._index.space_bytes(number)[1] for number in self._numbers_of(tenant))

    def shares(self) -> Iterator[tuple[str, int, int]]:
        """Every tenant that has something here: its name, objects and bytes."""
        self._numbers_of(NOBODY)
        for tenant, numbers in self._of.items():
            held = [self._index.space_bytes(number) for number in numbers]
            if any(objects for objects, _ in held):
                yield tenant, sum(objects for objects, _ in held), sum(size for _, size in held)

    def victim(self, tenant: str) -> int | None:
        """The object of a tenant that goes first, None where all are in use."""
        for attempt in range(2):
            if attempt or tenant not in self._orders:
                slots = (
                    slot
                    for number in self._numbers_of(tenant)
                    for slot in self._index.slots(space=number).tolist()
                )
                self._orders[tenant] = [
                    (self._index.record(slot).tick, slot) for slot in slots if self._is_leaf(slot)
                ]
                heapq.heapify(self._orders[tenant])
            slot = self._first(tenant, self._orders[tenant])
            if slot is not None:
                return slot
        del self._orders[tenant]
        return None

    def went(self, tenant: str, parent: bytes) -> None:
        """A victim has gone: the block before it may be the next."""
        order = self._orders.get(tenant)
        if order is not None:
            for slot in self._index.same_key(parent):
                heapq.heappush(order, (self._index.record(slot).tick, slot))

    def _numbers_of(self, tenant: str) -> set[int]:
        if self._changed != self._tenants.changed:
            self._changed = self._tenants.changed
            self._orders.clear()
            self._of = {}
            for number in self._numbers.values():
                self._of.setdefault(self.tenant(number), set()).add(number)
        return self._of.get(tenant, set())

    def _first(self, tenant: str, order: list[tuple[int, int]]) -> int | None:
        while order:
            tick, slot = order[0]
            try:
                record = self._index.record(slot)
            except IndexError:
                heapq.heappop(order)
                continue
            if record.tick != tick:  # it was used since, or the slot holds another object
                heapq.heapreplace(order, (record.tick, slot))
                continue
            heapq.heappop(order)
            free = not record.refs and not record.pinned and self.tenant(record.space) == tenant
            if free and self._is_leaf(slot):
                return slot
        return None

    def _is_leaf(self, slot: int) -> bool:
        return not self._index.children(self._index.record(slot).key, 1)
