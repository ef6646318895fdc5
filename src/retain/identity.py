"""Identity: which KV this is. Spaces, chained block keys, tails and content keys, as defined in
docs/format.md.

Everything here depends on content alone: not on process, host, path, engine, topology, Python version or hash
seed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 256
TAIL_TOKENS = 16
KEY_BYTES = 32

Field = None | int | str | bytes | Sequence["Field"]
Tokens = npt.NDArray[np.uint32]

_LENGTH = struct.Struct("<BQ")
_INTEGER = struct.Struct("<BQq")


def digest(domain: str, *fields: Field) -> bytes:
    """SHA-256 over the canonical encoding of `domain` and `fields`: 32 bytes.

    Each field is encoded as one type byte, a 64-bit little-endian length and its bytes, so that no two
    different field lists share an encoding: ("ab", "c") differs from ("a", "bc"), and an absent field (None)
    from an empty one.
    """
    parts = [_encode(domain)]
    parts.extend(_encode(field) for field in fields)
    return hashlib.sha256(b"".join(parts)).digest()


def _encode(field: Field) -> bytes:
    if field is None:
        return _LENGTH.pack(0x4E, 0)  # N
    if isinstance(field, bool):
        raise TypeError("digest fields are None, int, str, bytes or sequences of these; got a bool")
    if isinstance(field, int):
        return _INTEGER.pack(0x49, 8, field)  # I
    if isinstance(field, str):
        data = field.encode("utf-8")
        return _LENGTH.pack(0x53, len(data)) + data  # S
    if isinstance(field, (bytes, bytearray, memoryview)):
        return _LENGTH.pack(0x42, len(field)) + bytes(field)  # B
    if isinstance(field, (list, tuple)):
        return _LENGTH.pack(0x4C, len(field)) + b"".join(_encode(item) for item in field)  # L
    raise TypeError(
        f"digest fields are None, int, str, bytes or sequences of these; got {type(field).__name__}"
    )


def space_of(kin: bytes, adapter: bytes | None = None, salt: bytes | None = None) -> bytes:
    """The space of one kin, adapter and tenant salt: the root of every key under it."""
    return digest("retain/1", kin, adapter, salt)


def salt_of(tenant: str | None, cache_salt: str | None = None) -> bytes | None:
    """The salt of a space: None when neither an authenticated tenant nor a request salt is given."""
    if tenant is None and cache_salt is None:
        return None
    return digest("retain/salt", tenant, cache_salt)


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a contiguous uint32 vector; raises ValueError when one does not fit."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF:
        raise ValueError("token ids must lie in 0 .. 2**32-1")
    return np.ascontiguousarray(array, dtype=np.uint32)


@dataclass(frozen=True, order=True)
class Media:
    """A piece of non-text input: where its placeholder tokens lie, and the digest of its content."""

    position: int
    length: int
    digest: bytes


def root_key(space: bytes) -> bytes:
    """key_0: the parent of a prompt's first block."""
    return digest("retain/root", space)


def block_key(parent: bytes, tokens: Tokens, media: Sequence[Media] = (), start: int = 0) -> bytes:
    """The key of a block of `tokens` at positions `start` onwards, behind `parent`.

    Media that overlap the block count with their offset from the block's start (negative when they begin
    before it).
    """
    return digest(
        "retain/key",
        parent,
        tokens.astype("<u4", copy=False).tobytes(),
        _media_fields(media, start, tokens.size),
    )


def content_key(tokens: Tokens, media: Sequence[Media] = (), start: int = 0) -> bytes:
    """The key of a block's tokens alone, wherever they stand: for reuse at another position."""
    return digest(
        "retain/content", tokens.astype("<u4", copy=False).tobytes(), _media_fields(media, start, tokens.size)
    )


def _media_fields(media: Sequence[Media], start: int, count: int) -> Field:
    touched = [m for m in media if m.position < start + count and m.position + m.length > start]
    if not touched:
        return None
    return tuple((m.position - start, m.length, m.digest) for m in sorted(touched))


@dataclass(frozen=True)
class Chain:
    """A token list with the keys of its full blocks.

    `keys[i]` names the block of tokens [i * block_tokens, (i + 1) * block_tokens); its parent is
    `parents[i]`.
    """

    space: bytes
    tokens: Tokens
    block_tokens: int
    keys: tuple[bytes, ...]
    media: tuple[Media, ...] = ()

    @property
    def root(self) -> bytes:
        return root_key(self.space)

    def parent(self, index: int) -> bytes:
        """The key of the block before block `index`."""
        return self.keys[index - 1] if index else self.root

    def block(self, index: int) -> Tokens:
        """The tokens of block `index`; shorter than a block (perhaps empty) for the last one."""
        return self.tokens[index * self.block_tokens : (index + 1) * self.block_tokens]

    def key(self, index: int, length: int) -> bytes:
        """The key of block `index` cut to its first `length` tokens: a tail."""
        start = index * self.block_tokens
        tokens = self.tokens[start : start + length]
        if length < 1 or length > self.block_tokens or tokens.size != length:
            raise ValueError(f"block {index} has no first {length} tokens in a list of {self.tokens.size}")
        if length == self.block_tokens:
            return self.keys[index]
        return block_key(self.parent(index), tokens, self.media, start)


def chain(
    space: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block_tokens: int = BLOCK_TOKENS,
    media: Sequence[Media] = (),
) -> Chain:
    """Hash a token list into its chain of block keys."""
    if block_tokens < TAIL_TOKENS or block_tokens % TAIL_TOKENS:
        raise ValueError(f"block_tokens must be a positive multiple of {TAIL_TOKENS}, got {block_tokens}")
    ids = as_tokens(tokens)
    spans = tuple(sorted(media))
    parent = root_key(space)
    keys: list[bytes] = []
    if spans:
        for start in range(0, ids.size - block_tokens + 1, block_tokens):
            parent = block_key(parent, ids[start : start + block_tokens], spans, start)
            keys.append(parent)
        return Chain(space, ids, block_tokens, tuple(keys), spans)
    # The same digests as block_key, with the constant fields encoded once: this loop runs for every request.
    head = _encode("retain/key") + _LENGTH.pack(0x42, KEY_BYTES)
    middle = _LENGTH.pack(0x42, 4 * block_tokens)
    none = _encode(None)
    data = ids.astype("<u4", copy=False).data.cast("B")
    width = 4 * block_tokens
    sha256 = hashlib.sha256
    for at in range(0, len(data) - width + 1, width):
        parent = sha256(b"".join((head, parent, middle, data[at : at + width], none))).digest()
        keys.append(parent)
    return Chain(space, ids, block_tokens, tuple(keys), spans)
