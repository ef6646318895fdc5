"""Single flight: many requests for the same missing prefix cause one prefill."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Flight:
    """One caller's part in a computation that others may be waiting for.

    The leader computes and stores, then leaves the `with` block; followers have already waited when they get
    theirs.
    """

    def __init__(self, *, leader: bool, landed: bool, land: Callable[[], None] = lambda: None) -> None:
        self.leader = leader
        self.landed = landed
        """Whether the leader finished before this follower's timeout."""
        self._land: Callable[[], None] | None = land

    def land(self) -> None:
        """The leader is done, well or not: followers go on. Idempotent."""
        land, self._land = self._land, None
        if land is not None:
            land()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.land()


class Flights:
    """Who computes what at the moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[bytes, threading.Event] = {}

    def join(self, key: bytes, timeout: float) -> Flight:
        """Lead the flight of `key` if nobody does, else wait for its leader, at most `timeout` seconds."""
        with self._lock:
            flying = self._flying.get(key)
            if flying is None:
                own = threading.Event()
                self._flying[key] = own
                return Flight(leader=True, landed=False, land=lambda: self._land(key, own))
        return Flight(leader=False, landed=flying.wait(timeout))

    def _land(self, key: bytes, flying: threading.Event) -> None:
        with self._lock:
            if self._flying.get(key) is flying:
                del self._flying[key]
        flying.set()
