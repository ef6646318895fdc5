"""Cache: the third agreement of the waist. Lookup, load, store, drop over tiers, the first of which is
memory.

Every failure in here is a miss: counted, logged once with its reason, never raised to the caller of lookup,
load or store.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from retain.block import Block, raw_layout
from retain.errors import StoreError
from retain.header import BlockHeader
from retain.identity import Chain
from retain.model import ModelSpec, Slice

from .control import Control
from .demote import Demoter
from .find import Finder, Search, continuation, nearest
from .flight import Flight, Flights
from .join import Joiner
from .ledger import Ledger
from .place import Arena
from .planner import Planner
from .prefetch import Prefetcher
from .probe import Prober
from .read import Reader, Want
from .results import (
    Hit,
    Lease,
    Loaded,
    Nearest,
    Part,
    Query,
    Reservation,
    Stats,
    StoreResult,
    Tally,
    TierStats,
    read_ticket,
    span,
)
from .select import Selection
from .tier import Tier
from .warm import Warmer

LEASE_SECONDS = 60.0
"""How long a hit that nobody loads keeps its blocks, at the most."""

WAIT_FOR_ROOM = 2.0
"""How long a store waits, at the most, for writes to lower tiers to free room in the arena."""


class Cache:
    """Keeps blocks and finds them again. Thread-safe; use as a context manager or call `close`.

    The calls of the waist come first. The daemon, which serves them to other processes, works on the parts:
    `finder`, `reader`, `arena`, `demoter`, `flights`, `ledger`.
    """

    def __init__(self, tiers: Sequence[Tier], ledger: Ledger) -> None:
        self.tiers = tuple(tiers)
        self.planner = Planner()
        self.ledger = ledger
        self._leases: set[Lease] = set()
        self._lease_lock = threading.Lock()
        self.flights = Flights()
        self.arena = Arena(self.tiers[0], ledger, self._expire_leases)
        self.finder = Finder(self.tiers, ledger, self.planner)
        self.reader = Reader(self.tiers, self.arena, ledger, self.planner)
        self.demoter = Demoter(self.arena, self.tiers[1:], ledger)
        self.reader.promoted = self.demoter.promoted
        self.prefetcher = Prefetcher(self.tiers, self.reader, ledger, self.tiers[0].rules.ahead)
        self.prober = Prober(self.tiers, ledger, self.planner)
        self.control = Control(self.tiers, self.finder.adopter, ledger, self._cancel)
        self.warmer = Warmer(self.tiers, self.reader, self.finder.adopter, ledger)
        self.gaps = self.tiers[0].gaps
        self.gaps.watch(self.tiers)
        self.joiner = Joiner(self.arena, ledger, self.demoter.submit)
        self._handles = itertools.count(1)
        self._hits: weakref.WeakValueDictionary[int, Hit] = weakref.WeakValueDictionary()
        self._closed = False

    def lookup(self, query: Query, *, plan: bool = True) -> Hit:
        """The longest usable prefix of the query's tokens, leased until it is loaded or released.

        Full blocks are found by key; behind the last of them, any kept block that continues it is used up to
        the first token that differs. With `plan`, the hit is cut where loading more is predicted to take
        longer than computing it.
        """
        self.ledger.count("lookups")
        self.ledger.count("requested_tokens", query.tokens)
        found = 0
        parts: tuple[Part, ...] = ()
        if not self._closed:
            try:
                parts = self._find(query)
                found = sum(part.tokens for part in parts)
                if plan and parts:
                    parts = self._plan(query, parts)
                parts = self.finder.acquire(parts)
            except Exception as error:
                parts = ()
                self.ledger.failure("a lookup failed", error)
        by_tier = self._by_tier(parts)
        lease = self._lease(lambda: self.finder.release(parts), LEASE_SECONDS)
        hit = Hit(query, parts, found, by_tier, lease, next(self._handles))
        self._hits[hit.handle] = hit
        self.ledger.count("hit_tokens", hit.tokens)
        self.ledger.count("planned_away_tokens", found - hit.tokens)
        self.ledger.count("lookup_hits" if hit.tokens else "lookup_misses")
        return hit

    def load(self, hit: Hit, *, timeout: float = 30.0) -> Loaded:
        """Read a hit's blocks, verified, in order, ending before the first that cannot be had within
        `timeout` seconds, or as soon as computing them would have been.

        Takes over the hit's lease. Blocks of lower tiers are read into the arena and stay there.
        """
        start = time.perf_counter()
        self.ledger.count("loads")
        parts = hit.parts
        lease = hit.lease
        try:
            if not lease.held and parts:  # it lapsed: look again
                again = () if self._closed else self.finder.acquire(self._find(hit.query))
                parts = again
                lease = self._lease(lambda: self.finder.release(again), LEASE_SECONDS)
            try:
                patience = self.planner.patience(hit.query.spec, *span(parts))
                wait = timeout if patience is None else min(timeout, patience)
                blocks, leases = self.reader.read(hit.query, parts, start + wait)
            finally:
                lease.release()
        except Exception as error:
            self.ledger.failure("a load failed", error)
            blocks, leases = [], []
        lengths = tuple(part.tokens for part in parts[: len(blocks)])
        by_tier = self._by_tier(parts[: len(blocks)])
        self.ledger.count("loaded_blocks", len(blocks))
        self.ledger.count("loaded_tokens", sum(lengths))
        if blocks:
            want = Want(hit.query.spec, hit.query.fidelity)
            self.prefetcher.follow(want, hit.query.wanted, parts[: len(blocks)])
        return Loaded(tuple(blocks), lengths, by_tier, time.perf_counter() - start, tuple(leases))

    def claim(self, ticket: bytes, spec: ModelSpec, part: Slice | None = None) -> Hit:
        """The hit of `Hit.ticket`, to be loaded by another thread, whole or a slice of it.

        A hit that is gone meanwhile loads nothing. Raises ValueError for bytes that are no ticket.
        """
        told = read_ticket(ticket, spec, part)
        hit = self._hits.get(told.handle)
        if hit is None or not hit.lease.held:
            return Hit(told.query, (), 0, {}, Lease(lambda: None))
        query = replace(hit.query, spec=spec, slice=part)
        return Hit(query, hit.parts, hit.found, hit.tokens_by_tier, Lease(lambda: None), hit.handle)

    def reserve(self, header: BlockHeader, *, ttl: float | None = None) -> Reservation | None:
        """A place in the arena for a raw block, to be filled and committed; None where it is not wanted or
        there is no room.

        The reservation's `tokens` and `arrays` are writable and uninitialised. A block with a `ttl` is kept
        so many seconds at the most, in memory alone: the tiers below would not know of it after a restart.
        """
        result = self._reserve(header, ttl)
        return result if isinstance(result, Reservation) else None

    def store(self, block: Block, *, ttl: float | None = None) -> StoreResult:
        """Keep a raw block: in memory when this returns, in the tiers below as their rules say. The caller's
        arrays are copied. `ttl` as for `reserve`.
        """
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
        """The indices of the chain's full blocks of which no tier holds an object for this reader."""
        try:
            return [] if self._closed else self.finder.missing(Search.of(query))
        except Exception as error:
            self.ledger.failure("a lookup failed", error)
            return []

    def nearest(self, chain: Chain) -> Nearest | None:
        """The kept prompt of the chain's space that agrees longest with it, whatever model variant it was
        kept for.
        """
        try:
            return None if self._closed else nearest(chain, *self.finder.kept_path(chain.keys, chain.root))
        except Exception as error:
            self.ledger.failure("a search for the nearest prompt failed", error)
            return None

    def remove(self, which: Selection) -> Tally:
        """Remove what is selected from every tier that can be reached, with true counts of what went, and a
        word on what could not be reached. Nothing of it hits afterwards; writes on their way are called off.

        Raises ValueError for a tier that is not there.
        """
        return self.control.remove(which)

    def drop(self, keys: Iterable[bytes]) -> Tally:
        """Remove every object of these keys from every tier."""
        return self.control.remove(Selection(keys=tuple(keys)))

    def clear(self, *, tier: str | None = None, space: bytes | None = None) -> Tally:
        """Remove everything, or what one tier (by kind or name) or one space holds."""
        return self.control.remove(Selection(tier=tier, space=space))

    def pin(self, which: Selection) -> Tally:
        """Keep what is selected from being evicted, in every tier that holds it and as far as pins have room
        there; what is pinned now. Pins end with the process that keeps the cache.
        """
        return self.control.pin(which, True)

    def unpin(self, which: Selection) -> Tally:
        """Undo `pin`; what was pinned."""
        return self.control.pin(which, False)

    def warm(self, keys: Sequence[bytes]) -> Tally:
        """Bring kept blocks up into memory, in this order and as far as they fit beside each other; what is
        in memory now, by the tier that it came from.
        """
        return Tally() if self._closed else self.warmer.warm(keys)

    def own(self, space: bytes, tenant: str) -> None:
        """A space belongs to a tenant, by whose name quotas and times are set."""
        self.tiers[0].tenants.own(space, tenant)

    def flight(self, key: bytes, timeout: float) -> Flight:
        """Lead the computation of block `key`, or wait for the one who does, at most `timeout` seconds."""
        flight = self.flights.join(key, timeout)
        if not flight.leader:
            self.ledger.count("flights_joined")
        return flight

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until what was stored so far is written to the tiers below; False where it took too long."""
        deadline = time.monotonic() + timeout
        return self.joiner.flush(timeout) and self.demoter.flush(max(0.0, deadline - time.monotonic()))

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter, for engines."""
        self.ledger.count(name, n)

    def failure(self, reason: str, detail: object) -> None:
        """Count and log a failure, for engines."""
        self.ledger.failure(reason, detail)

    def stats(self) -> Stats:
        """Counters, failures by reason, and the tiers' state."""
        return Stats(
            counters=self.ledger.counters(),
            failures=self.ledger.failures(),
            tiers=self._tier_stats(),
            pending_writes=self.demoter.pending,
            temporary_bytes=self.arena.reserved_bytes + sum(tier.room.reserved for tier in self.tiers),
        )

    def close(self) -> None:
        """Write what is still to be written, then let the tiers go. Idempotent; afterwards every lookup
        misses.
        """
        if self._closed:
            return
        self.joiner.close()
        self.demoter.flush(60.0)
        self._closed = True
        self.finder.close()
        self.prefetcher.close()
        self.prober.close()
        self.demoter.close()
        self.reader.close()
        for tier in self.tiers:
            try:
                tier.store.close()
            except Exception as error:
                self.ledger.failure(f"the {tier.name} tier did not close cleanly", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reserve(self, header: BlockHeader, ttl: float | None) -> Reservation | StoreResult:
        if header.codec != "raw":
            raise ValueError(f"blocks are stored raw and encoded by their tiers, got codec {header.codec!r}")
        if self._closed:
            return self._refused("closed")
        try:
            if self.finder.present(header.name):
                self.ledger.count("present_blocks")
                return StoreResult(True, "present")
            layout = raw_layout(header)
            memory = self.tiers[0]
            if not memory.room.within_quota(layout.size, memory.tenants.whose(header)):
                return self._refused("over quota")
            buffer = self.arena.reserve(
                header.name, layout.size, WAIT_FOR_ROOM if self.demoter.pending else 0.0
            )
            if buffer is None:
                return self._refused("no room")
        except KeyError:
            return self._refused("busy")
        except (StoreError, ValueError, OSError) as error:
            self.ledger.failure("a block could not be placed in the arena", error)
            return self._refused("failed")
        tokens, arrays = layout.views(buffer)
        state = {"open": True}

        def abandon() -> None:
            if state.pop("open", False):
                self.arena.abandon(header.name)

        def commit() -> StoreResult:
            if not state.pop("open", False):
                return self._refused("failed")
            try:
                layout.write_header(buffer)
            except Exception as error:
                self.arena.abandon(header.name)
                self.ledger.failure("a block could not be committed", error)
                return self._refused("failed")
            return self.admit(header, layout.size, ttl)

        return Reservation(header, tokens, arrays, commit, abandon)

    def admit(self, header: BlockHeader, size: int, ttl: float | None = None) -> StoreResult:
        """Make the raw block in a filled place of the arena visible, and write it to the tiers below."""
        memory = self.tiers[0]
        whole = header.slice == Slice(0, len(header.layers))
        below = ttl is None and (not whole or bool(self.tiers[1:]))
        try:
            if not memory.room.within_quota(size, memory.tenants.whose(header)):
                self.arena.abandon(header.name)
                return self._refused("over quota")
            slot = self.arena.commit(header, header.name, size, leased=below, ttl=ttl)
        except Exception as error:
            self.arena.abandon(header.name)
            self.ledger.failure("a block could not be committed", error)
            return self._refused("failed")
        self.ledger.count("stored_blocks")
        self.ledger.count("stored_bytes", size)
        if below and not whole:
            self.joiner.add(header, slot)
        elif below:
            self.demoter.submit(header, slot, wait=True)
        return StoreResult(True, "stored")

    def _tier_stats(self) -> dict[str, TierStats]:
        unreachable = self.gaps.unreachable()
        return {
            tier.name: replace(tier.stats(), unreachable=unreachable.get(tier.name, (0, 0)))
            for tier in self.tiers
        }

    def _refused(self, reason: str) -> StoreResult:
        self.ledger.count("refused_blocks")
        return StoreResult(False, reason)

    def _find(self, query: Query) -> tuple[Part, ...]:
        found = self.finder.find(Search.of(query))
        last = continuation(query, found)
        return found.parts if last is None else (*found.parts, last)

    def _plan(self, query: Query, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        blocks = [
            (
                part.first,
                part.tokens,
                [(self.tiers[source.tier].name, source.size) for source in part.sources],
            )
            for part in parts
        ]
        count = self.planner.best_prefix(query.spec, blocks, int(query.chain.tokens.size))
        self.prober.probe(parts[count:])
        return parts[:count]

    def _by_tier(self, parts: Sequence[Part]) -> dict[str, int]:
        """Tokens by the kind of tier they come from: the lowest, where a block comes from several."""
        tokens: dict[str, int] = {}
        for part in parts:
            kind = self.tiers[max(source.tier for source in part.sources)].kind
            tokens[kind] = tokens.get(kind, 0) + part.tokens
        return tokens

    def _cancel(self, tiers: Sequence[Tier], which: Callable[[BlockHeader], bool]) -> None:
        self.joiner.cancel(which)
        self.demoter.cancel(tiers, which)

    def _lease(self, release: Callable[[], None], seconds: float) -> Lease:
        def end() -> None:
            with self._lease_lock:
                self._leases.discard(lease)
            release()

        lease = Lease(end, time.monotonic() + seconds)
        with self._lease_lock:
            self._leases.add(lease)
        return lease

    def _expire_leases(self) -> bool:
        """End the leases of hits that were not loaded in time; whether there were any."""
        now = time.monotonic()
        with self._lease_lock:
            late = [lease for lease in self._leases if lease.deadline is not None and lease.deadline < now]
        for lease in late:
            lease.release()
        return bool(late)
