"""The Store contract: where objects lie. A store holds immutable bytes under a name and knows nothing about
KV.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,249}")


@dataclass(frozen=True)
class StoredObject:
    """What a scan tells of an object: its name, size in bytes and time of last change (seconds since the
    epoch).
    """

    name: str
    size: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """A place for objects. Implementations must be safe to call from several threads.

    Names are 1 to 250 characters of [A-Za-z0-9._-] and begin with a letter or digit; others raise ValueError.
    Run `retain.testing.store` against an implementation to see that it keeps this contract.
    """

    @property
    def kind(self) -> str:
        """A short word for metrics and logs: memory, disk, ..."""

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        """Keep the concatenation of `chunks` under `name`, replacing what was there, all or nothing.

        A reader sees the old bytes or the new ones, never a mixture or a part. Raises StoreFull when there is
        no room, StoreUnavailable when the medium fails; in both cases no part of the object remains.
        """

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Fill `buffer` from byte `offset` of object `name`; return the bytes written, 0 if there is no such
        object.

        Fewer bytes than the buffer holds means that the object ends there. Raises StoreUnavailable when the
        store cannot answer within its deadline. Whether they are the right bytes is for the block header to
        say.
        """

    def size(self, name: str) -> int | None:
        """The size of object `name` in bytes, None if there is no such object."""

    def delete(self, name: str) -> bool:
        """Remove object `name`; True if it was there."""

    def scan(self) -> Iterator[StoredObject]:
        """Every whole object, in any order. Objects that come or go meanwhile may or may not be seen."""

    def close(self) -> None:
        """Let go of what the store holds open. Idempotent; calls after it raise StoreUnavailable."""


def check_name(name: str) -> str:
    """Return `name` if it is a valid object name, else raise ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"not an object name: {name!r}")
    return name


def check_offset(offset: int) -> int:
    """Return `offset` if it is a place in an object, else raise ValueError."""
    if offset < 0:
        raise ValueError(f"an offset cannot be negative, got {offset}")
    return offset


def as_bytes(buffer: Buffer) -> memoryview:
    """`buffer` as a flat view of its bytes. Raises TypeError for memory that is not contiguous."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")
