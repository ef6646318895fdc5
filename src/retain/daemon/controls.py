"""The daemon's controls: what is asked of it beside lookups, loads and stores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from retain.cache import Cache, Prefix, Selection, Tally
from retain.cache.find import Search
from retain.identity import KEY_BYTES
from retain.model import Slice

from . import messages

if TYPE_CHECKING:
    from .desk import Session

LONGEST_WAIT = 600.0
"""No request may wait longer than this, in seconds, whatever it asks for."""


class Controls:
    """Answers requests; `sessions` tells how many clients there are. Safe from several threads."""

    def __init__(self, cache: Cache, sessions: Callable[[], int]) -> None:
        self.cache = cache
        self._sessions = sessions
        self._started = time.monotonic()

    def on_missing(self, session: Session, request: messages.Missing) -> messages.Reply:
        spec = session.models[request.model]
        keys = split_keys(request.keys)
        search = Search(keys, b"", 1, spec, Slice.parse(request.slice), request.fidelity, len(keys))
        return messages.Indices(self.cache.finder.missing(search))

    def on_nearest(self, session: Session, request: messages.Nearest) -> messages.Reply:
        depth, continuations = self.cache.finder.kept_path(split_keys(request.keys), request.root)
        return messages.Continuations(depth, [tokens.astype("<u4").tobytes() for tokens in continuations])

    def on_remove(self, session: Session, request: messages.Remove) -> messages.Reply:
        return tallied(self.cache.remove(selection_from(request.which)))

    def on_pin(self, session: Session, request: messages.Pin) -> messages.Reply:
        which = selection_from(request.which)
        return tallied(self.cache.pin(which) if request.pinned else self.cache.unpin(which))

    def on_warm(self, session: Session, request: messages.Warm) -> messages.Reply:
        return tallied(self.cache.warm(split_keys(request.keys)))

    def on_own(self, session: Session, request: messages.Own) -> None:
        self.cache.own(request.space, request.tenant[:64])

    def on_flush(self, session: Session, request: messages.Flush) -> messages.Reply:
        return messages.Done(int(self.cache.flush(min(max(request.timeout, 0.0), LONGEST_WAIT))))

    def on_stats(self, session: Session, request: messages.Stats) -> messages.Reply:
        return self.state()

    def on_count(self, session: Session, request: messages.Count) -> None:
        self.cache.count(request.name[:60], request.n)

    def on_failure(self, session: Session, request: messages.Failure) -> None:
        self.cache.failure(request.reason[:200], request.detail[:1000])

    def state(self) -> messages.State:
        """What `retain status` shows."""
        stats = self.cache.stats()
        tiers = [
            (name, t.kind, t.objects, t.bytes, t.capacity, t.leased, t.pinned, t.codec)
            for name, t in stats.tiers.items()
        ]
        return messages.State(
            dict(stats.counters),
            dict(stats.failures),
            tiers,
            stats.pending_writes,
            os.getpid(),
            time.monotonic() - self._started,
            self._sessions(),
            {name: t.health.text for name, t in stats.tiers.items() if t.health is not None},
            stats.temporary_bytes,
            {
                name: messages.RoomWire(t.pinned_bytes, *t.unreachable, dict(t.tenants))
                for name, t in stats.tiers.items()
            },
        )


def split_keys(keys: bytes) -> tuple[bytes, ...]:
    """A concatenation of keys, apart. Raises ValueError."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no list of keys")
    return tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def selection_from(told: messages.SelectionWire) -> Selection:
    """A Selection from its wire form. Raises ValueError."""
    prefix = None
    if told.prefix is not None:
        prefix = Prefix(split_keys(told.prefix.keys), told.prefix.root, told.prefix.rest, told.prefix.beyond)
        if len(prefix.rest) % 4:
            raise ValueError(f"{len(prefix.rest)} bytes are no list of token ids")
    keys = None if told.keys is None else split_keys(told.keys)
    return Selection(
        keys, prefix, told.space, told.kin, told.variant, told.tenant, told.older_than, told.tier
    )


def selection_wire(which: Selection) -> messages.SelectionWire:
    """The wire form of a Selection."""
    prefix = None
    if which.prefix is not None:
        told = which.prefix
        prefix = messages.PrefixWire(b"".join(told.keys), told.root, told.rest, told.beyond)
    keys = None if which.keys is None else b"".join(which.keys)
    return messages.SelectionWire(
        keys, prefix, which.space, which.kin, which.variant, which.tenant, which.older_than, which.tier
    )


def tallied(tally: Tally) -> messages.Tallied:
    """The wire form of a Tally."""
    return messages.Tallied(tally.blocks, tally.objects, tally.bytes, dict(tally.tiers), list(tally.missed))
