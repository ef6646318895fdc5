"""The daemon's process: serves one Cache to many clients over a Unix socket.

A connection is a client's sign of life: when the last of a session closes, its leases end. A client that went
without a word may still be copying from or into the arena, so what it had in use stays untouched until its
process is known to be dead.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from retain.block import verify_object
from retain.cache import Cache, Flight
from retain.cache.find import Search
from retain.cache.read import Piece, Want, release
from retain.cache.results import Part
from retain.errors import InvalidObject, StoreError
from retain.header import layers_from_text, split_name
from retain.identity import KEY_BYTES
from retain.model import ModelSpec, Slice
from retain.stores.memory import MemoryStore

from . import wire

log = logging.getLogger("retain.daemon")

CHAINS = 64
"""How many chains of keys are remembered for a session, so that a growing prompt sends only what is new."""

LEASE_SECONDS = 60.0
"""How long a lookup that nobody loads keeps its blocks, at the most."""

LONGEST_WAIT = 600.0
"""No request may wait longer than this, in seconds, whatever it asks for."""

SWEEP_SECONDS = 1.0
"""How often quarantined clients and the idle time are looked at, while there is anything to look at."""


_Handler = Callable[["Session", wire.Request], wire.Reply | None]


@dataclass(eq=False)
class Looked:
    """What a lookup leased: full blocks and candidates, until it is settled and loaded or released."""

    search: Search
    parts: tuple[Part, ...]
    candidates: tuple[Part, ...]
    deadline: float


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
    places: dict[str, int] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server:
    """Serves `cache` on `listener` until stopped, or idle for `idle_seconds` (None: for ever)."""

    def __init__(self, cache: Cache, listener: socket.socket, *, idle_seconds: float | None = None) -> None:
        store = cache.tiers[0].store
        if not isinstance(store, MemoryStore) or store.fd is None:
            raise StoreError("the daemon needs an arena that it can share, and this system has no memfd")
        self.cache = cache
        self.boot = secrets.token_bytes(wire.BOOT_BYTES)
        self._store = store
        self._fd = store.fd
        self._listener = listener
        self._idle_seconds = idle_seconds
        self._sessions: dict[bytes, Session] = {}
        self._quarantine: list[tuple[int, Session]] = []
        self._lock = threading.Lock()
        self._leases = itertools.count(1)
        self._flights = itertools.count(1)
        self._stop = threading.Event()
        self._started = self._last_used = time.monotonic()

    def serve(self) -> None:
        """Accept clients until `stop`; then close the cache."""
        threading.Thread(target=self._sweep, name="retain-sweep", daemon=True).start()
        log.info("the daemon serves, boot %s", self.boot.hex())
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            threading.Thread(
                target=self._serve, args=(connection,), name="retain-client", daemon=True
            ).start()
        self.cache.close()
        log.info("the daemon has ended")

    def stop(self) -> None:
        """End `serve`. Idempotent."""
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def state(self) -> wire.State:
        """What `retain status` shows."""
        stats = self.cache.stats()
        tiers = [
            (name, t.kind, t.objects, t.bytes, t.capacity, t.leased, t.pinned, t.codec)
            for name, t in stats.tiers.items()
        ]
        return wire.State(
            dict(stats.counters),
            dict(stats.failures),
            tiers,
            stats.pending_writes,
            os.getpid(),
            time.monotonic() - self._started,
            len(self._sessions),
        )

    # connections

    def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            with connection:
                session = self._greet(connection)
                while session is not None and not self._stop.is_set():
                    request = wire.receive_request(connection)
                    if request is None:
                        break
                    self._last_used = time.monotonic()
                    reply = self._answer(session, request)
                    if reply is not None:
                        wire.send_reply(connection, self.boot, reply)
                    if isinstance(request, wire.Stop):
                        self.stop()
        except wire.WireError as error:
            log.info("a connection ended: %s", error)
        except Exception:
            log.exception("a connection failed")
        finally:
            if session is not None:
                self._leave(session)

    def _greet(self, connection: socket.socket) -> Session | None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        hello = wire.receive_request(connection)
        if hello is None:
            return None
        reason = None
        if uid not in (os.getuid(), 0):
            reason = f"this daemon serves user {os.getuid()}, not user {uid}"
        elif not isinstance(hello, wire.Hello):
            reason = "the first message of a connection is Hello"
        elif hello.version != wire.VERSION:
            reason = f"this daemon speaks protocol version {wire.VERSION}, the client version {hello.version}"
        if reason is not None or not isinstance(hello, wire.Hello):
            wire.send_reply(connection, self.boot, wire.Refused(reason or "no greeting"))
            return None
        with self._lock:
            if hello.session:
                session = self._sessions.get(hello.session)
            else:
                session = Session(secrets.token_bytes(16), pid, hello.client[:80])
                self._sessions[session.token] = session
            if session is not None:
                session.connections += 1
        if session is None:
            wire.send_reply(connection, self.boot, wire.Refused("this session has ended"))
            return None
        tiers = [(tier.name, tier.kind, tier.capacity) for tier in self.cache.tiers]
        welcome = wire.Welcome(wire.VERSION, session.token, self._store.span, tiers)
        try:
            wire.send_reply(connection, self.boot, welcome, None if hello.session else self._fd)
        except wire.WireError:
            self._leave(session)
            raise
        return session

    def _leave(self, session: Session) -> None:
        with self._lock:
            session.connections -= 1
            if session.connections:
                return
            self._sessions.pop(session.token, None)
            self._last_used = time.monotonic()
        for flight in session.flights.values():
            flight.land()
        for lease in list(session.looked):
            self._release(session, lease)
        in_use = bool(session.loaded or session.places)
        if in_use and not session.orderly:
            pidfd = _pidfd(session.pid)
            if pidfd is not None:
                log.info(
                    "client %s (process %d) left without a word: what it had in use waits for the process to end",
                    session.client,
                    session.pid,
                )
                with self._lock:
                    self._quarantine.append((pidfd, session))
                return
        self._settle_up(session)

    def _settle_up(self, session: Session) -> None:
        """Give back everything a session held; nothing of it copies any more."""
        for rows in session.loaded.values():
            release(rows)
        session.loaded.clear()
        for name in session.places:
            self.cache.arena.abandon(name)
        session.places.clear()

    def _sweep(self) -> None:
        while not self._stop.wait(
            SWEEP_SECONDS if self._quarantine or self._idle_seconds else 10 * SWEEP_SECONDS
        ):
            with self._lock:
                waiting, self._quarantine = self._quarantine, []
            still: list[tuple[int, Session]] = []
            for pidfd, session in waiting:
                if select.select([pidfd], [], [], 0)[0]:
                    os.close(pidfd)
                    self._settle_up(session)
                else:
                    still.append((pidfd, session))
            self._expire()
            with self._lock:
                self._quarantine.extend(still)
                idle = not self._sessions and not self._quarantine
            if (
                idle
                and self._idle_seconds is not None
                and time.monotonic() - self._last_used > self._idle_seconds
                and not self.cache.demoter.pending
            ):
                log.info(
                    "idle for %.0f s: the daemon ends, the tiers below keep what they have",
                    self._idle_seconds,
                )
                self.stop()

    def _expire(self) -> None:
        """End the leases of lookups that nobody loaded in time."""
        now = time.monotonic()
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            with session.lock:
                late = [lease for lease, looked in session.looked.items() if looked.deadline < now]
            for lease in late:
                self._release(session, lease)

    # requests

    def _answer(self, session: Session, request: wire.Request) -> wire.Reply | None:
        handler: _Handler | None = getattr(self, f"_on_{type(request).__name__.lower()}", None)
        try:
            if handler is None:
                return wire.Refused(f"{type(request).__name__} is not expected here")
            return handler(session, request)
        except (KeyError, ValueError, IndexError) as error:
            return (
                None if isinstance(request, wire.OneWay) else wire.Refused(f"{type(error).__name__}: {error}")
            )
        except Exception as error:
            self.cache.failure("a request to the daemon failed", f"{type(request).__name__}: {error!r}")
            return None if isinstance(request, wire.OneWay) else wire.Refused("the request failed")

    def _on_model(self, session: Session, request: wire.Model) -> wire.Reply:
        session.models[request.number] = spec_from(request.spec)
        return wire.Done(1)

    def _on_lookup(self, session: Session, request: wire.Lookup) -> wire.Reply:
        fresh = split_keys(request.keys)
        with session.lock:
            known = session.chains.get(request.base, ())
            if request.keep > len(known):
                return wire.Refused("this chain is not remembered")
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
        )
        finder = self.cache.finder
        found = finder.find(search)
        parts = finder.acquire(found.parts)
        candidates: list[Part] = []
        told: list[wire.Candidate] = []
        if len(parts) == len(found.parts):
            first = len(parts) * request.block_tokens
            for each in found.candidates:
                part = Part(each.key, first, int(each.tokens.size), (each.source,))
                if finder.hold((part,)):
                    candidates.append(part)
                    told.append(
                        wire.Candidate(
                            each.key,
                            each.tokens.astype("<u4").tobytes(),
                            each.media,
                            each.source.tier,
                            each.source.size,
                        )
                    )
        lease = next(self._leases)
        with session.lock:
            session.looked[lease] = Looked(search, parts, tuple(candidates), time.monotonic() + LEASE_SECONDS)
        lowest = [(max(s.tier for s in part.sources), sum(s.size for s in part.sources)) for part in parts]
        return wire.Found(lease, lowest, told, self._speeds())

    def _speeds(self) -> dict[str, tuple[float, float]]:
        planner = self.cache.planner
        speeds = {}
        for tier in self.cache.tiers:
            line = planner.tier_line(tier.name)
            if line is not None:
                speeds[tier.name] = line
        return speeds

    def _on_settle(self, session: Session, request: wire.Settle) -> None:
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
            dropped = looked.parts[request.parts :] + tuple(c for c in looked.candidates if c not in chosen)
            looked.parts, looked.candidates = looked.parts[: request.parts], chosen
            if not looked.parts and not chosen:
                del session.looked[request.lease]
        self.cache.finder.release(dropped)

    def _on_load(self, session: Session, request: wire.Load) -> wire.Reply:
        looked = self._looked(request.lease, end=request.end)
        if looked is None:
            return wire.Refused("this lease has ended")
        parts = looked.parts + looked.candidates
        try:
            if looked.candidates:
                self.cache.finder.touch(looked.candidates)
            spec = session.models[request.model]
            if spec != looked.search.spec:
                return wire.Refused("the lease is for another model")
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
        return wire.Blocks(lease, placed)

    def _where(self, piece: Piece) -> tuple[int, int] | None:
        if piece.slot is None:
            return None
        return self._store.place(self.cache.tiers[0].object_name(piece.slot))

    def _looked(self, lease: int, *, end: bool) -> Looked | None:
        """What a lookup leased, whichever session made it: a scheduler looks up, workers load."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            with session.lock:
                looked = session.looked.pop(lease, None) if end else session.looked.get(lease)
            if looked is not None:
                return looked
        return None

    def _on_release(self, session: Session, request: wire.Release) -> None:
        self._release(session, request.lease)

    def _release(self, session: Session, lease: int) -> None:
        with session.lock:
            looked = session.looked.pop(lease, None)
            rows = session.loaded.pop(lease, None)
        if looked is not None:
            self.cache.finder.release(looked.parts + looked.candidates)
        if rows is not None:
            release(rows)

    def _on_reserve(self, session: Session, request: wire.Reserve) -> wire.Reply:
        split_name(request.name)
        finder, arena = self.cache.finder, self.cache.arena
        if finder.present(request.name):
            self.cache.count("present_blocks")
            return wire.Place(-1, "present")
        try:
            buffer = arena.reserve(request.name, request.size, 2.0 if self.cache.demoter.pending else 0.0)
        except KeyError:
            buffer = None
            reason = "busy"
        else:
            reason = "no room"
        place = self._store.place(request.name) if buffer is not None else None
        if buffer is None or place is None:
            self.cache.count("refused_blocks")
            return wire.Place(-1, reason)
        with session.lock:
            session.places[request.name] = request.size
        return wire.Place(place[0], "")

    def _on_commit(self, session: Session, request: wire.Commit) -> wire.Reply:
        with session.lock:
            size = session.places.pop(request.name, None)
        if size is None:
            return wire.Kept(False, "failed")
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
            return wire.Kept(False, "failed")
        result = self.cache.admit(frame.header, size)
        return wire.Kept(result.kept, result.reason)

    def _on_abandon(self, session: Session, request: wire.Abandon) -> None:
        with session.lock:
            size = session.places.pop(request.name, None)
        if size is not None:
            self.cache.arena.abandon(request.name)

    def _on_missing(self, session: Session, request: wire.Missing) -> wire.Reply:
        spec = session.models[request.model]
        keys = split_keys(request.keys)
        search = Search(keys, b"", 1, spec, Slice.parse(request.slice), request.fidelity, len(keys))
        return wire.Indices(self.cache.finder.missing(search))

    def _on_nearest(self, session: Session, request: wire.Nearest) -> wire.Reply:
        depth, continuations = self.cache.finder.kept_path(split_keys(request.keys), request.root)
        return wire.Continuations(depth, [tokens.astype("<u4").tobytes() for tokens in continuations])

    def _on_drop(self, session: Session, request: wire.Drop) -> wire.Reply:
        removed = self.cache.drop(split_keys(request.keys))
        return wire.Removed(removed.objects, removed.bytes)

    def _on_clear(self, session: Session, request: wire.Clear) -> wire.Reply:
        removed = self.cache.clear(tier=request.tier, space=request.space)
        return wire.Removed(removed.objects, removed.bytes)

    def _on_pin(self, session: Session, request: wire.Pin) -> wire.Reply:
        keys = split_keys(request.keys)
        return wire.Done(self.cache.pin(keys) if request.pinned else self.cache.unpin(keys))

    def _on_fly(self, session: Session, request: wire.Fly) -> wire.Reply:
        flight = self.cache.flight(request.key, min(max(request.timeout, 0.0), LONGEST_WAIT))
        if not flight.leader:
            return wire.Flying(0, flight.landed)
        number = next(self._flights)
        with session.lock:
            session.flights[number] = flight
        return wire.Flying(number, False)

    def _on_land(self, session: Session, request: wire.Land) -> None:
        with session.lock:
            flight = session.flights.pop(request.number, None)
        if flight is not None:
            flight.land()

    def _on_flush(self, session: Session, request: wire.Flush) -> wire.Reply:
        return wire.Done(int(self.cache.flush(min(max(request.timeout, 0.0), LONGEST_WAIT))))

    def _on_stats(self, session: Session, request: wire.Stats) -> wire.Reply:
        return self.state()

    def _on_count(self, session: Session, request: wire.Count) -> None:
        self.cache.count(request.name[:60], request.n)

    def _on_failure(self, session: Session, request: wire.Failure) -> None:
        self.cache.failure(request.reason[:200], request.detail[:1000])

    def _on_bye(self, session: Session, request: wire.Bye) -> None:
        session.orderly = True

    def _on_stop(self, session: Session, request: wire.Stop) -> wire.Reply:
        return wire.Done(1)


def split_keys(keys: bytes) -> tuple[bytes, ...]:
    """A concatenation of keys, apart. Raises ValueError."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no list of keys")
    return tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def spec_from(told: wire.ModelWire) -> ModelSpec:
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


def _pidfd(pid: int) -> int | None:
    """A handle on a process, None when it is gone already."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
