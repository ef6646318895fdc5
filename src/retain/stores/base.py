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


@dataclass(frozen=True)
class Health:
    """The state of a remote store: `unknown` (not asked yet), `up` or `down`, why, and since when (seconds
    since the epoch); seconds to the first byte of an answer and bytes a second as last estimated.
    """

    state: str
    reason: str
    since: float
    latency: float | None
    bandwidth: float | None
    calls: int

    @property
    def text(self) -> str:
        """The state and its reason as one text."""
        return f"{self.state}: {self.reason}" if self.reason else self.state


@runtime_checkable
class Shared(Store, Protocol):
    """A store that other hosts write to and remove from as well, so that no index of it here is complete.

    Its server decides what is evicted. Every call has a deadline, and fails at once while the server is down.
    """

    @property
    def writable(self) -> bool:
        """Whether objects may be written and deleted here."""

    @property
    def lists(self) -> bool:
        """Whether its objects are worth listing when it is opened, for asking for single ones is dear."""

    @property
    def wait(self) -> float:
        """How many seconds an answer is waited for, by what is known of the way to the server."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """The size of each object, None where there is none or an empty one, all asked in one round trip."""

    def health(self) -> Health:
        """The state of the server, and of the way to it."""


@runtime_checkable
class DeletesMany(Protocol):
    """A store that can remove many objects in few round trips."""

    def delete_many(self, names: Sequence[str]) -> list[bool]:
        """Remove objects; for each whether it was there, as far as the server tells. Raises StoreUnavailable;
        some may be gone then.
        """


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
