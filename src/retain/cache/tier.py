"""A tier: a store, the index of what it holds, its capacity, and the eviction that keeps it within.

Records are found by key and form (variant, slice, codec); leases and pins keep them from being evicted. A
record that is removed while leased stays out of sight until its last lease ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retain._native import Index
from retain.codecs import CODECS, Codec
from retain.header import BlockHeader, form_of, split_name
from retain.model import ModelSpec, Slice
from retain.stores.base import Shared, Store, StoredObject

from .ledger import Ledger
from .results import Removed, TierStats

NONE = 0xFFFFFFFF
UNKNOWN = b"\0" * 32
"""The parent and space of a record whose header has not been read yet."""

KNOWN = 1 << 20
"""How many objects of a shared tier are remembered: about 150 MB. Those used longest ago are forgotten."""

Slots = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Form:
    """What an object's name says behind its key."""

    text: str
    variant: bytes
    slice: Slice
    codec: str
    lineage: bytes | None

    @classmethod
    def parse(cls, text: str) -> Form:
        parts = text.split(".")
        return cls(
            text,
            bytes.fromhex(parts[0]),
            Slice.parse(parts[1]),
            parts[2],
            bytes.fromhex(parts[3]) if len(parts) == 4 else None,
        )

    def serves(self, spec: ModelSpec, fidelity: str) -> bool:
        """Whether numbers of this form may be given to a reader that accepts `fidelity` at the lowest."""
        codec = CODECS.get(self.codec)
        if codec is None or self.variant != spec.variant[:16]:
            return False
        return fidelity != "exact" or not (codec.lossy or self.lineage is not None)


class Tier:
    """One tier. Safe from several threads; `lock` guards what must happen together.

    `name` is the tier's kind, made unique among the tiers of a cache by its position.
    """

    def __init__(
        self, name: str, store: Store, capacity: int, codec: Codec, policy: str, ledger: Ledger
    ) -> None:
        self.name = name
        self.kind = store.kind
        self.store = store
        self.shared = store if isinstance(store, Shared) else None
        self.capacity = capacity
        self.codec = codec
        self.index = Index(policy)
        self.lock = threading.RLock()
        self._ledger = ledger
        self._forms: list[Form] = []
        self._form_ids: dict[str, int] = {}
        self._spaces: list[bytes] = [UNKNOWN]
        self._space_ids: dict[bytes, int] = {UNKNOWN: 0}
        self._accepted: dict[tuple[bytes, Slice, str], tuple[int, list[int]]] = {}
        self._doomed: set[int] = set()
        self._forgotten: set[int] = set()
        self._reserved = 0
        self.room = threading.Condition(self.lock)

    # finding

    def match(self, keys: Sequence[bytes], spec: ModelSpec, wanted: Slice, fidelity: str) -> Slots:
        """The slot of an object that alone serves each key, NONE where there is none."""
        with self.lock:
            forms = self.forms(spec, wanted, fidelity)
            if not forms or not keys:
                return np.full(len(keys), NONE, np.uint32)
            slots = self.index.lookup(b"".join(keys), forms)
            if self._doomed:
                slots[np.isin(slots, np.fromiter(self._doomed, np.uint32))] = NONE
            return slots

    def forms(self, spec: ModelSpec, wanted: Slice, fidelity: str) -> list[int]:
        """The ids of the forms that serve a reader of `wanted`, the codec fastest to read first."""
        question = (spec.variant, wanted, fidelity)
        known, found = self._accepted.get(question, (0, []))
        if known != len(self._forms):
            found = [
                number
                for number, form in enumerate(self._forms)
                if form.serves(spec, fidelity) and contains(form.slice, wanted)
            ]
            found.sort(key=lambda number: self._forms[number].codec != "raw")
            self._accepted[question] = (len(self._forms), found)
        return found

    def pieces(self, key: bytes, spec: ModelSpec, fidelity: str) -> list[tuple[int, Form]]:
        """Every slice of a block at hand that may serve the reader: (slot, form)."""
        with self.lock:
            slots = [slot for slot in self.index.same_key(key) if slot not in self._doomed]
            found = [(slot, self._forms[self.index.record(slot).form]) for slot in slots]
        return [(slot, form) for slot, form in found if form.serves(spec, fidelity)]

    def equals(self, name: str) -> bool:
        """Whether the very block of a raw object's name is here, under whatever exact codec."""
        key, text = split_name(name)
        asked = Form.parse(text)
        with self.lock:
            slots = [slot for slot in self.index.same_key(key) if slot not in self._doomed]
            forms = [self._forms[self.index.record(slot).form] for slot in slots]
        return any(
            (form.variant, form.slice, form.lineage) == (asked.variant, asked.slice, asked.lineage)
            and not CODECS[form.codec].lossy
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

    def holds(self, key: bytes) -> bool:
        """Whether any object of this key is here."""
        with self.lock:
            return any(slot not in self._doomed for slot in self.index.same_key(key))

    def children(self, parent: bytes, limit: int) -> list[int]:
        """Slots of blocks that continue the block `parent`, at most `limit`."""
        with self.lock:
            return [slot for slot in self.index.children(parent, limit) if slot not in self._doomed]

    def form(self, slot: int) -> Form:
        with self.lock:
            return self._forms[self.index.record(slot).form]

    def object_name(self, slot: int) -> str:
        with self.lock:
            record = self.index.record(slot)
            return f"{record.key.hex()}.{self._forms[record.form].text}"

    def find(self, name: str) -> int | None:
        """The slot of the object called `name`, None if it is not here."""
        key, form = split_name(name)
        with self.lock:
            number = self._form_ids.get(form)
            slot = None if number is None else self.index.find(key, number)
            return None if slot is None or slot in self._doomed else slot

    def leaving(self, name: str) -> bool:
        """Whether the object called `name` was removed but is still leased."""
        key, form = split_name(name)
        with self.lock:
            number = self._form_ids.get(form)
            return number is not None and self.index.find(key, number) in self._doomed

    # leases

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
        with self.room:
            for slot in slots:
                self.index.release([slot])
                if slot in self._doomed and self.index.record(slot).refs == 0:
                    self._doomed.discard(slot)
                    if slot in self._forgotten:
                        self._forgotten.discard(slot)
                        self.index.remove(slot)
                    else:
                        self._delete(slot)
            self.room.notify_all()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of every object of these keys, in chain order."""
        with self.lock:
            self.index.touch([slot for key in keys for slot in self.index.same_key(key)])

    # coming and going

    def make_room(self, size: int) -> bool:
        """Evict until `size` more bytes fit, and hold them; False (holding nothing) where that cannot be."""
        with self.room:
            while self.used + size > self.capacity:
                if not self.evict_one():
                    return False
            self._reserved += size
            return True

    def release_room(self, size: int) -> None:
        """Give back bytes held by `make_room`."""
        with self.room:
            self._reserved -= size
            self.room.notify_all()

    def evict_one(self) -> bool:
        """Remove the least valuable object that nobody leases or pins; False where there is none."""
        with self.lock:
            slot = self.index.victim()
            if slot is None:
                return False
            size = self.index.record(slot).size
            if self.shared is not None:  # what its server keeps is its server's business
                self.index.remove(slot)
                return True
            self._delete(slot)
        self._ledger.count("evicted_objects")
        self._ledger.count("evicted_bytes", size)
        return True

    def insert(self, header: BlockHeader, name: str, size: int) -> int:
        """Record an object that the store now holds."""
        return self._insert(name, header.space, header.parent, size)

    def adopt(self, found: StoredObject) -> int:
        """Record an object that a scan found, its header still unread. Raises ValueError for a name that is
        no block's.
        """
        return self._insert(found.name, UNKNOWN, UNKNOWN, found.size)

    def note(self, name: str, parent: bytes, size: int) -> None:
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
            while self.index.count >= KNOWN and self.evict_one():
                pass
            self._insert(name, UNKNOWN, parent, size)

    def forget(self, slot: int) -> None:
        """Take an object out of the index alone: its server keeps it no more, or keeps it for others."""
        with self.lock:
            if slot in self._doomed:
                return
            if self.index.record(slot).refs:
                self._doomed.add(slot)
                self._forgotten.add(slot)
            else:
                self.index.remove(slot)

    def learn(self, name: str, header: BlockHeader) -> None:
        """Fill in what an adopted object's header says."""
        with self.lock:
            slot = self.find(name)
            if slot is None:
                return
            record = self.index.record(slot)
            if record.space == 0:
                self.index.set_parent(slot, header.parent)
                self.index.set_space(slot, self._space_id(header.space))

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
                return record.size if self.shared.writable and self._delete_object(name) else 0
            if record.refs:
                self._doomed.add(slot)
            else:
                self._delete(slot)
            return record.size

    def clear(self, space: bytes | None) -> Removed:
        """Remove every object, or those of one space."""
        with self.lock:
            if space is None:
                slots = self.index.slots()
            else:
                number = self._space_ids.get(space)
                slots = np.empty(0, np.uint32) if number is None else self.index.slots(space=number)
            removed = Removed()
            for slot in slots.tolist():
                if slot not in self._doomed:
                    self.index.unpin(slot)
                    size = self.remove(slot)
                    removed += Removed(1 if size else 0, size)
            return removed

    def unknown(self) -> list[str]:
        """The names of objects of which the space is not known, for their headers have not been read."""
        with self.lock:
            slots = self.index.slots(space=0).tolist()
            return [self.object_name(slot) for slot in slots if slot not in self._doomed]

    def names(self) -> Iterator[str]:
        """The names of all objects at hand, at this moment."""
        with self.lock:
            slots = [slot for slot in self.index.slots().tolist() if slot not in self._doomed]
            found = [self.object_name(slot) for slot in slots]
        yield from found

    @property
    def up(self) -> bool:
        """Whether it makes sense to ask the store anything."""
        return self.shared is None or self.shared.health().state != "down"

    @property
    def used(self) -> int:
        """Bytes taken: objects, and room held for objects on their way."""
        return self.index.bytes + self._reserved

    def stats(self) -> TierStats:
        with self.lock:
            return TierStats(
                kind=self.kind,
                objects=self.index.count - len(self._doomed),
                bytes=self.index.bytes,
                capacity=self.capacity,
                leased=self.index.leased,
                pinned=self.index.pinned,
                codec=self.codec.name,
                health=None if self.shared is None else self.shared.health(),
            )

    def space_bytes(self, space: bytes) -> Removed:
        """How many objects and bytes a space has here."""
        with self.lock:
            number = self._space_ids.get(space)
            return Removed() if number is None else Removed(*self.index.space_bytes(number))

    def _insert(self, name: str, space: bytes, parent: bytes, size: int) -> int:
        key, text = split_name(name)
        with self.lock:
            number = self._form_ids.get(text)
            if number is None:
                number = len(self._forms)
                self._forms.append(Form.parse(text))
                self._form_ids[text] = number
            return self.index.insert(key, number, self._space_id(space), parent, size)

    def _space_id(self, space: bytes) -> int:
        number = self._space_ids.get(space)
        if number is None:
            number = len(self._spaces)
            self._spaces.append(space)
            self._space_ids[space] = number
        return number

    def _delete(self, slot: int) -> None:
        name = self.object_name(slot)
        self.index.remove(slot)
        self.room.notify_all()
        self._delete_object(name)

    def _delete_object(self, name: str) -> bool:
        try:
            return self.store.delete(name)
        except Exception as error:
            self._ledger.failure(f"an object could not be deleted from {self.name}", error)
            return False


def contains(held: Slice, wanted: Slice) -> bool:
    """Whether one slice lies wholly in another."""
    return (
        held.layer_start <= wanted.layer_start
        and held.layer_stop >= wanted.layer_stop
        and held.head_start * wanted.head_parts <= wanted.head_start * held.head_parts
        and held.head_stop * wanted.head_parts >= wanted.head_stop * held.head_parts
    )


def together(held: Sequence[Slice], wanted: Slice) -> bool:
    """Whether slices, taken together, cover another."""
    parts = int(np.lcm.reduce([each.head_parts for each in [*held, wanted]]))
    grid = np.zeros((wanted.layer_stop, parts), bool)
    for each in held:
        scale = parts // each.head_parts
        grid[each.layer_start : each.layer_stop, each.head_start * scale : each.head_stop * scale] = True
    scale = parts // wanted.head_parts
    share = slice(wanted.head_start * scale, wanted.head_stop * scale)
    return bool(grid[wanted.layer_start : wanted.layer_stop, share].all())


__all__ = ["NONE", "UNKNOWN", "Form", "Slots", "Tier", "contains", "form_of", "together"]
