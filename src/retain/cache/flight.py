"""Single flight: many requests for the same missing prefix cause one prefill."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class Flight:
    """One caller's part in a computation that others may be waiting for.

    The leader computes and stores, then leaves the `with` block; followers have already waited when they get
    theirs.
    """

    def __init__(self, board: Flights, key: bytes, leader: bool, landed: bool) -> None:
        self._board = board
        self._key = key
        self.leader = leader
        self.landed = landed
        """Whether the leader finished before this follower's timeout."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.land()

    def land(self) -> None:
        """The leader is done, well or not: followers go on. Idempotent."""
        if self.leader:
            self._board.land(self._key, self)


class Flights:
    """Who computes what at the moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[bytes, tuple[Flight, threading.Event]] = {}

    def join(self, key: bytes, timeout: float) -> Flight:
        """Lead the flight of `key` if nobody does, else wait for its leader, at most `timeout` seconds."""
        with self._lock:
            flying = self._flying.get(key)
            if flying is None:
                flight = Flight(self, key, leader=True, landed=False)
                self._flying[key] = (flight, threading.Event())
                return flight
        landed = flying[1].wait(timeout)
        return Flight(self, key, leader=False, landed=landed)

    def land(self, key: bytes, flight: Flight) -> None:
        with self._lock:
            flying = self._flying.get(key)
            if flying is None or flying[0] is not flight:
                return
            del self._flying[key]
        flying[1].set()
