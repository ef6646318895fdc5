"""Exact coding of floats: exponent, sign and top mantissa bit by their frequencies, the rest as it is.

Numbers of a channel (a layer, head and dimension) have much the same size, many even the same sign. Channels
that are alike share a table of frequencies; which one, and its largest exponent, is said for each channel.
The entropy coder is the ladder's (docs/codecs.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from retain._native import LadderTables
from retain.codecs.base import Array
from retain.codecs.ladder.learn import frequencies_of
from retain.codecs.ladder.levels import CLASSES, CONTEXTS, ESCAPE, LEVELS, SYMBOLS, ZERO_SYMBOL
from retain.codecs.ladder.profile import Floats
from retain.errors import InvalidObject

_CHANNELS = 1 << 13
_SYMBOLS_A_TABLE = 1 << 13
"""Fewer numbers than this do not pay for a table of their own."""

_ROUNDS = 5
_SIDES = 3


@dataclass(frozen=True)
class _Float:
    """The bits of a dtype: all, of the exponent, of the mantissa."""

    bits: int
    exponent: int
    mantissa: int

    @property
    def rest(self) -> int:
        """Bits of a number that are kept as they are."""
        return self.mantissa - 1

    @property
    def unsigned(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(f"u{self.bits // 8}")


_FLOATS = {"bfloat16": _Float(16, 8, 7), "float16": _Float(16, 5, 10), "float32": _Float(32, 8, 23)}


def encode(arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """The streams of arrays `[layers, heads, tokens, dim]`: `head` (tables, largest exponents), `codes`,
    `rest`."""
    kind = _FLOATS[dtype]
    streams: dict[str, Array] = {}
    for name, array in arrays.items():
        numbers = _channels(array.view(kind.unsigned))
        exponents = (numbers >> kind.mantissa) & ((1 << kind.exponent) - 1)
        largest = exponents.max(axis=1)
        low = (numbers >> (kind.mantissa - 1) & 1) | (numbers >> (kind.bits - 1) << 1)
        symbols = ((largest[:, None] - exponents) << 2 | low).astype(np.int16)
        tables, classes = _learnt(symbols)
        head = tables[:CLASSES].tobytes() + tables[-1].tobytes() + largest.astype(np.uint8).tobytes()
        streams[f"{name}.head"] = _bytes(zstandard.ZstdCompressor(level=9).compress(head))
        coder = _coder(tables)
        symbols -= ZERO_SYMBOL
        for at in range(0, len(symbols), _CHANNELS):
            chunk = symbols[at : at + _CHANNELS]
            own = classes[at : at + _CHANNELS]
            (codes,) = coder.encode(chunk, own, *_sides(chunk.shape), 0)
            streams[f"{name}.codes{at // _CHANNELS}"] = _bytes(codes)
        streams[f"{name}.rest"] = _packed(numbers & ((1 << kind.rest) - 1), kind.rest)
    return streams


def decode(streams: Mapping[str, Array], dtype: str, out: Mapping[str, Array]) -> None:
    """Fill arrays from their streams, bit for bit. Raises InvalidObject."""
    kind = _FLOATS[dtype]
    expected = {name for array in out for name in _names(array, out[array].shape)}
    if streams.keys() != expected:
        raise InvalidObject(
            f"lossless block holds streams {sorted(streams)[:8]}, expected {sorted(expected)[:8]}"
        )
    for name, array in out.items():
        layers, heads, tokens, dim = array.shape
        count = layers * heads * dim
        tables, largest = _head(streams[f"{name}.head"], count, name)
        symbols = np.empty((count, tokens), np.int16)
        for at in range(0, count, _CHANNELS):
            chunk = symbols[at : at + _CHANNELS]
            expecting, steps, energy = _sides(chunk.shape)
            rows = [streams[f"{name}.codes{at // _CHANNELS}"]]
            try:
                tables.decode(rows, chunk, np.empty_like(expecting), expecting, steps, energy)
            except (ValueError, TypeError) as error:
                raise InvalidObject(f"the exponents of {name} do not decode: {error}") from error
        symbols += ZERO_SYMBOL
        exponents = largest[:, None] - (symbols >> 2)
        if exponents.min(initial=0) < 0:
            raise InvalidObject(f"{name} holds an exponent below zero")
        numbers = _unpacked(streams[f"{name}.rest"], kind, symbols.size, name).reshape(symbols.shape)
        numbers |= exponents.astype(kind.unsigned) << kind.mantissa
        numbers |= (symbols & 1).astype(kind.unsigned) << (kind.mantissa - 1)
        numbers |= (symbols >> 1 & 1).astype(kind.unsigned) << (kind.bits - 1)
        np.copyto(
            array.view(kind.unsigned), numbers.reshape(layers, heads, dim, tokens).transpose(0, 1, 3, 2)
        )


def _channels(numbers: Array) -> Array:
    """`[layers, heads, tokens, dim]` as `[layers * heads * dim, tokens]`."""
    return np.ascontiguousarray(numbers.transpose(0, 1, 3, 2)).reshape(-1, numbers.shape[2])


def _names(array: str, shape: tuple[int, ...]) -> list[str]:
    count = -(-shape[0] * shape[1] * shape[3] // _CHANNELS)
    return [f"{array}.head", f"{array}.rest", *(f"{array}.codes{number}" for number in range(count))]


def _learnt(symbols: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Tables for channels' symbols, and which one each channel uses: k-means in coding cost (Lloyd 1982)."""
    count, tokens = symbols.shape
    held = np.minimum(symbols, ESCAPE).astype(np.int32) + np.arange(count, dtype=np.int32)[:, None] * SYMBOLS
    seen = np.bincount(held.ravel(), minlength=count * SYMBOLS).reshape(count, SYMBOLS).astype(np.float32)
    number = int(np.clip(symbols.size // _SYMBOLS_A_TABLE, 1, min(CLASSES, count)))
    spread = -(seen * np.log2(np.maximum(seen / tokens, 1e-9))).sum(axis=1)
    own = np.empty(count, np.int64)
    own[np.argsort(spread, kind="stable")] = np.arange(count) * number // count
    for _ in range(_ROUNDS):
        totals = _summed(seen, own, number) + np.float32(1e-3)
        own = (seen @ -np.log2(totals / totals.sum(axis=1, keepdims=True)).T).argmin(axis=1)
    totals = _summed(seen, own, number)
    tables = np.zeros((CLASSES + _SIDES, SYMBOLS), np.uint16)
    escape = np.arange(SYMBOLS) == ESCAPE
    for table in np.flatnonzero(totals.any(axis=1)):  # some may have lost all their channels
        tables[table] = frequencies_of(totals[table] + 1e-6 * escape, escape)
    chosen = np.bincount(own, minlength=number)
    classes = np.zeros(SYMBOLS)
    classes[ZERO_SYMBOL : ZERO_SYMBOL + number] = chosen
    classes[ZERO_SYMBOL : ZERO_SYMBOL + number + 1] += 0.01  # no symbol may have all of a table
    tables[-1] = frequencies_of(classes, classes > 0)
    return tables, own.astype(np.uint8)


def _summed(seen: Floats, own: npt.NDArray[np.int64], number: int) -> Floats:
    """What the channels of each table hold together."""
    members = np.zeros((number, own.size), np.float32)
    members[own, np.arange(own.size)] = 1
    return np.asarray(members @ seen)


def _coder(tables: npt.NDArray[np.uint16]) -> LadderTables:
    """The ladder's coder with these tables; those not used, and what it needs beside, filled in."""
    filled = tables.copy()
    unused = ~filled[:CLASSES].any(axis=1)
    filled[:CLASSES][unused, ZERO_SYMBOL] = 4095
    filled[:CLASSES][unused, ESCAPE] = 1
    filled[CLASSES : CLASSES + 2, ZERO_SYMBOL] = 4095
    filled[CLASSES : CLASSES + 2, ZERO_SYMBOL + 1] = 1
    splits = np.empty((len(LEVELS) - 1, CLASSES, CONTEXTS, 2), np.uint16)
    splits[...] = (1365, 2731)
    return LadderTables(filled, splits, np.zeros(len(LEVELS), np.uint8))


def _head(stream: Array, count: int, name: str) -> tuple[LadderTables, npt.NDArray[np.int16]]:
    size = 2 * (CLASSES + 1) * SYMBOLS
    data = np.ascontiguousarray(stream).data
    try:
        if zstandard.frame_content_size(data) != size + count:
            raise InvalidObject(f"the head of {name} does not hold {size + count} bytes")
        plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise InvalidObject(f"the head of {name} does not decompress: {error}") from error
    if plain.size != size + count:
        raise InvalidObject(f"the head of {name} does not hold {size + count} bytes")
    tables = np.zeros((CLASSES + _SIDES, SYMBOLS), np.uint16)
    rows = plain[:size].view("<u2").reshape(-1, SYMBOLS)
    tables[:CLASSES], tables[-1] = rows[:CLASSES], rows[-1]
    try:
        return _coder(tables), plain[size:].astype(np.int16)
    except ValueError as error:
        raise InvalidObject(f"the tables of {name} cannot be used: {error}") from error


def _sides(
    shape: tuple[int, ...],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    return np.zeros(shape[0], np.uint8), np.zeros(shape[1], np.int8), np.zeros(shape[1], np.int8)


def _packed(values: Array, bits: int) -> Array:
    """Values of `bits` bits: whole low bytes one plane each, then the 1 or 6 bits left over."""
    planes = [(values >> 8 * rank).astype(np.uint8).ravel() for rank in range(bits // 8)]
    top = (values >> (bits - bits % 8)).astype(np.uint8).ravel()
    if bits % 8 == 1:
        return np.concatenate([*planes, np.packbits(top)])
    # Four times six bits are three bytes.
    fours = np.concatenate([top, np.zeros(-top.size % 4, np.uint8)]).view("<u4")
    joined = fours & 0x3F | fours >> 2 & 0xFC0 | fours >> 4 & 0x3F000 | fours >> 6 & 0xFC0000
    return np.concatenate([*planes, joined.view(np.uint8).reshape(-1, 4)[:, :3].ravel()])


def _unpacked(stream: Array, kind: _Float, size: int, name: str) -> Array:
    whole = kind.rest // 8
    single = kind.rest % 8 == 1
    left = -(-size // 8) if single else -(-size // 4) * 3
    if stream.size != whole * size + left:
        raise InvalidObject(f"the mantissas of {name} take {stream.size} bytes, not what {size} numbers take")
    numbers = np.zeros(size, kind.unsigned)
    for rank in range(whole):
        numbers |= stream[rank * size : (rank + 1) * size].astype(kind.unsigned) << (8 * rank)
    if single:
        top = np.unpackbits(stream[whole * size :])[:size]
    else:
        joined = np.zeros((left // 3, 4), np.uint8)
        joined[:, :3] = stream[whole * size :].reshape(-1, 3)
        packed = joined.view("<u4").ravel()
        fours = packed & 0x3F | (packed & 0xFC0) << 2 | (packed & 0x3F000) << 4 | (packed & 0xFC0000) << 6
        top = fours.view(np.uint8)[:size]
    numbers |= top.astype(kind.unsigned) << (8 * whole)
    return numbers


def _bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)
