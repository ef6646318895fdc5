"""What engines hold instead of a Cache when a daemon keeps it: the same calls, carried over the socket.

Bytes do not travel: the arena is mapped here too, and blocks are copied by who needs them. A daemon that is
gone is a cache that misses, at once, until it is back; a new one (another boot id) is met with nothing
remembered of the old.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np

from retain.block import Block, raw_layout
from retain.cache import (
    Flight,
    Hit,
    Ledger,
    Loaded,
    Nearest,
    Planner,
    Query,
    Reservation,
    Selection,
    Stats,
    StoreResult,
    Tally,
    TierStats,
)
from retain.cache.find import Found, continuation, nearest
from retain.cache.results import Lease, Part, read_ticket, span
from retain.errors import InvalidObject
from retain.header import BlockHeader
from retain.identity import Chain
from retain.model import ModelSpec, Slice

from . import exchange, messages, wire
from . import link as session
from .controls import selection_wire
from .exchange import R
from .link import Link

log = logging.getLogger("retain.daemon")

REMOVE_SECONDS = 300.0
"""How long an answer about what was removed is waited for: servers may have to list all they have."""

OWNERS = 4096
"""How many spaces' tenants are remembered as told, so that they are told once."""

RETRY_SECONDS = (0.05, 5.0)
"""The first and the longest pause between attempts to reach a daemon that is gone."""


class RemoteCache:
    """A cache kept by a daemon. Safe from several threads; the calls are those of retain.cache.Cache.

    `dial` gives a connected socket or raises OSError or WireError; it may start the daemon, and is called
    from a thread of its own once the daemon is gone, so that no request waits for it. `patience` is how many
    seconds a daemon may take to greet a client, when this is made and each time the daemon is back.
    """

    def __init__(
        self,
        dial: Callable[[], socket.socket],
        client: str = "python",
        patience: float = session.CALL_SECONDS,
    ) -> None:
        self._dial = dial
        self._client = client
        self._patience = patience
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._closed = threading.Event()
        self._reviving = False
        self.planner = Planner()
        self._unused: deque[tuple[bytes, bytes]] = deque()
        self._link: Link | None = self._connected()

    # the calls of the waist

    def lookup(self, query: Query, *, plan: bool = True) -> Hit:
        """See Cache.lookup."""
        nothing = Hit(query, (), 0, {}, Lease(lambda: None))
        if query.tokens < 1:
            return nothing
        link = self._alive()
        if link is None:
            return nothing
        try:
            reply = exchange.look(link, query)
            found = Found(
                exchange.parts_of(query, reply, link),
                tuple(exchange.candidate_of(each, query) for each in reply.candidates),
            )
            last = continuation(query, found)
            parts = found.parts if last is None else (*found.parts, last)
            total = sum(part.tokens for part in parts)
            if plan and parts:
                parts = self._plan(link, query, parts, reply.speeds)
            used = min(len(parts), len(found.parts))
            index = -1
            if last is not None and len(parts) > len(found.parts):
                index = next(i for i, each in enumerate(found.candidates) if each.key == last.key)
            tokens = sum(part.tokens for part in parts)
            link.call(messages.Settle(reply.lease, used, index, tokens, total), session.CALL_SECONDS)
        except (wire.WireError, InvalidObject, ValueError) as error:
            self._failed("a lookup in the daemon failed", error)
            return nothing
        by_tier: dict[str, int] = {}
        for part in parts:
            kind = link.tiers[part.sources[0].tier][1]
            by_tier[kind] = by_tier.get(kind, 0) + part.tokens
        lease = Lease(lambda: exchange.tell(link, messages.Release(reply.lease)) if parts else None)
        return Hit(query, parts, total, by_tier, lease, handle=reply.lease)

    def load(self, hit: Hit, *, timeout: float = 30.0) -> Loaded:
        """See Cache.load."""
        start = time.perf_counter()
        blocks: list[Block] = []
        leases: tuple[Lease, ...] = ()
        link = self._alive()
        if link is not None and hit.parts:
            try:
                patience = self.planner.patience(hit.query.spec, *span(hit.parts))
                wait = timeout if patience is None else min(timeout, patience)
                blocks, leases = exchange.load_blocks(link, hit, wait)
            except (wire.WireError, InvalidObject, ValueError) as error:
                self._failed("a load from the daemon failed", error)
        parts = hit.parts[: len(blocks)]
        by_tier: dict[str, int] = {}
        for part in parts:
            kind = link.tiers[part.sources[0].tier][1] if link is not None else "memory"
            by_tier[kind] = by_tier.get(kind, 0) + part.tokens
        lengths = tuple(part.tokens for part in parts)
        return Loaded(tuple(blocks), lengths, by_tier, time.perf_counter() - start, leases)

    def claim(self, ticket: bytes, spec: ModelSpec, part: Slice | None = None) -> Hit:
        """The hit that another process's `Hit.ticket` stands for, to be loaded here. Raises ValueError for
        nonsense.
        """
        return read_ticket(ticket, spec, part)

    def reserve(self, header: BlockHeader, *, ttl: float | None = None) -> Reservation | None:
        """See Cache.reserve."""
        result = self._reserve(header, ttl)
        return result if isinstance(result, Reservation) else None

    def store(self, block: Block, *, ttl: float | None = None) -> StoreResult:
        """See Cache.store."""
        place = self._reserve(block.header, ttl)
        if isinstance(place, StoreResult):
            return place
        try:
            place.fill(block)
        except Exception:
            place.abandon()
            raise
        return place.commit()

    def missing(self, query: Query) -> list[int]:
        """See Cache.missing; everything is missing while the daemon is gone."""
        keys = query.chain.keys
        link = self._alive()
        if link is not None:
            try:
                request = messages.Missing(
                    exchange.model_number(link, query.spec), b"".join(keys), query.wanted.text, query.fidelity
                )
                return exchange.ask(link, request, messages.Indices).values
            except wire.WireError as error:
                self._failed("a lookup in the daemon failed", error)
        return list(range(len(keys)))

    def nearest(self, chain: Chain) -> Nearest | None:
        """See Cache.nearest."""
        reply = self._try(messages.Nearest(b"".join(chain.keys), chain.root), messages.Continuations)
        if reply is None:
            return None
        return nearest(chain, reply.depth, [np.frombuffer(tokens, "<u4") for tokens in reply.tokens])

    def remove(self, which: Selection) -> Tally:
        """See Cache.remove; a daemon that is gone is what cannot be reached."""
        return self._tally(messages.Remove(selection_wire(which)), which)

    def drop(self, keys: Iterable[bytes]) -> Tally:
        """See Cache.drop."""
        return self.remove(Selection(keys=tuple(keys)))

    def clear(self, *, tier: str | None = None, space: bytes | None = None) -> Tally:
        """See Cache.clear."""
        return self.remove(Selection(tier=tier, space=space))

    def pin(self, which: Selection) -> Tally:
        """See Cache.pin."""
        return self._tally(messages.Pin(selection_wire(which), True), which)

    def unpin(self, which: Selection) -> Tally:
        """See Cache.unpin."""
        return self._tally(messages.Pin(selection_wire(which), False), which)

    def warm(self, keys: Sequence[bytes]) -> Tally:
        """See Cache.warm."""
        return self._tally(messages.Warm(b"".join(keys)), Selection())

    def own(self, space: bytes, tenant: str) -> None:
        """See Cache.own."""
        link = self._alive()
        if link is not None and link.owners.get(space) != tenant:
            exchange.tell(link, messages.Own(space, tenant))
            with link.lock:
                link.owners[space] = tenant
                while len(link.owners) > OWNERS:
                    link.owners.popitem(last=False)

    def flight(self, key: bytes, timeout: float) -> Flight:
        """See Cache.flight. While the daemon is gone everyone leads."""
        link = self._alive()
        reply = self._try(messages.Fly(key, timeout), messages.Flying, timeout + session.CALL_SECONDS)
        if reply is None or link is None:
            return Flight(leader=True, landed=False)
        number = reply.number
        if not number:
            return Flight(leader=False, landed=reply.landed)
        return Flight(leader=True, landed=False, land=lambda: exchange.tell(link, messages.Land(number)))

    def flush(self, timeout: float = 60.0) -> bool:
        """See Cache.flush."""
        reply = self._try(messages.Flush(timeout), messages.Done, timeout + session.CALL_SECONDS)
        return reply is not None and bool(reply.value)

    def count(self, name: str, n: int = 1) -> None:
        """See Cache.count."""
        link = self._alive()
        if link is not None:
            exchange.tell(link, messages.Count(name, n))

    def failure(self, reason: str, detail: object) -> None:
        """See Cache.failure."""
        self._ledger.failure(reason, detail)
        link = self._alive()
        if link is not None:
            exchange.tell(link, messages.Failure(reason, str(detail)))

    def stats(self) -> Stats:
        """The daemon's counters and tiers, with this client's failures; zeros while the daemon is gone."""
        own = self._ledger.failures()
        state = self.state()
        if state is None:
            return Stats(self._ledger.counters(), own, {})
        tiers = {
            name: TierStats(kind, objects, size, capacity, leased, pinned, codec, **_room(state, name))
            for name, kind, objects, size, capacity, leased, pinned, codec in state.tiers
        }
        return Stats(state.counters, state.failures | own, tiers, state.pending, state.temporary)

    def state(self) -> messages.State | None:
        """The daemon's state, None while it is gone."""
        return self._try(messages.Stats(), messages.State)

    def stop_daemon(self) -> bool:
        """End the daemon; whether it was there to be ended."""
        return self._try(messages.Stop(), messages.Done) is not None

    @property
    def connected(self) -> bool:
        """Whether the daemon is there, as far as is known."""
        link = self._link
        return link is not None and link.alive

    def close(self) -> None:
        """Leave the daemon in order. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            link, self._link = self._link, None
        if link is not None:
            with suppress(wire.WireError):
                link.call(messages.Bye(), session.CALL_SECONDS)
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # lookup and load in parts

    def _plan(
        self, link: Link, query: Query, parts: tuple[Part, ...], speeds: dict[str, tuple[float, float]]
    ) -> tuple[Part, ...]:
        for tier, line in speeds.items():
            self.planner.set_tier_line(tier, line)
        blocks = [
            (part.first, part.tokens, [(link.tiers[source.tier][0], source.size) for source in part.sources])
            for part in parts
        ]
        return parts[: self.planner.best_prefix(query.spec, blocks, int(query.chain.tokens.size))]

    def _tally(self, request: messages.Request, which: Selection) -> Tally:
        link = self._alive()
        tiers = [] if link is None else link.tiers
        if tiers and which.tier is not None and all(which.tier not in each[:2] for each in tiers):
            names = ", ".join(each[0] for each in tiers)
            raise ValueError(f"this cache has no tier {which.tier!r}; it has {names}")
        reply = self._try(request, messages.Tallied, REMOVE_SECONDS)
        if reply is None:
            return Tally(missed=("the daemon is gone or did not answer: what was done is not known",))
        return Tally(reply.blocks, reply.objects, reply.bytes, reply.tiers, tuple(reply.missed))

    def _reserve(self, header: BlockHeader, ttl: float | None) -> Reservation | StoreResult:
        if header.codec != "raw":
            raise ValueError(f"blocks are stored raw and encoded by their tiers, got codec {header.codec!r}")
        link = self._alive()
        if link is None:
            return StoreResult(False, "closed" if self._closed.is_set() else "failed")
        layout = raw_layout(header)
        name = header.name
        try:
            place = exchange.place(link, messages.Reserve(name, layout.size, header.space, ttl))
        except wire.WireError as error:
            self._failed("a block could not be placed in the daemon's arena", error)
            return StoreResult(False, "failed")
        if place.offset < 0:
            return StoreResult(place.reason == "present", place.reason)
        buffer = link.writable[place.offset : place.offset + layout.size]
        tokens, arrays = layout.views(buffer)
        state = {"open": True}

        def abandon() -> None:
            if state.pop("open", False):
                exchange.tell(link, messages.Abandon(name))
                link.let_go()

        def commit() -> StoreResult:
            if not state.pop("open", False):
                return StoreResult(False, "failed")
            try:
                layout.write_header(buffer)
                kept = exchange.ask(link, messages.Commit(name), messages.Kept)
            except wire.WireError as error:
                self._failed("a block could not be committed to the daemon", error)
                return StoreResult(False, "failed")
            finally:
                link.let_go()
            return StoreResult(kept.kept, kept.reason)

        return Reservation(header, tokens, arrays, commit, abandon)

    # the link

    def _alive(self) -> Link | None:
        """The link to the daemon; None, with an attempt to get it back under way, while it is gone."""
        with self._lock:
            link = self._link
            if link is not None and link.alive:
                return link
            if self._closed.is_set() or self._reviving:
                return None
            self._reviving = True
        self._ledger.failure("the daemon is gone", "requests miss until it is back")
        threading.Thread(target=self._revive, name="retain-revive", daemon=True).start()
        return None

    def _revive(self) -> None:
        pause, longest = RETRY_SECONDS
        while not self._closed.is_set():
            try:
                link = self._connected()
            except Exception as error:
                self._ledger.failure("the daemon cannot be reached", error)
                time.sleep(pause)
                pause = min(2 * pause, longest)
                continue
            with self._lock:
                self._reviving = False
                self._link, unused = (None, link) if self._closed.is_set() else (link, None)
            if unused is not None:
                unused.close()
            log.info("the daemon is back, boot %s", link.boot.hex())
            self._tell_unused()
            return

    def _connected(self) -> Link:
        link = Link(self._dial, self._client, self._patience)
        link.when_unused = self._is_unused
        return link

    def _is_unused(self, link: Link) -> None:
        self._unused.append((link.boot, link.session))
        self._tell_unused()

    def _tell_unused(self) -> None:
        """Tell the daemon of links to it that broke, and over which nothing is in use any more: it keeps what
        they had in use until then.
        """
        link = self._link
        while link is not None and link.alive:
            try:
                boot, broken = self._unused.popleft()
            except IndexError:
                return
            if boot == link.boot:
                try:
                    link.call(messages.Unused(broken), session.CALL_SECONDS)
                except wire.WireError:
                    self._unused.append((boot, broken))

    def _try(self, request: messages.Request, kind: type[R], timeout: float | None = None) -> R | None:
        link = self._alive()
        if link is None:
            return None
        try:
            return exchange.ask(link, request, kind, timeout)
        except wire.WireError as error:
            self._failed("a request to the daemon failed", error)
            return None

    def _failed(self, reason: str, error: object) -> None:
        self._ledger.failure(reason, error)
        self._alive()  # if the daemon is gone, begin to get it back now, not at the next request


def _room(state: messages.State, tier: str) -> dict[str, Any]:
    room = state.rooms.get(tier)
    if room is None:
        return {}
    unreachable = (room.unreachable_objects, room.unreachable_bytes)
    return {"pinned_bytes": room.pinned_bytes, "tenants": room.tenants, "unreachable": unreachable}
