"""What an origin serves: the objects of a store, or those of a daemon's tiers."""

from __future__ import annotations

import heapq
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from retain.block import verify_object
from retain.cache import Cache
from retain.cache.tier import Tier
from retain.errors import InvalidObject, StoreFull, StoreUnavailable
from retain.header import CHECKSUM_AT, has_opening
from retain.stores.base import Store, StoredObject
from retain.stores.disk import DiskStore

_PIECE = 1 << 20
_SEND_SECONDS = 60.0

Send = Callable[[socket.socket, int, int], None]


@dataclass(frozen=True)
class Opened:
    """One version of an object: its size, what stands for its content, and how its bytes `first` to `stop`
    are sent.
    """

    size: int
    etag: str
    send: Send


class Holdings(Protocol):
    """Objects as an origin needs them. Safe from several threads; calls raise StoreError."""

    def opened(self, name: str) -> AbstractContextManager[Opened | None]:
        """The object, which stays as it is meanwhile; None if there is none."""

    def sizes(self, names: Sequence[str]) -> list[int | None]: ...

    def listed(self, after: str, most: int) -> list[StoredObject]:
        """The first `most` objects whose names come after `after`, in the order of their names."""

    def put(self, name: str, size: int, fill: Callable[[memoryview], None]) -> None:
        """Keep an object whose bytes `fill` gives. Raises StoreFull, InvalidObject."""

    def delete(self, name: str) -> bool: ...


class StoreHoldings:
    """The objects of one store, whatever they are."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @contextmanager
    def opened(self, name: str) -> Iterator[Opened | None]:
        if isinstance(self._store, DiskStore):
            with opened_file(self._store, name) as found:
                yield found
            return
        size = self._store.size(name)
        if size is None:
            yield None
            return
        data = memoryview(bytearray(size))
        got = self._store.read_into(name, data)
        yield of_memory(data[:got])

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [self._store.size(name) for name in names]

    def listed(self, after: str, most: int) -> list[StoredObject]:
        later = (each for each in self._store.scan() if each.name > after)
        return heapq.nsmallest(most, later, key=lambda each: each.name)

    def put(self, name: str, size: int, fill: Callable[[memoryview], None]) -> None:
        data = memoryview(bytearray(size))
        fill(data)
        self._store.write(name, [data])

    def delete(self, name: str) -> bool:
        return self._store.delete(name)


class CacheHoldings:
    """The blocks in a cache's own tiers, those that it shares with others left out.

    What is uploaded is verified, and kept as if it had been computed here: raw blocks in memory and below,
    others in the first disk tier, within its capacity.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._tiers = tuple(tier for tier in cache.tiers if tier.shared is None)

    @contextmanager
    def opened(self, name: str) -> Iterator[Opened | None]:
        for tier in self._tiers:
            slot = self._found(tier, name)
            if slot is None:
                continue
            with tier.lock:
                if not tier.live(slot):
                    continue
                tier.hold(slot)
            try:
                if tier is self._cache.tiers[0]:
                    view = self._cache.arena.view(slot)
                    if view is not None:
                        yield of_memory(view)
                        return
                else:
                    with StoreHoldings(tier.store).opened(name) as found:
                        if found is not None:
                            yield found
                            return
            finally:
                tier.release([slot])
        yield None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [self._size(name) for name in names]

    def listed(self, after: str, most: int) -> list[StoredObject]:
        names = {name for tier in self._tiers for name in tier.names() if name > after}
        sizes = ((name, self._size(name)) for name in heapq.nsmallest(most, names))
        return [StoredObject(name, size, 0.0) for name, size in sizes if size is not None]

    def put(self, name: str, size: int, fill: Callable[[memoryview], None]) -> None:
        if self._size(name) is not None:
            fill(memoryview(bytearray(size)))
        elif name.split(".")[3:4] == ["raw"]:
            self._put_raw(name, size, fill)
        else:
            self._put_below(name, size, fill)

    def delete(self, name: str) -> bool:
        sizes = [tier.remove(slot) for tier in self._tiers if (slot := self._found(tier, name)) is not None]
        return any(sizes)

    def _put_raw(self, name: str, size: int, fill: Callable[[memoryview], None]) -> None:
        arena = self._cache.arena
        try:
            place = arena.reserve(name, size, 0.0)
        except KeyError as error:
            raise StoreUnavailable("the same object is on its way already") from error
        if place is None:
            raise StoreFull(f"no room in memory for {size} bytes")
        try:
            fill(place)
            header = verify_object(place)[0].header
            if header.name != name:
                raise InvalidObject(f"under {name} comes another object, {header.name}")
        except BaseException:
            arena.abandon(name)
            raise
        if not self._cache.admit(header, size).kept:
            raise StoreUnavailable("the object could not be kept")

    def _put_below(self, name: str, size: int, fill: Callable[[memoryview], None]) -> None:
        tier = next(iter(self._tiers[1:]), None)
        if tier is None:
            raise StoreFull("encoded objects are kept on disk, and there is no disk tier")
        data = memoryview(bytearray(size))
        fill(data)
        header = verify_object(data)[0].header
        if header.name != name:
            raise InvalidObject(f"under {name} comes another object, {header.name}")
        tenant = tier.tenants.whose(header)
        if not tier.room.make(size, tenant):
            raise StoreFull(f"no room for {size} bytes in the {tier.name} tier")
        try:
            tier.store.write(name, [data])
        finally:
            tier.room.give_back(size, tenant)
        with tier.lock:
            if tier.find(name) is None:
                tier.insert(header, name, size)

    def _size(self, name: str) -> int | None:
        for tier in self._tiers:
            with tier.lock:
                slot = self._found(tier, name)
                if slot is not None:
                    return tier.index.record(slot).size
        return None

    @staticmethod
    def _found(tier: Tier, name: str) -> int | None:
        try:
            return tier.find(name)
        except ValueError:  # the name of no block
            return None


@contextmanager
def opened_file(store: DiskStore, name: str) -> Iterator[Opened | None]:
    """An object on disk: the open file is one version, whatever is renamed over it."""
    with ExitStack() as opened:
        file = opened.enter_context(store.opened(name))
        if file is None:
            yield None
            return
        status = os.fstat(file)
        head = os.pread(file, CHECKSUM_AT + 16, 0)
        etag = etag_of(head) or f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"
        yield Opened(status.st_size, etag, lambda sock, first, stop: send_file(sock, file, first, stop))


def of_memory(data: memoryview) -> Opened:
    """An object that lies in memory."""
    etag = etag_of(bytes(data[: CHECKSUM_AT + 16])) or xxhash.xxh3_64_hexdigest(data)
    return Opened(len(data), etag, lambda sock, first, stop: sock.sendall(data[first:stop]))


def etag_of(head: bytes) -> str | None:
    """The checksum in a block's header, which covers those of all its tensors; None for what is no block."""
    return head[CHECKSUM_AT : CHECKSUM_AT + 16].decode("ascii", "replace") if has_opening(head) else None


def send_file(sock: socket.socket, file: int, first: int, stop: int) -> None:
    """Send bytes `first` to `stop` of an open file."""
    if isinstance(sock, ssl.SSLSocket):
        while first < stop:
            piece = os.pread(file, min(_PIECE, stop - first), first)
            if not piece:
                raise OSError("the file ends early")
            sock.sendall(piece)
            first += len(piece)
        return
    while first < stop:
        try:
            sent = os.sendfile(sock.fileno(), file, first, stop - first)
        except BlockingIOError as error:
            if not select.select([], [sock], [], _SEND_SECONDS)[1]:
                raise TimeoutError("the client reads nothing") from error
            continue
        if not sent:
            raise OSError("the file ends early")
        first += sent
