"""The bytes of a sequence's state in llama.cpp: written from nothing and read back, each number checked.

llama.cpp gives and takes a sequence's KV as one blob without a version, of a model or a layout of which it
says nothing (llama-kv-cache.cpp, state_write and state_read). Two dialects are in use; they differ in two
words that newer builds write where a quantised cache is rotated. Little-endian throughout, without padding.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from retain.errors import InvalidObject, UnsupportedModel

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]

MAGIC = 0xAF143CD8
FILE_MAGIC = 0x67677371

TYPES = MappingProxyType({"float32": (0, 4), "float16": (1, 2)})
"""llama.cpp's number and the size in bytes of the dtypes whose caches hold K and V as they are computed."""

_NUMPY: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
)
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])


@dataclass(frozen=True)
class Dialect:
    """How a build of llama.cpp writes its states, by the version of its state files."""

    version: int
    rotation_words: bool


DIALECTS = MappingProxyType({3: Dialect(3, False), 4: Dialect(4, True)})


@dataclass(frozen=True)
class CacheForm:
    """One of the caches that a model's state consists of: which layers of the model, and each one's
    (heads, K size, V size). `transposed`: V lies by number, then cell, as without flash attention."""

    layers: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    dtype: str
    transposed: bool


@dataclass(frozen=True, eq=False)
class CacheView:
    """What one cache holds of a sequence: the position of every cell, and for each layer views of K and V,
    `[heads, cells, dim]`, in the order of cells."""

    positions: Positions
    k: tuple[Array, ...]
    v: tuple[Array, ...]


@dataclass(frozen=True)
class StateForm:
    """The form of a context's states: its caches in order, and the dialect."""

    caches: tuple[CacheForm, ...]
    dialect: Dialect

    def size(self, cells: Sequence[int]) -> int:
        """Bytes of a state with so many cells in each cache."""
        return 8 + sum(
            _cache_size(form, count, self.dialect) for form, count in zip(self.caches, cells, strict=True)
        )

    def write(self, buffer: Array, firsts: Sequence[int], counts: Sequence[int]) -> list[CacheView]:
        """Write the frame of a state into `buffer` (uint8), whose cells of each cache hold `counts` positions
        from `firsts` on; K and V are the caller's to fill through the views. Raises ValueError for a buffer
        of another size than `size(counts)`."""
        if buffer.size != self.size(counts):
            raise ValueError(f"the state takes {self.size(counts)} bytes, the buffer has {buffer.size}")
        cursor = _Writer(buffer)
        cursor.words("<Ii", MAGIC, 0)
        views = []
        for form, first, count in zip(self.caches, firsts, counts, strict=True):
            views.append(_write_cache(cursor, form, first, count, self.dialect))
        return views

    def read(self, buffer: Array) -> list[CacheView]:
        """The caches in a state. Raises InvalidObject unless every byte is what this form has there."""
        cursor = _Reader(buffer)
        magic, _ = cursor.words("<Ii")
        if magic != MAGIC:
            raise InvalidObject(f"the state begins with {magic:#x} instead of {MAGIC:#x}")
        views = [_read_cache(cursor, form, self.dialect) for form in self.caches]
        if cursor.at != buffer.size:
            raise InvalidObject(f"the state has {buffer.size} bytes, of which {cursor.at} are accounted for")
        return views


def file_version(head: bytes) -> int:
    """The version of a state file, from its first bytes. Raises UnsupportedModel for an unknown one."""
    if len(head) < 8:
        raise UnsupportedModel("llama.cpp wrote a state file of less than 8 bytes")
    magic, version = struct.unpack("<II", head[:8])
    if magic != FILE_MAGIC or version not in DIALECTS:
        raise UnsupportedModel(
            f"llama.cpp writes state files of version {version} (magic {magic:#x}); "
            f"known are {', '.join(map(str, DIALECTS))}: use a release of it that is known"
        )
    return int(version)


def _cache_size(form: CacheForm, cells: int, dialect: Dialect) -> int:
    if cells == 0:
        return 8
    item = TYPES[form.dtype][1]
    head = 8 + cells * _CELL.itemsize + 8 + (8 if dialect.rotation_words else 0)
    for heads, k_dim, v_dim in form.shapes:
        head += 12 + heads * k_dim * item * cells
        if v_dim:
            head += 12 + heads * v_dim * item * cells
    return head


def _write_cache(cursor: _Writer, form: CacheForm, first: int, cells: int, dialect: Dialect) -> CacheView:
    cursor.words("<II", 1, cells)
    if cells == 0:
        return CacheView(np.empty(0, np.int64), (), ())
    number, item = TYPES[form.dtype]
    meta = cursor.array(_CELL, cells)
    meta["position"] = np.arange(first, first + cells)
    meta["sequences"] = 1
    meta["sequence"] = 0
    cursor.words("<II", int(form.transposed), len(form.layers))
    if dialect.rotation_words:
        cursor.words("<II", 0, 0)
    k, v = [], []
    for heads, k_dim, _ in form.shapes:
        cursor.words("<iQ", number, heads * k_dim * item)
        k.append(_by_cell(cursor.array(_NUMPY[form.dtype], cells * heads * k_dim), cells, heads))
    for heads, _, v_dim in form.shapes:
        if v_dim == 0:
            continue
        if form.transposed:
            cursor.words("<iII", number, item, heads * v_dim)
            v.append(_by_number(cursor.array(_NUMPY[form.dtype], cells * heads * v_dim), cells, heads))
        else:
            cursor.words("<iQ", number, heads * v_dim * item)
            v.append(_by_cell(cursor.array(_NUMPY[form.dtype], cells * heads * v_dim), cells, heads))
    return CacheView(np.arange(first, first + cells, dtype=np.int64), tuple(k), tuple(v))


def _read_cache(cursor: _Reader, form: CacheForm, dialect: Dialect) -> CacheView:
    streams, cells = cursor.words("<II")
    if streams != 1:
        raise InvalidObject(f"the state has {streams} streams; a unified cache has one")
    if cells == 0:
        return CacheView(np.empty(0, np.int64), (), ())
    number, item = TYPES[form.dtype]
    meta = cursor.array(_CELL, cells)
    if (meta["sequences"] != 1).any():
        raise InvalidObject("the state has cells of several sequences, or more words a cell than are known")
    cursor.expect("<II", (int(form.transposed), len(form.layers)), "transposed V, layers")
    if dialect.rotation_words:
        cursor.expect("<II", (0, 0), "rotation of K and V")
    k, v = [], []
    for heads, k_dim, _ in form.shapes:
        cursor.expect("<iQ", (number, heads * k_dim * item), "type and row of K")
        k.append(_by_cell(cursor.array(_NUMPY[form.dtype], cells * heads * k_dim), cells, heads))
    for heads, _, v_dim in form.shapes:
        if v_dim == 0:
            continue
        if form.transposed:
            cursor.expect("<iII", (number, item, heads * v_dim), "type, item and width of V")
            v.append(_by_number(cursor.array(_NUMPY[form.dtype], cells * heads * v_dim), cells, heads))
        else:
            cursor.expect("<iQ", (number, heads * v_dim * item), "type and row of V")
            v.append(_by_cell(cursor.array(_NUMPY[form.dtype], cells * heads * v_dim), cells, heads))
    return CacheView(meta["position"].astype(np.int64), tuple(k), tuple(v))


def _by_cell(flat: Array, cells: int, heads: int) -> Array:
    return flat.reshape(cells, heads, -1).swapaxes(0, 1)


def _by_number(flat: Array, cells: int, heads: int) -> Array:
    return flat.reshape(heads, -1, cells).swapaxes(1, 2)


class _Writer:
    def __init__(self, buffer: Array) -> None:
        self._buffer = buffer
        self.at = 0

    def words(self, form: str, *values: int) -> None:
        struct.pack_into(form, self._buffer.data, self.at, *values)
        self.at += struct.calcsize(form)

    def array(self, dtype: np.dtype[Any], count: int) -> Array:
        size = count * dtype.itemsize
        found = self._buffer[self.at : self.at + size].view(dtype)
        self.at += size
        return found


class _Reader:
    def __init__(self, buffer: Array) -> None:
        self._buffer = buffer
        self.at = 0

    def words(self, form: str) -> tuple[int, ...]:
        size = struct.calcsize(form)
        if self.at + size > self._buffer.size:
            raise InvalidObject(f"the state ends at {self._buffer.size} bytes, inside its frame")
        found = struct.unpack_from(form, self._buffer.data, self.at)
        self.at += size
        return found

    def expect(self, form: str, wanted: tuple[int, ...], what: str) -> None:
        found = self.words(form)
        if found != wanted:
            raise InvalidObject(f"the state has {what} {found}, this context {wanted}")

    def array(self, dtype: np.dtype[Any], count: int) -> Array:
        size = count * dtype.itemsize
        if self.at + size > self._buffer.size:
            raise InvalidObject(f"the state ends at {self._buffer.size} bytes, inside its numbers")
        found = self._buffer[self.at : self.at + size].view(dtype)
        self.at += size
        return found
