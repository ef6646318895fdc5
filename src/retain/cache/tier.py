"""A tier: a store, the index of what it holds, and the rules that bound it: capacity, quotas, times, pins.

Records are found by key and form (variant, slice, codec); leases and pins keep them from being evicted. A
record that is removed while leased stays out of sight until its last lease ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from retain._native import Index
from retain.address import MAX_BYTES, Rules
from retain.codecs import CODECS, Codec
from retain.header import BlockHeader, split_name
from retain.model import ModelSpec, Slice
from retain.stores.base import DeletesMany, Shared, Store, StoredObject

from .ages import Ages
from .forms import Form, Forms, contains
from .gaps import Gaps
from .ledger import Ledger
from .results import TierStats
from .room import Room
from .tenants import UNKNOWN, Spaces, Tenants

NONE = 0xFFFFFFFF
KNOWN = 1 << 20
"""How many objects of a shared tier are remembered: about 150 MB. Those used longest ago are forgotten."""

Slots = npt.NDArray[np.uint32]


class Tier:
    """One tier. Safe from several threads; `lock` guards what must happen together.

    `name` is the tier's kind, made unique among the tiers of a cache by its position. `capacity` None: only
    the medium bounds it, or its server.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        capacity: int | None,
        codec: Codec,
        policy: str,
        ledger: Ledger,
        rules: Rules | None = None,
        tenants: Tenants | None = None,
        gaps: Gaps | None = None,
    ) -> None:
        self.name = name
        self.kind = store.kind
        self.store = store
        self.shared = store if isinstance(store, Shared) else None
        self._deletes_many = store if isinstance(store, DeletesMany) else None
        self.bounded = capacity is not None
        self.capacity = MAX_BYTES if capacity is None else capacity
        self.codec = codec
        self.rules = rules or Rules()
        self.policy = policy
        self.index = Index(policy)
        self.lock = threading.RLock()
        self.freed = threading.Condition(self.lock)
        self.tenants = tenants or Tenants(name for name, _ in (*self.rules.quotas, *self.rules.ttls) if name)
        self.ages = Ages()
        self.indexed = threading.Event()
        """Set unless the tier's earlier objects are still being listed."""
        self.indexed.set()
        self.touched: Callable[[Sequence[bytes]], None] | None = None
        """Told of the keys that are used."""
        self.gaps = gaps or Gaps()
        self.spaces = Spaces(self.index, self.tenants)
        self.room = Room(self, ledger)
        self._ledger = ledger
        self._forms = Forms()
        self._doomed: set[int] = set()
        self._forgotten: set[int] = set()

    # finding

    def match(self, keys: Sequence[bytes], spec: ModelSpec, wanted: Slice, fidelity: str) -> Slots:
        """The slot of an object that alone serves each key, NONE where there is none."""
        with self.lock:
            self.expire()
            forms = self.forms(spec, wanted, fidelity)
            if not forms or not keys:
                return np.full(len(keys), NONE, np.uint32)
            slots = self.index.lookup(b"".join(keys), forms)
            if self._doomed:
                slots[np.isin(slots, np.fromiter(self._doomed, np.uint32))] = NONE
            return slots

    def forms(self, spec: ModelSpec, wanted: Slice, fidelity: str) -> list[int]:
        """The numbers of the forms that serve a reader of `wanted`, the codec fastest to read first."""
        return self._forms.serving(spec, wanted, fidelity)

    def pieces(self, key: bytes, spec: ModelSpec, fidelity: str) -> list[tuple[int, Form]]:
        """Every slice of a block at hand that may serve the reader: (slot, form)."""
        with self.lock:
            found = [(slot, self.form(slot)) for slot in self.same_key(key)]
        return [(slot, form) for slot, form in found if form.serves(spec, fidelity)]

    def equals(self, name: str) -> bool:
        """Whether an object that decodes to what a raw object's name stands for is here, alone or in a larger
        slice: under whatever exact codec, or where the name has a lineage, one that decodes to that.
        """
        key, text = split_name(name)
        asked = Form.parse(text)
        with self.lock:
            self.expire()
            forms = [self.form(slot) for slot in self.same_key(key)]
        return any(
            (form.variant, form.decoded) == (asked.variant, asked.lineage)
            and contains(form.slice, asked.slice)
            for form in forms
            if form.codec in CODECS
        )

    def live(self, slot: int) -> bool:
        """Whether a slot still holds a record that lookups may see."""
        with self.lock:
            try:
                self.index.record(slot)
            except IndexError:
                return False
            return slot not in self._doomed

    def same_key(self, key: bytes) -> list[int]:
        """The slots of all objects of a key that lookups may see."""
        with self.lock:
            return [slot for slot in self.index.same_key(key) if slot not in self._doomed]

    def holds(self, key: bytes) -> bool:
        """Whether any object of this key is here."""
        with self.lock:
            self.expire()
            return any(slot not in self._doomed for slot in self.index.same_key(key))

    def children(self, parent: bytes, limit: int) -> list[int]:
        """Slots of blocks that continue the block `parent`, at most `limit`."""
        with self.lock:
            self.expire()
            return [slot for slot in self.index.children(parent, limit) if slot not in self._doomed]

    def form(self, slot: int) -> Form:
        with self.lock:
            return self._forms[self.index.record(slot).form]

    def space(self, slot: int) -> bytes:
        """The space of the object in a slot; 32 zeros where its header has not been read."""
        with self.lock:
            return self.spaces[self.index.record(slot).space]

    def object_name(self, slot: int) -> str:
        with self.lock:
            record = self.index.record(slot)
            return f"{record.key.hex()}.{self._forms[record.form].text}"

    def find(self, name: str) -> int | None:
        """The slot of the object called `name`, None if it is not here."""
        slot = self._find(name)
        return None if slot is None or slot in self._doomed else slot

    def leaving(self, name: str) -> bool:
        """Whether the object called `name` was removed but is still leased."""
        return self._find(name) in self._doomed

    # leases and uses

    def acquire(self, slot: int, key: bytes) -> bool:
        """Lease a slot if it still holds an object of `key` that lookups may see."""
        with self.lock:
            if not self.live(slot) or self.index.record(slot).key != key:
                return False
            self.hold(slot)
            return True

    def hold(self, slot: int) -> None:
        """One more lease on a slot that the caller has leased already, in sight or not."""
        with self.lock:
            self.index.acquire([slot])

    def release(self, slots: Iterable[int]) -> None:
        with self.freed:
            for slot in slots:
                self.index.release([slot])
                if slot in self._doomed and self.index.record(slot).refs == 0:
                    self._doomed.discard(slot)
                    if slot in self._forgotten:
                        self._forgotten.discard(slot)
                        self.take_out(slot)
                    else:
                        self.delete(slot)
            self.freed.notify_all()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use of every object of these keys, in chain order."""
        with self.lock:
            self.index.touch([slot for key in keys for slot in self.index.same_key(key)])
        if self.touched is not None:
            self.touched(keys)

    # coming and going

    def insert(self, header: BlockHeader, name: str, size: int, ttl: float | None = None) -> int:
        """Record an object that the store now holds; to be kept `ttl` seconds at the most, if given."""
        with self.lock:
            number = self.spaces.number(header)
            slot = self._insert(name, number, header.parent, size, 0.0, self.ttl(number))
            if ttl is not None:
                self.ages.shorten(slot, ttl)
            follows = header.first == 0 or self.index.same_key(header.parent)
        if not follows:
            self.gaps.suspect(header.parent)
        return slot

    def adopt(self, found: StoredObject, age: float) -> int:
        """Record an object of `age` seconds that a scan found, its header still unread. Raises ValueError for
        a name that is no block's.
        """
        with self.lock:
            return self._insert(found.name, 0, UNKNOWN, found.size, age, self.ttl(0))

    def note(self, name: str, parent: bytes, size: int, age: float = 0.0) -> None:
        """Record an object that a shared tier's server has told of. Raises ValueError for a name that is no
        block's.
        """
        with self.lock:
            slot = self.find(name)
            if slot is not None:
                if self.index.record(slot).size == size:
                    return
                self.forget(slot)
            if self.leaving(name):
                return
            while self.index.count >= KNOWN and (least := self.index.victim()) is not None:
                self.take_out(least)
            self._insert(name, 0, parent, size, age, None)

    def forget(self, slot: int) -> None:
        """Take an object out of the index alone: its server keeps it no more, or keeps it for others."""
        with self.lock:
            if slot in self._doomed:
                return
            if self.index.record(slot).refs:
                self._doomed.add(slot)
                self._forgotten.add(slot)
            else:
                self.take_out(slot)

    def learn(self, name: str, header: BlockHeader) -> None:
        """Fill in what an adopted object's header says."""
        with self.lock:
            slot = self.find(name)
            if slot is None or self.index.record(slot).space:
                return
            number = self.spaces.number(header)
            self.index.set_parent(slot, header.parent)
            self.index.set_space(slot, number)
            self.spaces.entered(number, slot)
            if self.shared is None:
                self.ages.bound(slot, self.ttl(number))
        if header.first:
            self.gaps.suspect(header.parent)

    def remove(self, slot: int) -> int:
        """Take an object away; its bytes. Out of sight at once, its room is free when its last lease ends.

        Of a shared tier it is gone at once, or 0 is returned; one that is only read is left as it is.
        """
        with self.lock:
            if slot in self._doomed:
                return 0
            record = self.index.record(slot)
            if self.shared is not None:
                name = self.object_name(slot)
                self.forget(slot)
                return record.size if self.shared.writable and any(self.delete_many([name])) else 0
            self.room.unpin(slot)
            if record.refs:
                self._doomed.add(slot)
            else:
                self.delete(slot)
            return record.size

    def delete_many(self, names: Sequence[str]) -> list[bool]:
        """Delete objects from the store, in few round trips where it can; whether each was there. A failure
        is counted, and reads as not.
        """
        try:
            if self._deletes_many is not None:
                return self._deletes_many.delete_many(names)
            return [self.store.delete(name) for name in names]
        except Exception as error:
            self._ledger.failure(f"an object could not be deleted from {self.name}", error)
            return [False] * len(names)

    def unknown(self) -> list[str]:
        """The names of objects of which the space is not known, for their headers have not been read."""
        with self.lock:
            slots = self.index.slots(space=0).tolist()
            return [self.object_name(slot) for slot in slots if slot not in self._doomed]

    def slots(self, space: bytes | None = None) -> list[int]:
        """The slots of all objects at hand, or of those of one space."""
        with self.lock:
            self.expire()
            number = None if space is None else self.spaces.known(space)
            if space is not None and number is None:
                return []
            return [slot for slot in self.index.slots(space=number).tolist() if slot not in self._doomed]

    def names(self) -> Iterator[str]:
        """The names of all objects at hand, at this moment."""
        with self.lock:
            found = [self.object_name(slot) for slot in self.slots()]
        yield from found

    def ttl(self, space: int) -> float | None:
        """How long objects of a space are kept, by its number; None without a bound."""
        return self.rules.ttl(self.spaces.tenant(space)) if self.rules.ttls else None

    @property
    def up(self) -> bool:
        """Whether it makes sense to ask the store anything."""
        return self.shared is None or self.shared.health().state != "down"

    @property
    def used(self) -> int:
        """Bytes taken: objects, and room held for objects on their way."""
        return self.index.bytes + self.room.reserved

    def stats(self) -> TierStats:
        with self.lock:
            self.expire()
            return TierStats(
                kind=self.kind,
                objects=self.index.count - len(self._doomed),
                bytes=self.index.bytes,
                capacity=self.capacity,
                leased=self.index.leased,
                pinned=self.index.pinned,
                codec=self.codec.name,
                health=None if self.shared is None else self.shared.health(),
                pinned_bytes=self.room.pinned_bytes,
                tenants={tenant: (objects, size) for tenant, objects, size in self.spaces.shares()},
            )

    # inside, with the lock held

    def _find(self, name: str) -> int | None:
        key, form = split_name(name)
        with self.lock:
            number = self._forms.known(form)
            return None if number is None else self.index.find(key, number)

    def expire(self) -> None:
        if not self.ages.is_due():
            return
        for slot in self.ages.due():
            size = self.remove(slot)
            if size:
                self._ledger.count("expired_objects")
                self._ledger.count("expired_bytes", size)

    def _insert(self, name: str, space: int, parent: bytes, size: int, age: float, ttl: float | None) -> int:
        key, text = split_name(name)
        slot = self.index.insert(key, self._forms.number(text), space, parent, size)
        self.ages.begin(slot, age, ttl)
        self.spaces.entered(space, slot)
        self.gaps.came(key)
        return slot

    def take_out(self, slot: int) -> None:
        record = self.index.record(slot)
        self.room.unpin(slot)
        self.ages.end(slot)
        self.index.remove(slot)
        self.spaces.left(record.space)
        self.gaps.suspect(record.key)

    def delete(self, slot: int) -> None:
        name = self.object_name(slot)
        self.take_out(slot)
        self.freed.notify_all()
        self.delete_many([name])


__all__ = ["NONE", "UNKNOWN", "Slots", "Tier"]
