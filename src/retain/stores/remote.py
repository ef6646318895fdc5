"""What every remote store has: a circuit breaker, a bound on calls at a time, deadlines, and estimates of the
way to its server.

    unknown --a call or ping succeeds--> up --3 calls in a row fail--> down --a ping succeeds--> up

While a server is down, calls fail at once; a thread pings it, ever more rarely, and nobody waits for that.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from retain.errors import StoreFull, StoreUnavailable
from retain.stores.base import Health

log = logging.getLogger("retain.stores")

WAIT_SECONDS = 0.05
"""How long a call waits for an answer to begin, at the least: what a dead server may cost a request."""

DEADLINE_SECONDS = 30.0
"""How long one call may take in all."""

PATIENCE = 4.0
"""A server that is known to be slow is given this many times its latency for the first byte."""

FAILURES = 3
"""Calls that fail in a row until a server counts as down."""

CALLS = 16
"""Calls under way at a time; others wait for them."""

PING_SECONDS = 2.0
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 15.0
_SHARE = 0.2
_BULK = 256 << 10


class Call:
    """One call under way. The store says when the answer began, and how many bytes came or went."""

    def __init__(self, wait: float, until: float) -> None:
        self.wait = wait
        self.until = until
        self.started = time.monotonic()
        self.first_byte: float | None = None
        self.size = 0

    @property
    def answer_by(self) -> float:
        """When the first byte of the answer is due."""
        return min(self.until, self.started + self.wait)

    def begins(self) -> None:
        """The answer begins."""
        if self.first_byte is None:
            self.first_byte = time.monotonic()

    def moved(self, size: int) -> None:
        """So many bytes came after the first byte of the answer."""
        self.size += size


class Remote:
    """The state of one server. Safe from several threads.

    `ping(seconds)` makes contact within so many seconds and returns the seconds of one round trip; it raises
    StoreUnavailable or OSError. `what` names the server in errors.
    """

    def __init__(
        self,
        what: str,
        ping: Callable[[float], float],
        *,
        wait: float = WAIT_SECONDS,
        deadline: float = DEADLINE_SECONDS,
        calls: int = CALLS,
    ) -> None:
        self.what = what
        self._ping = ping
        self._wait = wait
        self._deadline = deadline
        self._slots = threading.BoundedSemaphore(calls)
        self._lock = threading.Lock()
        self._state = "unknown"
        self._reason = ""
        self._since = time.time()
        self._failed = 0
        self._latency: float | None = None
        self._bandwidth: float | None = None
        self._calls = 0
        self._stopped = threading.Event()
        self._watching = False

    def start(self) -> None:
        """Ping the server for the first time, in the background. For when the store is ready for that."""
        self._watch()

    @property
    def wait(self) -> float:
        """How long to wait for the first byte of an answer, in seconds."""
        return max(self._wait, PATIENCE * (self._latency or 0.0))

    @property
    def up(self) -> bool:
        """False while calls would fail at once."""
        return self._state != "down" and not self._stopped.is_set()

    def health(self) -> Health:
        with self._lock:
            return Health(self._state, self._reason, self._since, self._latency, self._bandwidth, self._calls)

    @contextmanager
    def call(self, *, patient: bool = False) -> Iterator[Call]:
        """A call to the server. Raises StoreUnavailable at once while it is down.

        `patient` calls, for which no request waits, have the whole deadline for the first byte. OSError and
        StoreUnavailable raised inside count against the server and come out as StoreUnavailable.
        """
        self.check_open()
        if not self.up:
            raise StoreUnavailable(f"{self.what} is down: {self._reason}")
        wait = self._deadline if patient else self.wait
        if not self._slots.acquire(timeout=wait):
            raise StoreUnavailable(f"{self.what} is busy with other calls of this process")
        call = Call(wait, time.monotonic() + self._deadline)
        with self._lock:
            self._calls += 1
        try:
            yield call
        except StoreFull:
            self._succeeded(call)
            raise
        except StoreUnavailable as error:
            self._fails(str(error))
            raise
        except (OSError, EOFError) as error:
            reason = f"{self.what}: {describe(error)}"
            self._fails(reason)
            raise StoreUnavailable(reason) from error
        else:
            self._succeeded(call)
        finally:
            with self._lock:
                self._calls -= 1
            self._slots.release()

    def check_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""
        if self._stopped.is_set():
            raise StoreUnavailable(f"the store {self.what} is closed")

    def close(self) -> None:
        """Ping no more. Idempotent."""
        self._stopped.set()

    def _succeeded(self, call: Call) -> None:
        ended = time.monotonic()
        with self._lock:
            self._failed = 0
            if call.first_byte is not None:
                self._latency = _blend(self._latency, call.first_byte - call.started)
                seconds = ended - call.first_byte
                if call.size >= _BULK and seconds > 0:
                    self._bandwidth = _blend(self._bandwidth, call.size / seconds)
            if self._state == "unknown":
                self._turn("up", "")

    def _fails(self, reason: str) -> None:
        with self._lock:
            self._failed += 1
            self._reason = reason
            if self._failed < FAILURES or self._state == "down":
                return
            self._turn("down", reason)
        log.warning("%s; not asked again until it answers a ping", reason)
        self._watch()

    def _turn(self, state: str, reason: str) -> None:
        self._state, self._reason, self._since = state, reason, time.time()
        self._failed = 0

    def _watch(self) -> None:
        with self._lock:
            if self._watching or self._stopped.is_set():
                return
            self._watching = True
        threading.Thread(target=self._ping_until_up, name="retain-ping", daemon=True).start()

    def _ping_until_up(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            if self._state == "down" and self._stopped.wait(pause * random.uniform(0.5, 1.0)):
                break
            try:
                latency = self._ping(max(PING_SECONDS, self._wait))
            except Exception as error:
                if self._stopped.is_set():
                    break
                reason = str(error) if isinstance(error, StoreUnavailable) else describe(error)
                if not reason.startswith(self.what):
                    reason = f"{self.what}: {reason}"
                with self._lock:
                    if self._state == "up":  # calls have found it so meanwhile
                        self._watching = False
                        return
                    news = self._state != "down"
                    if news:
                        self._turn("down", reason)
                    self._reason = reason
                if news:
                    log.warning("%s; not asked again until it answers a ping", reason)
                else:
                    pause = min(2 * pause, LONGEST_PAUSE)
                continue
            with self._lock:
                news = self._state == "down"
                self._latency = latency
                self._turn("up", "")
                self._watching = False
            if news:
                log.info("%s answers again", self.what)
            return
        with self._lock:
            self._watching = False


def describe(error: BaseException) -> str:
    """An error as a few words: its text, or its kind where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - _SHARE) * old + _SHARE * new
