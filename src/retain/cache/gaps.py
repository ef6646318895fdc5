"""Gaps: blocks that no tier holds any more though others continue them. What lies behind a gap cannot be
reached by any prompt until the gap is filled again: it is counted, and goes before anything else.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tier import Tier

MOST_WALKED = 1 << 16
"""Objects behind gaps that are looked at in one go; beyond them counts are too low."""

LOOK_AGAIN_SECONDS = 1.0


class Gaps:
    """The gaps of one cache. Safe from several threads.

    Tiers report keys that went, and parents of blocks that came; whether there is a gap is decided later, by
    a thread that holds no tier's lock, since it takes asking them all.
    """

    def __init__(self) -> None:
        self._tiers: tuple[Tier, ...] = ()
        self._suspects: deque[bytes] = deque(maxlen=MOST_WALKED)
        self._gaps: dict[bytes, None] = {}
        self._behind: dict[str, list[tuple[bytes, int, bytes]]] = {}
        self._lock = threading.Lock()
        self._walked = 0.0

    def watch(self, tiers: Sequence[Tier]) -> None:
        """These are the tiers of the cache."""
        self._tiers = tuple(tiers)

    def suspect(self, key: bytes) -> None:
        """A block may be missing that others continue."""
        self._suspects.append(key)

    def came(self, key: bytes) -> None:
        """A tier holds this block now."""
        if self._gaps:
            self._gaps.pop(key, None)

    def settle(self) -> None:
        """Decide about the suspects. Not to be called with a tier's lock held."""
        if not self._suspects and not self._gaps:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            for _ in range(len(self._suspects)):
                try:
                    key = self._suspects.popleft()
                except IndexError:
                    break
                if key not in self._gaps and self._is_gap(key):
                    self._gaps[key] = None
                    if any(tier.holds(key) for tier in self._tiers):  # it came meanwhile
                        self._gaps.pop(key, None)
                    else:
                        self._note_behind([key])
            now = time.monotonic()
            if self._gaps and now - self._walked > LOOK_AGAIN_SECONDS and not any(self._behind.values()):
                self._walked = now
                for key in [key for key in list(self._gaps) if not self._is_gap(key)]:
                    self._gaps.pop(key, None)
                self._note_behind(list(self._gaps))
        finally:
            self._lock.release()

    def victim(self, tier: Tier) -> int | None:
        """An object of a tier that cannot be reached and is not in use; the tier's lock is held."""
        behind = self._behind.get(tier.name)
        while behind:
            gap, slot, key = behind.pop()
            if gap not in self._gaps or not tier.live(slot):
                continue
            record = tier.index.record(slot)
            if record.key == key and not record.refs and not record.pinned:
                return slot
        return None

    def unreachable(self) -> dict[str, tuple[int, int]]:
        """How many objects and bytes of each of this host's own tiers cannot be reached."""
        self.settle()
        objects: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for _, tier, slot, key in self._walk([key for key in list(self._gaps) if self._is_gap(key)]):
            with tier.lock:
                if tier.live(slot) and tier.index.record(slot).key == key:
                    objects[tier.name] += 1
                    sizes[tier.name] += tier.index.record(slot).size
        return {name: (objects[name], sizes[name]) for name in objects}

    def _is_gap(self, key: bytes) -> bool:
        return not any(tier.holds(key) for tier in self._tiers) and any(
            tier.children(key, 1) for tier in self._tiers
        )

    def _note_behind(self, gaps: Sequence[bytes]) -> None:
        for gap, tier, slot, key in self._walk(gaps):
            self._behind.setdefault(tier.name, []).append((gap, slot, key))

    def _walk(self, gaps: Sequence[bytes]) -> Iterator[tuple[bytes, Tier, int, bytes]]:
        """What lies behind gaps in this host's own tiers, the deepest last: (gap, tier, slot, key)."""
        queue = deque((gap, gap) for gap in gaps)
        seen = set(gaps)
        while queue and len(seen) < MOST_WALKED:
            gap, parent = queue.popleft()
            for tier in self._tiers:
                with tier.lock:
                    slots = tier.children(parent, MOST_WALKED)
                    found = [(slot, tier.index.record(slot).key) for slot in slots]
                for slot, key in found:
                    if tier.shared is None:
                        yield gap, tier, slot, key
                    if key not in seen:
                        seen.add(key)
                        queue.append((gap, key))
