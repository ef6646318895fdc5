"""The sealed form of an object: AES-256-GCM over each of its tensors, a safetensors file (docs/format.md).

    data key    HKDF-SHA256(master key, info = H("retain/data key", space or none)): one a tenant
    object key  HKDF-SHA256(data key, salt = 32 bytes of the object's own, info = "retain/object key")
    head key    the same with info = "retain/head key/" and the codec's word: a lower level cut from an object
                has a head of its own, and the same tensors
    nonce       number of the tensor (u32) . number of the segment (u64): used once, for the object key is new
    associated  H("retain/sealed", identity, tensor's name, its size, segment's number)

A tensor is cut into segments of 64 KiB, each with a tag of 16 bytes, so that the head of an object can be
read and verified without the rest. The sealed size follows from the plain size alone, so a listing tells it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from retain.errors import ForeignObject, InvalidObject, MissingDependency
from retain.header import FORMAT, Frame, parse_frame
from retain.identity import digest

SEGMENT = 64 << 10
TAG = 16
SALT = 32
LEAST_OVERHEAD = 4096
MOST_HEADER = 16 << 20
ALGORITHM = "aes-256-gcm"

_OPENING = b'{"__metadata__":{"checksum":"'
_IDENTITY = ("key", "parent", "space", "kin", "variant", "adapter", "first", "count", "slice", "lineage")
"""The fields that hold for every level of an object, and so are bound to each of its tensors."""


class UnknownKey(ForeignObject):
    """The object was sealed with a key that is not among those at hand."""


@dataclass(frozen=True)
class Keys:
    """Master keys of 32 bytes by their ids; the newest seals, all of them open."""

    newest: str
    by_id: Mapping[str, bytes]

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Keys:
        """Keys in the order of their age, the newest first."""
        by_id = {key_id(key): key for key in keys}
        return cls(key_id(keys[0]), by_id)

    def __repr__(self) -> str:
        return f"Keys({', '.join(self.by_id)})"


def key_id(key: bytes) -> str:
    """What an object says of the key that sealed it: a digest, of which nobody learns the key."""
    return digest("retain/key id", key)[:8].hex()


@dataclass(frozen=True)
class Part:
    """One tensor of a sealed object: where its ciphertext begins in the file, its plaintext in the object."""

    name: str
    start: int
    plain_start: int
    size: int
    number: int

    @property
    def sealed_size(self) -> int:
        return self.size + TAG * segments(self.size)


@dataclass(frozen=True)
class SealedHead:
    """The readable head of a sealed object."""

    fields: Mapping[str, str]
    salt: bytes
    parts: tuple[Part, ...]
    data_start: int

    @property
    def plain_size(self) -> int:
        return sum(part.size for part in self.parts)


def segments(size: int) -> int:
    """Segments of a tensor: an empty one has one as well, so that its emptiness is certain."""
    return max(1, -(-size // SEGMENT))


def sealed_size(plain: int) -> int:
    """The size of the sealed form of an object of `plain` bytes."""
    return plain + LEAST_OVERHEAD + TAG * (plain // SEGMENT) + plain // 256 // 64 * 64


def plain_size(sealed: int) -> int | None:
    """The size of the object whose sealed form has `sealed` bytes; None where there is none."""
    low, high = 0, max(0, sealed - LEAST_OVERHEAD)
    while low < high:
        middle = (low + high) // 2
        if sealed_size(middle) < sealed:
            low = middle + 1
        else:
            high = middle
    return low if sealed_size(low) == sealed else None


def seal(name: str, data: memoryview, keys: Keys) -> bytearray:
    """The sealed form of an object. What is no block is sealed whole, under its name alone."""
    try:
        frame: Frame | None = parse_frame(data)
    except InvalidObject:
        frame = None
    if frame is not None and (frame.size != len(data) or frame.header.name != name):
        frame = None
    for cut in (frame, None):
        parts = _cut(cut, len(data))
        fields = _fields(cut, name)
        salt = os.urandom(SALT)
        told = {"cipher": ALGORITHM, "sealed_by": keys.newest, "salt": salt.hex()}
        head = _render({**fields, **told}, parts, sealed_size(len(data)))
        if head is not None:
            break
    else:
        raise AssertionError("the overhead of a sealed object has room for the head of one part")
    out = bytearray(sealed_size(len(data)))
    out[: len(head)] = head
    view = memoryview(out)
    ciphers = _Ciphers(keys.by_id[keys.newest], fields, salt)
    identity = _identity(fields)
    at = len(head)
    for part in parts:
        for index, start in enumerate(range(0, max(1, part.size), SEGMENT)):
            plain = data[part.plain_start + start : part.plain_start + min(part.size, start + SEGMENT)]
            target = view[at : at + len(plain) + TAG]
            ciphers.of(part).encrypt_into(
                _nonce(part, index), plain, _associated(identity, part, index), target
            )
            at += len(target)
    return out


def parse_sealed(data: memoryview) -> SealedHead:
    """The head of a sealed object from its first bytes. Raises InvalidObject; IndexError, with
    their number, where more are needed.
    """
    if len(data) < 8:
        raise InvalidObject(f"the object has {len(data)} bytes, too few for a header")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MOST_HEADER:
        raise InvalidObject(f"the header claims {length} bytes; at most {MOST_HEADER} are allowed")
    if len(data) < 8 + length:
        raise IndexError(8 + length)
    head = bytearray(data[: 8 + length])
    at = 8 + len(_OPENING)
    if head[8:at] != _OPENING:
        raise InvalidObject("the object is none of Retain's")
    seal_, head[at : at + 16] = bytes(head[at : at + 16]), b"0" * 16
    if seal_ != f"{xxhash.xxh3_64_intdigest(head):016x}".encode():
        raise InvalidObject("the checksum of the header does not match: its bytes are damaged")
    try:
        document = msgspec.json.decode(head[8:], type=dict[str, msgspec.Raw])
        fields = msgspec.json.decode(document.pop("__metadata__"), type=dict[str, str])
        if fields.get("features") != "sealed" or fields.get("format") != FORMAT:
            raise ForeignObject("the object is not sealed, but this tier takes only sealed ones")
        if fields["cipher"] != ALGORITHM:
            raise ForeignObject(
                f"the object is sealed with {fields['cipher'][:40]!r}, which is not known here"
            )
        salt = bytes.fromhex(fields["salt"])
        parts: list[Part] = []
        start, plain = 0, 0
        for number, (name, raw) in enumerate(document.items()):
            entry = msgspec.json.decode(raw, type=_Entry)
            first, stop = entry.data_offsets
            sealed = stop - first
            size = sealed - TAG * max(1, -(-sealed // (SEGMENT + TAG)))
            if first != start or entry.shape != [sealed] or entry.dtype != "U8" or size < 0:
                raise InvalidObject(f"tensor {name[:80]!r} does not lie where its shape says")
            parts.append(Part(name, 8 + length + start, plain, size, number))
            start, plain = stop, plain + size
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise InvalidObject(f"the header of a sealed object cannot be read: {error}") from error
    return SealedHead(fields, salt, tuple(parts), 8 + length)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Opener:
    """Opens parts of one sealed object. Raises UnknownKey; InvalidObject for what is of another object."""

    def __init__(self, name: str, head: SealedHead, keys: Keys) -> None:
        by = head.fields.get("sealed_by", "")
        key = keys.by_id.get(by)
        if key is None:
            raise UnknownKey(f"the object was sealed with the key {by[:32]}, which is not among those given")
        fields = head.fields
        if "key" in fields:
            told = [fields["key"], fields.get("variant", "")[:32], fields.get("slice", "")]
            named = name.split(".")
            if named[:3] != told or named[3:4] != [fields.get("codec", "")]:
                raise InvalidObject(f"under {name} lies another object")
        elif fields.get("name") != name:
            raise InvalidObject(f"under {name} lies another object")
        self._identity = _identity(fields)
        self._ciphers = _Ciphers(key, fields, head.salt)

    def open(self, part: Part, index: int, sealed: memoryview, target: memoryview) -> None:
        """Open segment `index` of a tensor into `target`, of the plaintext's size."""
        from cryptography.exceptions import InvalidTag

        try:
            self._ciphers.of(part).decrypt_into(
                _nonce(part, index), sealed, _associated(self._identity, part, index), target
            )
        except InvalidTag as error:
            raise InvalidObject(f"the tensor {part.name} is damaged, or of another object") from error


def _cut(frame: Frame | None, size: int) -> list[Part]:
    """The tensors that are sealed apart: the head, then those of a block; else all as one."""
    if frame is None:
        return [Part("object", 0, 0, size, 0)]
    rows = [("head", frame.data_start), *((tensor.name, tensor.size) for tensor in frame.tensors)]
    parts, at = [], 0
    for number, (name, length) in enumerate(rows):
        parts.append(Part(name, 0, at, length, number))
        at += length
    return parts


def _fields(frame: Frame | None, name: str) -> dict[str, str]:
    if frame is None:
        return {"format": FORMAT, "features": "sealed", "name": name}
    header = frame.header
    values = {
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "space": header.space.hex(),
        "kin": header.kin.hex(),
        "variant": header.variant.hex(),
        "adapter": header.adapter.hex() if header.adapter is not None else "",
        "first": str(header.first),
        "count": str(header.count),
        "slice": header.slice.text,
        "codec": header.codec,
        "lineage": header.lineage.hex() if header.lineage is not None else "",
    }
    return {"format": FORMAT, "features": "sealed", **values}


def _render(fields: Mapping[str, str], parts: Sequence[Part], size: int) -> bytes | None:
    """The head, filled up with spaces so that the whole has `size` bytes; None where it is too long."""
    document: dict[str, Any] = {"__metadata__": {"checksum": "0" * 16, **fields}}
    at = 0
    for part in parts:
        stop = at + part.sealed_size
        document[part.name] = {"dtype": "U8", "shape": [part.sealed_size], "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
    length = size - at - 8
    if len(text) > length or "__metadata__" in [part.name for part in parts]:
        return None
    head = struct.pack("<Q", length) + text.ljust(length)
    seal_ = f"{xxhash.xxh3_64_intdigest(head):016x}".encode()
    begins = 8 + len(_OPENING)
    return head[:begins] + seal_ + head[begins + 16 :]


def _identity(fields: Mapping[str, str]) -> bytes:
    if "key" in fields:
        return digest("retain/sealed identity", *(fields.get(field) for field in _IDENTITY))
    return digest("retain/sealed name", fields.get("name"))


def _associated(identity: bytes, part: Part, index: int) -> bytes:
    return digest("retain/sealed", identity, part.name, part.size, index)


def _nonce(part: Part, index: int) -> bytes:
    return struct.pack("<IQ", part.number, index)


class _Ciphers:
    """The ciphers of one object: one for its head, one for all other tensors."""

    def __init__(self, master: bytes, fields: Mapping[str, str], salt: bytes) -> None:
        aead, hashes, hkdf = _cryptography()
        space = digest("retain/data key", fields.get("space"))
        data_key = hkdf(hashes.SHA256(), 32, None, space).derive(master)

        def derived(info: str) -> Any:
            return aead(hkdf(hashes.SHA256(), 32, salt, info.encode()).derive(data_key))

        self._body = derived("retain/object key")
        self._head = derived(f"retain/head key/{fields.get('codec', '')}")

    def of(self, part: Part) -> Any:
        return self._head if part.name == "head" else self._body


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise MissingDependency(
            "encryption needs the package cryptography: pip install 'retain[encryption]'"
        ) from error
    return AESGCM, hashes, HKDF
