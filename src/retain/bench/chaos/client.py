"""A client of the chaos bench: a process that stores and loads, checks every byte and times every wait.

It tells what it saw a few times a second, one JSON line in a file, so that it may be killed at any point.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from retain.bench.chaos.content import BLOCKS, SPEC, block, header_of, prompt, wrong
from retain.cache import Loaded, Query
from retain.daemon.client import RemoteCache
from retain.daemon.start import connect
from retain.errors import StoreUnavailable

T = TypeVar("T")

GO, REST, END = b"g", b"r", b"e"
"""What the first byte of the control file tells all clients."""

BEAT_SECONDS = 0.02
TELL_SECONDS = 0.1

LOAD_SECONDS = 3.0
"""The deadline that a client gives its loads."""

SLACK_SECONDS = 0.25
"""What a wait may take beyond its deadline, on top of how late this process itself was woken meanwhile."""

DEADLINES = {
    "lookup": 2.0,
    "load": LOAD_SECONDS + 2.0,
    "store": 4.0,
    "missing": 2.0,
    "flight": 2.5,
    "open": 40.0,
    "answer": 60.0,
}
"""How long each call may wait at the most, in seconds, as docs/chaos.md explains."""

_FLIGHT_SECONDS = 0.5


@dataclass
class Told:
    """What a client saw since it last told."""

    counts: dict[str, int] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    resting: bool = False


class Watch:
    """Times calls, and tells in the background. A wait that never ends is told as well."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._told = Told()
        self._now: tuple[str, float, float] | None = None
        self._hung = False
        self._overdue = 0.0
        self.resting = False
        threading.Thread(target=self._beat, name="chaos-watch", daemon=True).start()

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._told.counts[name] = self._told.counts.get(name, 0) + n

    def found_wrong(self, what: str) -> None:
        with self._lock:
            self._told.wrong.append(what)
        self.tell()

    def call(self, kind: str, work: Callable[[], T]) -> T | None:
        """Do `work`, timed; None where it raises, which is told."""
        self._hung, start = False, time.monotonic()
        self._now = (kind, start, self._overdue)
        try:
            return work()
        except Exception as error:
            with self._lock:
                self._told.raised.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            return None
        finally:
            self._ended(kind, time.monotonic() - start)

    def tell(self) -> None:
        with self._lock:
            told, self._told = self._told, Told()
            told.resting = self.resting
            os.write(self._file, json.dumps(vars(told)).encode() + b"\n")

    def _ended(self, kind: str, seconds: float) -> None:
        now, self._now = self._now, None
        if seconds > DEADLINES[kind] + SLACK_SECONDS and now is not None and not self._hung:
            time.sleep(3 * BEAT_SECONDS)  # for the other thread to notice how late it was woken itself
            self._judge(kind, seconds, self._overdue - now[2])
        with self._lock:
            self._told.waits[kind] = max(self._told.waits.get(kind, 0.0), seconds)

    def _judge(self, kind: str, seconds: float, overdue: float) -> None:
        if seconds > DEADLINES[kind] + SLACK_SECONDS + overdue:
            with self._lock:
                self._told.late.append(
                    f"{kind} took {seconds:.2f} s of {DEADLINES[kind]:.1f} s; {overdue:.2f} s of that this"
                    " process did not run"
                )

    def _beat(self) -> None:
        told = before = time.monotonic()
        while True:
            time.sleep(BEAT_SECONDS)
            now = time.monotonic()
            self._overdue += max(0.0, now - before - 1.5 * BEAT_SECONDS)
            before = now
            current = self._now
            if current is not None and not self._hung and now - current[1] > 2 * DEADLINES[current[0]] + 5:
                self._hung = True
                self._judge(current[0], now - current[1], self._overdue - current[2])
            if now - told >= TELL_SECONDS:
                told = now
                self.tell()


def run(given: dict[str, Any]) -> None:
    """Store and load until told to end. `given`: tiers, prompts, seed, report, control, and the pause between
    turns in seconds.
    """
    watch = Watch(given["report"])
    with open(given["control"], "rb") as file:
        control = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    cache = _open(watch, given["tiers"])
    work = _Work(cache, watch, random.Random(given["seed"]), given["prompts"])
    while (order := control[:1]) != END:
        watch.resting = order == REST
        if watch.resting:
            work.put_down()
            time.sleep(0.01)
            continue
        work.turn()
        time.sleep(given["pause"])
    work.put_down()
    cache.close()
    watch.tell()
    os._exit(0)


def _open(watch: Watch, tiers: list[str]) -> RemoteCache:
    """Where the daemon is being killed all the time, a client may not get in at once; that is told to its
    user, who tries again.
    """

    def attempt() -> RemoteCache | None:
        try:
            return connect(tiers, client="chaos")
        except StoreUnavailable:
            return None

    while (found := watch.call("open", attempt)) is None:
        watch.count("not_opened")
        time.sleep(0.05)
    return found


class _Work:
    def __init__(self, cache: RemoteCache, watch: Watch, dice: random.Random, prompts: int) -> None:
        self._cache = cache
        self._watch = watch
        self._dice = dice
        self._prompts = prompts
        self._kept: tuple[int, Loaded] | None = None

    def turn(self) -> None:
        number = int(self._prompts * self._dice.random() ** 2)  # some are asked for more often than others
        choice = self._dice.random()
        if choice < 0.85:
            self._read(number)
            self._store(number)
        elif choice < 0.9:
            self._fly(number)
        elif choice < 0.95:
            self._watch.call("missing", lambda: self._cache.missing(Query(prompt(number), SPEC)))
        else:  # an engine that gives up what it looked up, or reserved
            hit = self._watch.call("lookup", lambda: self._cache.lookup(Query(prompt(number), SPEC)))
            place = self._watch.call("store", lambda: self._cache.reserve(header_of(prompt(number), 0)))
            if hit is not None:
                hit.release()
            if place is not None:
                place.abandon()

    def put_down(self) -> None:
        """End the lease that is still held, after a last look at its bytes."""
        if self._kept is not None:
            self._check(*self._kept)
            self._kept[1].close()
            self._kept = None

    def _read(self, number: int) -> None:
        asked = prompt(number)
        hit = self._watch.call("lookup", lambda: self._cache.lookup(Query(asked, SPEC)))
        self._watch.count("lookups")
        if hit is None or not hit.tokens:
            return
        loaded = self._watch.call("load", lambda: self._cache.load(hit, timeout=LOAD_SECONDS))
        self._watch.count("hits")
        if loaded is None:
            return
        self._check(number, loaded)
        self._watch.count("blocks", len(loaded.blocks))
        for kind, tokens in loaded.tokens_by_tier.items():
            self._watch.count(f"tokens_{kind}", tokens)
        self.put_down()
        if self._dice.random() < 0.2:
            self._kept = number, loaded
        else:
            loaded.close()

    def _check(self, number: int, loaded: Loaded) -> None:
        found = wrong(prompt(number), loaded)
        if found is not None:
            self._watch.found_wrong(f"prompt {number}: {found}")

    def _store(self, number: int) -> None:
        asked = prompt(number)
        for index in range(BLOCKS):
            made = block(asked, index)
            result = self._watch.call("store", lambda made=made: self._cache.store(made))  # type: ignore[misc]
            if result is None:
                return
            self._watch.count(f"store_{result.reason.replace(' ', '_')}")
            if not result.kept:
                return

    def _fly(self, number: int) -> None:
        key = prompt(number).keys[0]
        flight = self._watch.call("flight", lambda: self._cache.flight(key, _FLIGHT_SECONDS))
        if flight is not None and flight.leader:
            self._store(number)
            flight.land()
