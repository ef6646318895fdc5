"""The memory store: objects in one shared-memory arena, read in place.

The arena is a memfd, so that other processes can map it. Its address space is several times its capacity and
mostly empty: an object goes wherever a gap fits it, memory that lies idle elsewhere goes back to the system
for it, and so objects fit up to the capacity whatever their sizes were before, without moving any
(native/arena.hpp).
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from retain import _native
from retain.errors import StoreFull, StoreUnavailable
from retain.stores.base import Buffer, StoredObject, as_bytes, check_name, check_offset

log = logging.getLogger(__name__)

SPAN = 8
"""The arena's address space over its capacity; it costs nothing. 100,000 objects of 4 KiB to 32 MiB at random
reached 3.5 times the capacity, objects of one model's blocks and tails twice."""

READY = 256 << 20
"""Bytes of free memory that are kept ready: a prompt of 4,096 tokens of a small model in float32. A page's
first touch took 3 to 12 microseconds on virtual machines, fifty times what writing it takes afterwards."""

_PAGE = 4096
_STEP = 2 << 20  # touched at once: some milliseconds


@dataclass(eq=False)
class _Object:
    offset: int
    size: int
    created: float
    readers: int = 0
    gone: bool = False


class MemoryStore:
    """At most `capacity` bytes of objects (each in whole pages of 4096 bytes) in memory that `fd` shares.

    As long as the arena grows, a thread takes `ready` bytes from the system ahead of who will write there;
    it runs only when less than half of them are left. Raises StoreUnavailable where the system gives no such
    address space.
    """

    kind = "memory"

    def __init__(self, capacity: int, ready: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"a memory store's capacity cannot be negative, got {capacity}")
        self.capacity = capacity // _PAGE * _PAGE
        self.fd, self._map, self.span = _reserve(self.capacity)
        self._memory = memoryview(self._map)
        self._arena = _native.Arena(self.capacity, self.span)
        self._objects: dict[str, _Object] = {}
        self._reserved: dict[str, _Object] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._ready = min(ready, self.capacity) // _PAGE * _PAGE
        self._touched = threading.Condition(self._lock)
        self._touching = 0
        self._filler: threading.Thread | None = None
        with self._lock:
            self._keep_ready()

    @property
    def used(self) -> int:
        """Bytes taken by objects and reservations, in whole pages."""
        with self._lock:
            return self._arena.used - self._touching

    @property
    def reserved_bytes(self) -> int:
        """Bytes of reservations that are neither committed nor abandoned."""
        with self._lock:
            return sum(place.size for place in self._reserved.values())

    def reserve(self, name: str, size: int) -> memoryview:
        """A writable place of `size` bytes: `commit` makes it the object `name`, `abandon` gives it back.

        Nobody may write to it after either. Raises StoreFull when there is no room, ValueError when `name` is
        reserved already.
        """
        check_name(name)
        with self._lock:
            self._check_open()
            if name in self._reserved:
                raise ValueError(f"the object {name} is reserved already")
            place = self._take(size)
            self._reserved[name] = place
            return self._memory[place.offset : place.offset + size]

    def commit(self, name: str) -> None:
        """Make a reserved place the object `name`, replacing what was there. Raises KeyError if none is
        reserved."""
        with self._lock:
            self._check_open()
            self._keep(name, self._reserved.pop(name))

    def abandon(self, name: str) -> None:
        """Give a reserved place back. Raises KeyError if none is reserved."""
        with self._lock:
            self._check_open()
            self._give(self._reserved.pop(name))

    def view(self, name: str) -> memoryview | None:
        """Object `name` in place, read-only; None if there is no such object.

        They are the object's bytes until it is deleted or replaced: who holds a view sees to it that it is
        not.
        """
        with self._lock:
            self._check_open()
            held = self._objects.get(name)
            return None if held is None else self._bytes(held).toreadonly()

    def place(self, name: str) -> tuple[int, int] | None:
        """Where object or reservation `name` lies in the arena: (offset, size) in bytes, or None."""
        with self._lock:
            held = self._objects.get(name) or self._reserved.get(name)
            return None if held is None else (held.offset, held.size)

    def reserved(self, name: str) -> memoryview | None:
        """The place reserved for `name`, read-only; None if there is none."""
        with self._lock:
            held = self._reserved.get(name)
            return None if held is None else self._bytes(held).toreadonly()

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        check_name(name)
        parts = [as_bytes(chunk) for chunk in chunks]
        with self._lock:
            self._check_open()
            place = self._take(sum(len(part) for part in parts))
            target = self._bytes(place)
        try:
            at = 0
            for part in parts:
                _native.copy(target[at : at + len(part)], part)
                at += len(part)
        except BaseException:
            with self._lock:
                self._give(place)
            raise
        with self._lock:
            if self._closed:
                self._give(place)
            self._check_open()
            self._keep(name, place)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        check_name(name)
        check_offset(offset)
        target = as_bytes(buffer)
        with self._lock:
            self._check_open()
            held = self._objects.get(name)
            if held is None or offset >= held.size or not len(target):
                return 0
            held.readers += 1
            source = self._bytes(held)[offset : offset + len(target)]
        try:
            _native.copy(target[: len(source)], source)
            return len(source)
        finally:
            with self._lock:
                held.readers -= 1
                if held.gone and not held.readers:
                    self._give(held)

    def size(self, name: str) -> int | None:
        check_name(name)
        with self._lock:
            self._check_open()
            held = self._objects.get(name)
            return None if held is None else held.size

    def delete(self, name: str) -> bool:
        check_name(name)
        with self._lock:
            self._check_open()
            held = self._objects.pop(name, None)
            if held is None:
                return False
            self._retire(held)
            return True

    def scan(self) -> Iterator[StoredObject]:
        with self._lock:
            self._check_open()
            found = [StoredObject(name, held.size, held.created) for name, held in self._objects.items()]
        return iter(found)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._objects.clear()
            self._reserved.clear()
            self._memory.release()
            with suppress(BufferError):  # where somebody holds a view, the memory goes with the last one
                self._map.close()
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the memory store is closed")
        if os.getpid() != self._owner:
            # The arena's memory is shared with the parent, its allocator is not.
            raise StoreUnavailable("a forked process cannot use its parent's memory store; open another")

    def _bytes(self, held: _Object) -> memoryview:
        return self._memory[held.offset : held.offset + held.size]

    def _take(self, size: int) -> _Object:
        if size < 0:
            raise ValueError(f"an object's size cannot be negative, got {size}")
        if size == 0:
            return _Object(0, 0, time.time())
        while (taken := self._arena.take(size)) is None:
            if not self._touching:
                raise StoreFull(
                    f"no room for {size} bytes in memory: {self._arena.used} of {self.capacity} are taken"
                )
            self._touched.wait()
            self._check_open()
        self._keep_ready()
        offset, idle = taken
        for start, length in idle:
            with suppress(OSError):  # the system then leaves the memory where it is; nothing is lost but that
                self._map.madvise(mmap.MADV_REMOVE, start, length)
        return _Object(offset, size, time.time())

    def _keep_ready(self) -> None:
        """Have memory touched in the background where little of it is left and the arena may still grow."""
        left, may_grow = self._arena.idle, self._arena.used + self._arena.idle + _STEP <= self.capacity
        if self._filler is None and left < self._ready // 2 and may_grow:
            self._filler = threading.Thread(target=self._fill, name="retain-memory-ready", daemon=True)
            try:
                self._filler.start()
            except RuntimeError:  # the process may have no more threads, or ends: then who writes waits
                self._filler = None

    def _fill(self) -> None:
        while True:
            with self._lock:
                if self._closed or self._arena.idle >= self._ready:
                    self._filler = None
                    return
                offset = self._arena.fresh(_STEP)
                if offset is None:  # it has grown as far as it can
                    self._filler, self._ready = None, 0
                    return
                self._touching = _STEP
                place = self._memory[offset : offset + _STEP]
            _native.populate(place)
            place.release()
            with self._lock:
                self._arena.give(offset)
                self._touching = 0
                self._touched.notify_all()

    def _keep(self, name: str, place: _Object) -> None:
        replaced = self._objects.get(name)
        self._objects[name] = place
        if replaced is not None:
            self._retire(replaced)

    def _retire(self, held: _Object) -> None:
        held.gone = True
        if not held.readers:
            self._give(held)

    def _give(self, held: _Object) -> None:
        if held.size:
            self._arena.give(held.offset)


def _reserve(capacity: int) -> tuple[int | None, mmap.mmap, int]:
    """Address space for an arena: (fd or None, map, span).

    The span is no more than the capacity where memory cannot be given back to the system.
    """
    capacity = max(capacity, _PAGE)
    for span in (SPAN * capacity, capacity):
        fd = os.memfd_create("retain", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None
        try:
            if fd is None:
                area = mmap.mmap(-1, span)
            else:
                os.ftruncate(fd, span)
                area = mmap.mmap(fd, span)
            if span > capacity:
                area.madvise(mmap.MADV_REMOVE, 0, _PAGE)
            return fd, area, span
        except (AttributeError, OSError, ValueError, OverflowError) as error:
            if fd is not None:
                os.close(fd)
            if span == capacity:
                raise StoreUnavailable(f"the system gives no arena of {capacity} bytes: {error}") from error
            log.info("memory arena without spare address space: %s", error)
    raise AssertionError("unreachable")
