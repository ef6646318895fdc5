"""Ages: since when a tier holds each object, and which have been there for longer than they may."""

from __future__ import annotations

import heapq
import math
import time
from array import array

_NEVER = math.inf


class Ages:
    """By slot. Ages count by the clock that never jumps. Not safe from several threads: the tier's lock
    guards it.

    A slot costs 8 bytes; one that may be kept for a bounded time only, about 200 more.
    """

    def __init__(self) -> None:
        self._since = array("d")
        self._deadlines: dict[int, float] = {}
        self._queue: list[tuple[float, int]] = []
        self.next_due = _NEVER
        """When the next object has to go, by time.monotonic; infinite where none has to."""

    def begin(self, slot: int, age: float, ttl: float | None) -> None:
        """An object of `age` seconds enters a slot, to be kept until it is `ttl` seconds old."""
        since = time.monotonic() - max(0.0, age)
        if slot >= len(self._since):
            self._since.extend([0.0] * (slot + 1 - len(self._since)))
        self._since[slot] = since
        self.bound(slot, ttl)

    def bound(self, slot: int, ttl: float | None) -> None:
        """Keep the object in a slot until it is `ttl` seconds old, or for ever."""
        if ttl is None:
            self._deadlines.pop(slot, None)
            return
        deadline = self._since[slot] + ttl
        self._deadlines[slot] = deadline
        heapq.heappush(self._queue, (deadline, slot))
        self.next_due = self._queue[0][0]

    def shorten(self, slot: int, ttl: float) -> None:
        """Keep the object in a slot for `ttl` seconds from now at the most."""
        self.bound(slot, min(self._deadlines.get(slot, math.inf), time.monotonic() + ttl) - self._since[slot])

    def end(self, slot: int) -> None:
        """The object has left its slot."""
        self._deadlines.pop(slot, None)

    def age(self, slot: int) -> float:
        """How many seconds the object in a slot has been kept, here or by earlier runs."""
        return time.monotonic() - self._since[slot]

    def left(self, slot: int) -> float | None:
        """For how many seconds more the object in a slot may be kept, None for one without a bound."""
        deadline = self._deadlines.get(slot)
        return None if deadline is None else deadline - time.monotonic()

    def is_due(self) -> bool:
        """Whether any object's time may be over."""
        return self.next_due is not _NEVER and self.next_due <= time.monotonic()

    def due(self) -> list[int]:
        """The slots whose time is over, each told once."""
        now = time.monotonic()
        found = []
        while self._queue and self._queue[0][0] <= now:
            deadline, slot = heapq.heappop(self._queue)
            if self._deadlines.get(slot) == deadline:
                del self._deadlines[slot]
                found.append(slot)
        self.next_due = self._queue[0][0] if self._queue else _NEVER
        return found
