"""Turns: requests for one model, first come first served."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_POLL_SECONDS = 0.05


class Turns:
    """One runs, the others wait in the order they came. A turn may be given back by another thread than took
    it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._running = False

    @property
    def depth(self) -> int:
        """Requests that run or wait."""
        return len(self._waiting) + self._running

    def take(self, cancelled: Callable[[], bool]) -> bool:
        """Wait for the turn; False when `cancelled` says so before it comes."""
        turn = threading.Event()
        with self._lock:
            if not self._running:
                self._running = True
                return True
            self._waiting.append(turn)
        while not turn.wait(_POLL_SECONDS):
            if not cancelled():
                continue
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    return False
            self.give()  # it came in the same moment
            return False
        return True

    def take_if_idle(self) -> bool:
        """Take the turn only if nobody runs or waits."""
        with self._lock:
            if self._running:
                return False
            self._running = True
            return True

    def give(self) -> None:
        """End the turn; the next in the line has it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._running = False


_TURNS: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
_TURNS_LOCK = threading.Lock()


def turns_of(model: Any) -> Turns:
    """The line in front of a model, one for all engines that share it."""
    with _TURNS_LOCK:
        return _TURNS.setdefault(model, Turns())
