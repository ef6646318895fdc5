"""Control: what removes kept blocks or keeps them from being evicted, with true counts of what was done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from retain.errors import InvalidObject, StoreError
from retain.header import BlockHeader

from .adopt import Adopter, read_head
from .ledger import Ledger
from .results import Tally, tally_of
from .select import Prefix, Selection, chosen_slots, matcher
from .tier import Tier

STEP = 256
"""Objects of this host's own tiers that are dealt with before others get their turn."""

BATCH = 1000
"""Objects that a server is asked to delete in one go: as many as S3 takes."""

Cancel = Callable[[Sequence[Tier], Callable[[BlockHeader], bool]], None]


class Control:
    """Carries selections out. `cancel(tiers, which)` calls off what is on its way to these tiers where
    `which(header)` is true.
    """

    def __init__(self, tiers: Sequence[Tier], adopter: Adopter, ledger: Ledger, cancel: Cancel) -> None:
        self._tiers = tuple(tiers)
        self._adopter = adopter
        self._ledger = ledger
        self._cancel = cancel

    def remove(self, which: Selection) -> Tally:
        """Remove what is selected from every tier: nothing of it hits afterwards, and writes that were on
        their way are called off. What cannot be reached is said. Raises ValueError for a tier that is not
        there.
        """
        chosen = self._chosen(which)
        missed = [text for tier in chosen for text in self._look(tier, which)]
        keys = self._keys(which)
        self._call_off(chosen, which, keys)
        found: set[bytes] = set()
        counts: dict[str, tuple[int, int]] = {}
        for tier in chosen:
            rows = self._removed_of(tier, which, keys)
            done = [(key, size) for key, size in rows if size]
            found.update(key for key, _ in done)
            counts[tier.name] = (len(done), sum(size for _, size in done))
            if len(done) < len(rows) and (tier.shared is None or tier.shared.writable):
                left = len(rows) - len(done)
                missed.append(f"{tier.name}: {left} objects were gone already, or could not be deleted")
        tally = tally_of(found, counts, missed)
        self._ledger.count("dropped_objects", tally.objects)
        self._ledger.count("dropped_bytes", tally.bytes)
        return tally

    def pin(self, which: Selection, pinned: bool) -> Tally:
        """Keep what is selected from being evicted, or no longer; counts what is pinned, or was. Pins end
        with the process that keeps the cache.
        """
        missed: list[str] = []
        found: set[bytes] = set()
        counts: dict[str, tuple[int, int]] = {}
        keys = self._keys(which)
        for tier in self._chosen(which):
            if tier.shared is not None and not tier.bounded:
                missed.append(f"{tier.name}: its server decides what it evicts")
                continue
            self._adopter.wait(tier)
            change = tier.room.pin if pinned else tier.room.unpin
            objects = size = refused = 0
            for slots in self._steps(tier, which, keys):
                for slot in slots:
                    record = tier.index.record(slot)
                    if change(slot):
                        objects, size = objects + 1, size + record.size
                        found.add(record.key)
                    else:
                        refused += pinned
            counts[tier.name] = (objects, size)
            if refused:
                missed.append(
                    f"{tier.name}: {refused} objects are not pinned: pins have taken all their room"
                )
        return tally_of(found, counts, missed)

    def _chosen(self, which: Selection) -> list[Tier]:
        chosen = [tier for tier in self._tiers if which.tier in (None, tier.kind, tier.name)]
        if not chosen:
            names = ", ".join(tier.name for tier in self._tiers)
            raise ValueError(f"this cache has no tier {which.tier!r}; it has {names}")
        return chosen

    def _look(self, tier: Tier, which: Selection) -> Iterator[str]:
        """See to it that a tier's index knows all that is selected; what stands in the way."""
        if tier.shared is None:
            self._adopter.wait(tier)
        elif not tier.shared.writable:
            yield f"{tier.name}: it is only read here, and what lies there stays"
        else:
            keys = None if which.keys is None else frozenset(which.keys)
            trouble = self._adopter.discover(tier, keys, headers=which.by_header)
            if trouble is not None:
                yield f"{tier.name}: only what is known here was looked at, for {trouble}"

    def _call_off(self, chosen: Sequence[Tier], which: Selection, keys: frozenset[bytes] | None) -> None:
        if which.everything:
            self._cancel(chosen, lambda header: True)
            return
        memory = self._tiers[0]
        # By key and variant: slices on their way to be joined are as good as the block that they make.
        blocks = {
            (memory.index.record(slot).key, memory.form(slot).variant)
            for slots in self._steps(memory, which, keys)
            for slot in slots
        }
        self._cancel(chosen, lambda header: (header.key, header.variant[:16]) in blocks)

    def _removed_of(
        self, tier: Tier, which: Selection, keys: frozenset[bytes] | None
    ) -> list[tuple[bytes, int]]:
        """Remove from one tier: each object's key, and its bytes, 0 for one that was not removed."""
        rows: list[tuple[bytes, int]] = []
        names: list[str] = []
        for slots in self._steps(tier, which, keys):
            for slot in slots:
                record = tier.index.record(slot)
                if tier.shared is None:
                    rows.append((record.key, tier.remove(slot)))
                else:
                    rows.append((record.key, record.size))
                    names.append(tier.object_name(slot))
                    tier.forget(slot)
        if tier.shared is None:
            return rows
        if not tier.shared.writable:
            return [(key, 0) for key, _ in rows]
        gone = [
            each for at in range(0, len(names), BATCH) for each in tier.delete_many(names[at : at + BATCH])
        ]
        return [(key, size if there else 0) for (key, size), there in zip(rows, gone, strict=True)]

    def _steps(self, tier: Tier, which: Selection, keys: frozenset[bytes] | None) -> Iterator[list[int]]:
        """What is selected in a tier, some slots at a time, with the tier's lock held meanwhile."""
        slots = chosen_slots(tier, which, keys)
        matches = matcher(tier, which, tier.tenants)
        for at in range(0, len(slots), STEP):
            with tier.lock:
                yield [slot for slot in slots[at : at + STEP] if tier.live(slot) and matches(slot)]

    def _keys(self, which: Selection) -> frozenset[bytes] | None:
        """The keys that a selection comes down to; None where it is not about keys."""
        keys = None if which.keys is None else frozenset(which.keys)
        if which.prefix is None:
            return keys
        found = self._prefix_keys(which.prefix)
        return found if keys is None else keys & found

    def _prefix_keys(self, prefix: Prefix) -> frozenset[bytes]:
        found = set(prefix.keys)
        queue = deque(self._continuing(prefix))
        while queue:
            key = queue.popleft()
            if key in found:
                continue
            found.add(key)
            if prefix.beyond:
                for tier in self._tiers:
                    queue.extend(_keys_of(tier, tier.children(key, 1 << 30)))
        return frozenset(found)

    def _continuing(self, prefix: Prefix) -> Iterator[bytes]:
        """The keys of kept blocks behind a prefix's full ones that belong to it."""
        for tier in self._tiers:
            for slot in tier.children(prefix.last, 1 << 30):
                with suppress(IndexError, InvalidObject, StoreError):
                    key = tier.index.record(slot).key
                    frame, tokens = read_head(tier, tier.object_name(slot))
                    if frame is not None and tokens is not None and prefix.takes(tokens):
                        yield key


def _keys_of(tier: Tier, slots: Sequence[int]) -> Iterator[bytes]:
    with tier.lock:
        keys = [tier.index.record(slot).key for slot in slots if tier.live(slot)]
    yield from keys
