"""Encryption for any store: objects go in sealed (retain.stores.sealed) and come out as they were.

What a reader without the keys learns: names, sizes, times, and the digests in the readable head. A copy under
another name, a tensor of another object, or a changed byte is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from retain.errors import ConfigError, ForeignObject, InvalidObject, StoreUnavailable
from retain.stores.base import (
    Buffer,
    DeletesMany,
    Health,
    Shared,
    Store,
    StoredObject,
    as_bytes,
    check_name,
    check_offset,
)
from retain.stores.sealed import (
    SEGMENT,
    TAG,
    Keys,
    Opener,
    SealedHead,
    UnknownKey,
    parse_sealed,
    plain_size,
    seal,
    sealed_size,
)

KEY_BYTES = 32
HEAD_BYTES = 16 << 10
"""How much is read to learn an object's head, where not all of it is read."""

TRIES = 20
"""How often a part is read anew because the object was replaced between two reads of it."""


def encrypted(store: Store, keys: Keys) -> Store:
    """A store whose objects lie encrypted in `store`; shared with other hosts if that is."""
    return EncryptedShared(store, keys) if isinstance(store, Shared) else EncryptedStore(store, keys)


def read_keys(text: str) -> Keys:
    """Master keys, one a line, the newest first: 64 hex digits or base64 of 32 bytes. `#` begins a comment.

    Raises ConfigError, which names the line and nothing of its content.
    """
    keys = []
    for number, line in enumerate(re.split(r"[\n,]", text), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        key = b""
        with suppress(ValueError, binascii.Error):
            key = bytes.fromhex(word) if len(word) == 2 * KEY_BYTES else base64.b64decode(word, validate=True)
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"line {number} of the keys is no key: write 32 random bytes as 64 hex digits or as base64, "
                "as `openssl rand -hex 32` gives them"
            )
        keys.append(key)
    if not keys:
        raise ConfigError("there is no key to encrypt with; `openssl rand -hex 32` gives one")
    return Keys.of(keys)


class EncryptedStore:
    """Encrypts on the way in, verifies and decrypts on the way out. Keeps its store's kind.

    An object that is not sealed, or with a key that is not at hand, raises StoreUnavailable, and is left
    alone. One that was tampered with raises InvalidObject.
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._scrap = threading.local()

    @property
    def kind(self) -> str:
        return self._store.kind

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        check_name(name)
        parts = [as_bytes(chunk) for chunk in chunks]
        plain = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        self._store.write(name, [seal(name, plain, self._keys)])

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        check_name(name)
        check_offset(offset)
        target = as_bytes(buffer)
        for attempt in range(TRIES):
            try:
                return self._read(name, target, offset, whole=attempt > TRIES // 2)
            except (UnknownKey, ForeignObject) as error:
                raise StoreUnavailable(f"{name}: {error}") from error
            except _Replaced:
                continue
        raise StoreUnavailable(f"the object {name} is replaced faster than it can be read")

    def size(self, name: str) -> int | None:
        size = self._store.size(name)
        return None if size is None else plain_size(size)

    def delete(self, name: str) -> bool:
        return self._store.delete(name)

    def scan(self) -> Iterator[StoredObject]:
        for each in self._store.scan():
            size = plain_size(each.size)
            if size is not None:
                yield StoredObject(each.name, size, each.modified)

    def close(self) -> None:
        self._store.close()

    def _read(self, name: str, target: memoryview, offset: int, *, whole: bool) -> int:
        # From the start, one read gives the head and all that is wanted; else two are needed, of one version.
        near = offset <= SEGMENT or whole
        guess = HEAD_BYTES + SEGMENT + (sealed_size(offset + len(target)) if near and len(target) else 0)
        data = self._read_raw(name, guess, 0)
        if not len(data):
            return 0
        head = self._head(name, data)
        end = min(offset + len(target), head.plain_size)
        if offset >= end:
            return 0
        opener = Opener(name, head, self._keys)
        span = _span(head, offset, end)
        base = 0
        if span[1] > len(data):
            tagged = head.salt
            base, data = span[0], self._read_raw(name, span[1] - span[0], span[0])
            if len(data) < span[1] - span[0]:
                raise self._whether_replaced(name, tagged, "the object ends early")
        try:
            _open_span(opener, head, data, base, target, offset, end)
        except InvalidObject as error:
            if base:
                raise self._whether_replaced(name, head.salt, str(error)) from error
            raise
        return end - offset

    def _whether_replaced(self, name: str, salt: bytes, reason: str) -> Exception:
        data = self._read_raw(name, HEAD_BYTES, 0)
        if not len(data) or self._head(name, data).salt != salt:
            return _Replaced()
        return InvalidObject(f"{name}: {reason}")

    def _head(self, name: str, data: memoryview) -> SealedHead:
        try:
            return parse_sealed(data)
        except IndexError as error:
            longer = self._read_raw(name, error.args[0], 0)
            try:
                return parse_sealed(longer)
            except IndexError:
                raise InvalidObject(f"{name} ends inside its header") from None

    def _read_raw(self, name: str, size: int, offset: int) -> memoryview:
        """Bytes of the sealed object, valid until this thread's next call."""
        scrap: bytearray | None = getattr(self._scrap, "data", None)
        if scrap is None or len(scrap) < size:
            scrap = self._scrap.data = bytearray(size)
        view = memoryview(scrap)[:size]
        return view[: self._store.read_into(name, view, offset)]


class EncryptedShared(EncryptedStore):
    """The same over a store that other hosts share."""

    _store: Shared

    @property
    def writable(self) -> bool:
        return self._store.writable

    @property
    def lists(self) -> bool:
        return self._store.lists

    @property
    def wait(self) -> float:
        return self._store.wait

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        found = self._store.sizes(names)
        return [(None if size is None else plain_size(size)) or None for size in found]

    def delete_many(self, names: Sequence[str]) -> list[bool]:
        if isinstance(self._store, DeletesMany):
            return self._store.delete_many(names)
        return [self._store.delete(name) for name in names]

    def health(self) -> Health:
        return self._store.health()


class _Replaced(Exception):
    """The object was replaced between two reads of it."""


def _span(head: SealedHead, start: int, end: int) -> tuple[int, int]:
    """Where in the file the segments lie that hold bytes `start` to `end` of the object."""
    first = last = None
    for part in head.parts:
        low, high = max(start, part.plain_start), min(end, part.plain_start + part.size)
        if low >= high:
            continue
        one, two = (low - part.plain_start) // SEGMENT, (high - 1 - part.plain_start) // SEGMENT
        if first is None:
            first = part.start + one * (SEGMENT + TAG)
        last = part.start + min(part.sealed_size, (two + 1) * (SEGMENT + TAG))
    return first or 0, last or 0


def _open_span(
    opener: Opener, head: SealedHead, data: memoryview, base: int, target: memoryview, start: int, end: int
) -> None:
    """Open bytes `start` to `end` of the object into `target`; `data` begins at byte `base` of the file."""
    for part in head.parts:
        low, high = max(start, part.plain_start), min(end, part.plain_start + part.size)
        if low >= high:
            continue
        for index in range((low - part.plain_start) // SEGMENT, (high - 1 - part.plain_start) // SEGMENT + 1):
            plain = part.plain_start + index * SEGMENT
            size = min(SEGMENT, part.size - index * SEGMENT)
            at = part.start + index * (SEGMENT + TAG) - base
            sealed = data[at : at + size + TAG]
            if len(sealed) < size + TAG:
                raise InvalidObject("the object ends early")
            if low <= plain and plain + size <= high:
                opener.open(part, index, sealed, target[plain - start : plain - start + size])
            else:
                scrap = memoryview(bytearray(size))
                opener.open(part, index, sealed, scrap)
                one, two = max(low, plain), min(high, plain + size)
                target[one - start : two - start] = scrap[one - plain : two - plain]
