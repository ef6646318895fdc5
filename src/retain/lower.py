"""Lower levels of a progressive object: cut from its leading bytes, raised again with those that follow.

Nothing is decoded or encoded: an object of a lower level has a header of its own and the same leading data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import xxhash

from retain.codecs.ladder.codec import BY_PROFILE
from retain.codecs.ladder.levels import LEVELS, depth
from retain.errors import InvalidObject
from retain.header import Frame, Tensor, parse_frame, render_frame
from retain.stores.base import Buffer


def leading_bytes(frame: Frame, level: str) -> int:
    """How many bytes of an object, from its first, hold everything that `level` needs: what a Range request
    asks for. Raises ValueError where the object has no such level."""
    return frame.data_start + sum(tensor.size for tensor in _kept(frame, level))


def lowered(data: memoryview, level: str) -> list[Buffer]:
    """The object of a lower level, as buffers to be written one after the other.

    `data` are the first bytes of an object, at least `leading_bytes`. Blocks that are coded without a profile
    have one level, which serves as every lower one. Raises InvalidObject for bytes that are damaged or too
    few, ValueError where there is no such level.
    """
    frame = parse_frame(data)
    kept = _kept(frame, level)
    body = data[frame.data_start : leading_bytes(frame, level)]
    if len(body) != sum(tensor.size for tensor in kept):
        raise InvalidObject(f"{len(data)} bytes of the object are too few for its level {level}")
    _check(frame, kept, body)
    sums = {tensor.name: frame.checksums[tensor.name] for tensor in kept}
    return [render_frame(replace(frame.header, codec=level), kept, sums), body]


def missing_range(higher: Frame, lower: Frame) -> tuple[int, int]:
    """Which bytes of an object of a higher level, [start, stop), the one at hand of a lower level lacks.

    Raises ValueError where the two are not of the same block and encoding.
    """
    count = len(lower.tensors)
    same = higher.tensors[:count] == lower.tensors and all(
        higher.checksums[tensor.name] == lower.checksums[tensor.name] for tensor in lower.tensors
    )
    if not same or replace(higher.header, codec=lower.header.codec) != lower.header:
        raise ValueError("the two objects are not levels of one encoding")
    return higher.data_start + sum(tensor.size for tensor in lower.tensors), higher.size


def raised(head: memoryview, lower: memoryview, rest: memoryview) -> bytes:
    """The object of a higher level, from its head, the whole object of a lower level, and the missing range.

    Raises InvalidObject where they do not belong together or are damaged, ValueError as `missing_range`.
    """
    higher, below = parse_frame(head), parse_frame(lower)
    start, stop = missing_range(higher, below)
    if len(rest) != stop - start or len(lower) != below.size:
        raise InvalidObject(f"{len(rest)} bytes do not raise the object, which lacks {stop - start}")
    made = b"".join((head[: higher.data_start], lower[below.data_start :], rest))
    _check(higher, higher.tensors, memoryview(made)[higher.data_start :])
    return made


def _kept(frame: Frame, level: str) -> tuple[Tensor, ...]:
    own = frame.header.codec
    if own not in LEVELS or level not in LEVELS or depth(level) > depth(own):
        raise ValueError(f"an object of codec {own!r} has no level {level!r} in it")
    if not frame.header.parameters.startswith(BY_PROFILE):
        return frame.tensors
    higher = tuple(f"{name}." for name in LEVELS[depth(level) + 1 :])
    kept = tuple(tensor for tensor in frame.tensors if not tensor.name.startswith(higher))
    if kept != frame.tensors[: len(kept)]:
        raise InvalidObject(f"the object's streams of {level} do not lead the others")
    return kept


def _check(frame: Frame, tensors: Sequence[Tensor], body: memoryview) -> None:
    at = 0
    for tensor in tensors:
        if xxhash.xxh3_64_intdigest(body[at : at + tensor.size]) != frame.checksums[tensor.name]:
            raise InvalidObject(f"the checksum of tensor {tensor.name} does not match: its bytes are damaged")
        at += tensor.size
