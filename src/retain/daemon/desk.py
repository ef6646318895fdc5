"""The daemon's desk: answers clients' requests on the cache, gives back what they leave behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from retain.block import verify_object
from retain.cache import Cache, Flight
from retain.cache.find import Search
from retain.cache.read import Piece, Want, release
from retain.cache.results import Part
from retain.errors import InvalidObject
from retain.header import layers_from_text, split_name
from retain.model import ModelSpec, Slice
from retain.stores.memory import MemoryStore

from . import messages
from .controls import LONGEST_WAIT, Controls, split_keys

CHAINS = 64
"""How many chains of keys are remembered for a session, so that a growing prompt sends only what is new."""

ROOM_SECONDS = 1.0
"""How long a client that stores waits for room, at the most: well within the deadline of its request."""

LEASE_SECONDS = 60.0
"""How long a lookup that nobody loads keeps its blocks, at the most."""

SETTLE_SECONDS = 1.0
"""How long a load waits for its lookup to be settled: a worker's connection may be faster than that of the
scheduler, which looked up and sent the word before.
"""

_Handler = Callable[["Session", messages.Request], messages.Reply | None]


@dataclass(eq=False)
class Looked:
    """What a lookup leased: full blocks and candidates, until it is settled and loaded or released."""

    search: Search
    parts: tuple[Part, ...]
    candidates: tuple[Part, ...]
    deadline: float
    settled: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Session:
    """One client: its connections, and what it holds."""

    token: bytes
    pid: int
    client: str
    connections: int = 0
    orderly: bool = False
    models: dict[int, ModelSpec] = field(default_factory=dict)
    chains: OrderedDict[int, tuple[bytes, ...]] = field(default_factory=OrderedDict)
    looked: dict[int, Looked] = field(default_factory=dict)
    loaded: dict[int, list[tuple[Piece, ...]]] = field(default_factory=dict)
    places: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sessions:
    """The sessions that are open, by their token. Safe from several threads."""

    def __init__(self) -> None:
        self._open: dict[bytes, Session] = {}
        self._lock = threading.Lock()

    def join(self, token: bytes, make: Callable[[], Session]) -> Session | None:
        """One more connection of session `token`, of a new one if it is empty; None if it has ended."""
        with self._lock:
            session = self._open.get(token) if token else make()
            if session is not None:
                self._open[session.token] = session
                session.connections += 1
            return session

    def leave(self, session: Session) -> bool:
        """One connection less; whether it was the last."""
        with self._lock:
            session.connections -= 1
            if session.connections:
                return False
            self._open.pop(session.token, None)
            return True

    def find(self, token: bytes) -> Session | None:
        with self._lock:
            return self._open.get(token)

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._open.values())


class Desk:
    """Answers requests. Safe from several threads, also with those of one session on several connections."""

    def __init__(self, cache: Cache, store: MemoryStore) -> None:
        self.cache = cache
        self.sessions = Sessions()
        self._store = store
        self._leases = itertools.count(1)
        self._flights = itertools.count(1)
        self._controls = Controls(cache, lambda: len(self.sessions.all()))

    def leave(self, session: Session) -> None:
        """End what a session that is gone cannot be using any more: flights, and leases of mere lookups."""
        for flight in session.flights.values():
            flight.land()
        for lease in list(session.looked):
            self.release(session, lease)

    def settle_up(self, session: Session) -> None:
        """Give back everything a session held; nothing of it copies any more."""
        for rows in session.loaded.values():
            release(rows)
        session.loaded.clear()
        for name in session.places:
            self.cache.arena.abandon(name)
        session.places.clear()

    def expire(self) -> None:
        """End the leases of lookups that nobody loaded in time."""
        now = time.monotonic()
        for session in self.sessions.all():
            with session.lock:
                late = [lease for lease, looked in session.looked.items() if looked.deadline < now]
            for lease in late:
                self.release(session, lease)

    def state(self) -> messages.State:
        """What `retain status` shows."""
        return self._controls.state()

    def answer(self, session: Session, request: messages.Request) -> messages.Reply | None:
        name = f"on_{type(request).__name__.lower()}"
        handler: _Handler | None = getattr(self, f"_{name}", None) or getattr(self._controls, name, None)
        try:
            if handler is None:
                return messages.Refused(f"{type(request).__name__} is not expected here")
            return handler(session, request)
        except (KeyError, ValueError, IndexError) as error:
            return (
                None
                if isinstance(request, messages.OneWay)
                else messages.Refused(f"{type(error).__name__}: {error}")
            )
        except Exception as error:
            self.cache.failure("a request to the daemon failed", f"{type(request).__name__}: {error!r}")
            return None if isinstance(request, messages.OneWay) else messages.Refused("the request failed")

    def _on_model(self, session: Session, request: messages.Model) -> messages.Reply:
        session.models[request.number] = spec_from(request.spec)
        return messages.Done(1)

    def _on_lookup(self, session: Session, request: messages.Lookup) -> messages.Reply:
        fresh = split_keys(request.keys)
        with session.lock:
            known = session.chains.get(request.base, ())
            if request.keep > len(known):
                return messages.Refused("this chain is not remembered")
            keys = known[: request.keep] + fresh
            session.chains[request.chain] = keys
            session.chains.move_to_end(request.chain)
            while len(session.chains) > CHAINS:
                session.chains.popitem(last=False)
        self.cache.count("lookups")
        self.cache.count("requested_tokens", request.limit)
        spec = session.models[request.model]
        search = Search(
            keys,
            request.root,
            request.block_tokens,
            spec,
            Slice.parse(request.slice),
            request.fidelity,
            request.limit,
            request.rest[: 4 * request.block_tokens],
        )
        finder = self.cache.finder
        found = finder.find(search)
        parts = finder.acquire(found.parts)
        candidates: list[Part] = []
        told: list[messages.Candidate] = []
        if len(parts) == len(found.parts):
            first = len(parts) * request.block_tokens
            for each in found.candidates:
                part = Part(each.key, first, int(each.tokens.size), each.sources)
                if finder.hold((part,)):
                    candidates.append(part)
                    told.append(
                        messages.Candidate(
                            each.key,
                            each.tokens.astype("<u4").tobytes(),
                            each.media,
                            *_lowest(part),
                        )
                    )
        lease = next(self._leases)
        with session.lock:
            session.looked[lease] = Looked(search, parts, tuple(candidates), time.monotonic() + LEASE_SECONDS)
        return messages.Found(lease, [_lowest(part) for part in parts], told, self._speeds())

    def _speeds(self) -> dict[str, tuple[float, float]]:
        planner = self.cache.planner
        speeds = {}
        for tier in self.cache.tiers:
            line = planner.tier_line(tier.name)
            if line is not None:
                speeds[tier.name] = line
        return speeds

    def _on_settle(self, session: Session, request: messages.Settle) -> None:
        self.cache.count("hit_tokens", request.tokens)
        self.cache.count("planned_away_tokens", request.found - request.tokens)
        self.cache.count("lookup_hits" if request.tokens else "lookup_misses")
        with session.lock:
            looked = session.looked.get(request.lease)
            if looked is None:
                return
            chosen = (
                looked.candidates[request.candidate : request.candidate + 1] if request.candidate >= 0 else ()
            )
            unread = looked.parts[request.parts :]
            dropped = unread + tuple(c for c in looked.candidates if c not in chosen)
            looked.parts, looked.candidates = looked.parts[: request.parts], chosen
            looked.settled.set()
            if not looked.parts and not chosen:
                del session.looked[request.lease]
        self.cache.prober.probe(unread)
        self.cache.finder.release(dropped)

    def _on_load(self, session: Session, request: messages.Load) -> messages.Reply:
        looked = self._looked(request.lease, end=False)
        if looked is not None and not looked.settled.wait(SETTLE_SECONDS):
            return messages.Refused("the lookup of this lease was not settled")
        if request.end:
            looked = self._looked(request.lease, end=True)
        if looked is None:
            return messages.Refused("this lease has ended")
        parts = looked.parts + looked.candidates
        try:
            if looked.candidates:
                self.cache.finder.touch(looked.candidates)
            spec = session.models[request.model]
            if spec != looked.search.spec:
                return messages.Refused("the lease is for another model")
            self.cache.count("loads")
            deadline = time.perf_counter() + min(max(request.timeout, 0.0), LONGEST_WAIT)
            rows = self.cache.reader.pieces(Want(spec, looked.search.fidelity), parts, deadline)
        finally:
            if request.end:
                self.cache.finder.release(parts)
        placed: list[list[tuple[int, int]]] = []
        for row in rows:
            places = [self._where(piece) for piece in row]
            if None in places:
                self.cache.failure("a block could not be shared", "the arena has no room for it")
                break
            placed.append([place for place in places if place is not None])
        release(rows[len(placed) :])
        rows = rows[: len(placed)]
        self.cache.count("loaded_blocks", len(rows))
        self.cache.count("loaded_tokens", sum(part.tokens for part in parts[: len(rows)]))
        lease = next(self._leases)
        with session.lock:
            session.loaded[lease] = rows
        if rows:
            want = Want(spec, looked.search.fidelity)
            self.cache.prefetcher.follow(want, looked.search.wanted, parts[: len(rows)])
        return messages.Blocks(lease, placed)

    def _where(self, piece: Piece) -> tuple[int, int] | None:
        if piece.slot is None:
            return None
        return self._store.place(self.cache.tiers[0].object_name(piece.slot))

    def _looked(self, lease: int, *, end: bool) -> Looked | None:
        """What a lookup leased, whichever session made it: a scheduler looks up, workers load."""
        for session in self.sessions.all():
            with session.lock:
                looked = session.looked.pop(lease, None) if end else session.looked.get(lease)
            if looked is not None:
                return looked
        return None

    def _on_release(self, session: Session, request: messages.Release) -> None:
        self.release(session, request.lease)

    def release(self, session: Session, lease: int) -> None:
        with session.lock:
            looked = session.looked.pop(lease, None)
            rows = session.loaded.pop(lease, None)
        if looked is not None:
            self.cache.finder.release(looked.parts + looked.candidates)
        if rows is not None:
            release(rows)

    def _on_reserve(self, session: Session, request: messages.Reserve) -> messages.Reply:
        split_name(request.name)
        finder, arena = self.cache.finder, self.cache.arena
        if finder.present(request.name):
            self.cache.count("present_blocks")
            return messages.Place(-1, "present")
        memory = self.cache.tiers[0]
        if not memory.room.within_quota(request.size, memory.tenants.of(request.space)):
            self.cache.count("refused_blocks")
            return messages.Place(-1, "over quota")
        try:
            buffer = arena.reserve(
                request.name, request.size, ROOM_SECONDS if self.cache.demoter.pending else 0.0
            )
        except KeyError:
            buffer = None
            reason = "busy"
        else:
            reason = "no room"
        place = self._store.place(request.name) if buffer is not None else None
        if buffer is None or place is None:
            self.cache.count("refused_blocks")
            return messages.Place(-1, reason)
        with session.lock:
            session.places[request.name] = (request.size, request.ttl)
        return messages.Place(place[0], "")

    def _on_commit(self, session: Session, request: messages.Commit) -> messages.Reply:
        with session.lock:
            reserved = session.places.pop(request.name, None)
        if reserved is None:
            return messages.Kept(False, "failed")
        buffer = self._store.reserved(request.name)
        try:
            if buffer is None:
                raise InvalidObject("its place is gone")
            frame, _ = verify_object(buffer)
            if frame.header.name != request.name or frame.header.codec != "raw":
                raise InvalidObject(f"the object says that it is {frame.header.name}")
        except InvalidObject as error:
            self.cache.arena.abandon(request.name)
            self.cache.failure("a client wrote an object that is not intact", error)
            return messages.Kept(False, "failed")
        result = self.cache.admit(frame.header, *reserved)
        return messages.Kept(result.kept, result.reason)

    def _on_abandon(self, session: Session, request: messages.Abandon) -> None:
        with session.lock:
            reserved = session.places.pop(request.name, None)
        if reserved is not None:
            self.cache.arena.abandon(request.name)

    def _on_fly(self, session: Session, request: messages.Fly) -> messages.Reply:
        flight = self.cache.flight(request.key, min(max(request.timeout, 0.0), LONGEST_WAIT))
        if not flight.leader:
            return messages.Flying(0, flight.landed)
        number = next(self._flights)
        with session.lock:
            session.flights[number] = flight
        return messages.Flying(number, False)

    def _on_land(self, session: Session, request: messages.Land) -> None:
        with session.lock:
            flight = session.flights.pop(request.number, None)
        if flight is not None:
            flight.land()

    def _on_unused(self, session: Session, request: messages.Unused) -> None:
        other = self.sessions.find(request.session)
        if other is not None and other.pid == session.pid:
            other.orderly = True

    def _on_bye(self, session: Session, request: messages.Bye) -> None:
        session.orderly = True

    def _on_stop(self, session: Session, request: messages.Stop) -> messages.Reply:
        return messages.Done(1)


def _lowest(part: Part) -> tuple[int, int]:
    """The lowest tier that a part is read from, and its bytes in all tiers."""
    return max(source.tier for source in part.sources), sum(source.size for source in part.sources)


def spec_from(told: messages.ModelWire) -> ModelSpec:
    """A ModelSpec from its wire form. Raises ValueError or UnsupportedModel."""
    return ModelSpec(
        told.name,
        told.architecture,
        layers_from_text(told.layers),
        told.dtype,
        told.kin,
        told.variant,
        told.adapter,
    )
