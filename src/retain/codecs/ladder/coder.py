"""Encoding and decoding a block with a profile: arrays to streams and back, at one of the ladder's levels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from retain.codecs.base import Array, container
from retain.codecs.ladder.levels import LEVELS, depth
from retain.codecs.ladder.profile import Floats, Part, Profile
from retain.codecs.ladder.quantise import Coded, quantise, token_steps
from retain.codecs.ladder.transform import (
    Place,
    components,
    from_floats,
    place_of,
    predicted,
    restore,
    rotation_of,
    step_classes,
    steps_of,
    to_floats,
)
from retain.codecs.ladder.work import CREW
from retain.errors import InvalidObject
from retain.identity import Tokens

SINKS = "sinks"


def encode(
    profile: Profile,
    arrays: Mapping[str, Array],
    tokens: Tokens,
    level: str,
    *,
    dtype: str,
    first: int,
    importance: Mapping[int, Floats] | None = None,
) -> dict[str, Array]:
    """The streams of a block of whole layers and heads, in reading order: every part at `tiny`, then every
    part's first refinement, and so on.

    `first` is the position of the first token. `importance` may give, by part, each coded token's importance
    in place of what the profile's probe makes of it. Raises Unencodable for numbers that are not finite or
    too large.
    """
    place = place_of(profile, dtype, first, tokens.size)
    streams: dict[str, Array] = {}
    if place.sinks:
        streams[SINKS] = _sinks(profile, arrays, place)
    if place.sinks == tokens.size:
        return streams

    def encoded(index: int) -> list[bytes]:
        part = profile.parts[index]
        given = (importance or {}).get(index)
        steps = (
            step_classes(profile, part, arrays, place) if given is None else steps_of(profile, part, given)
        )
        return _encode_part(profile, part, arrays, tokens[place.sinks :], place, steps, level)

    coded = CREW.side_by_side(encoded, range(len(profile.parts)))
    for at, name in enumerate(LEVELS[: depth(level) + 1]):
        streams.update((f"{name}.{index}", _bytes(rows[at])) for index, rows in enumerate(coded))
    return streams


def decode(
    profile: Profile,
    streams: Mapping[str, Array],
    tokens: Tokens,
    level: str,
    out: Mapping[str, Array],
    *,
    dtype: str,
    first: int,
    position: int | None = None,
) -> None:
    """Fill a block's arrays from its streams, of which those above `level` are not looked at.

    `position` is where keys are to be rotated to; by default to where they were, `first`. Raises
    InvalidObject for streams that no encoder wrote, UnsupportedInput for a move that RoPE does not allow.
    """
    place = place_of(profile, dtype, first, tokens.size)
    target = first if position is None else position
    expected = set(stream_names(profile, level, place, tokens.size))
    if not expected <= streams.keys():
        raise InvalidObject(f"the block lacks streams {sorted(expected - streams.keys())[:5]}")
    for name in out:
        if name.startswith("k"):
            rotation_of(profile, name).check_move(first, tokens.size, target)
    if place.sinks:
        for name, kept in sinks_of(profile, streams[SINKS], place, target).items():
            np.copyto(out[name][:, :, : place.sinks], kept)
    if place.sinks == tokens.size:
        return

    def decode_part(index: int) -> None:
        part = profile.parts[index]
        rows = [streams[f"{name}.{index}"] for name in LEVELS[: depth(level) + 1]]
        coded = numbers_of(profile, part, rows, tokens.size - place.sinks)
        known = predicted(profile, part, tokens[place.sinks :])
        scale = token_steps(profile, coded.steps, level)
        restore(profile, part, coded.numbers, scale, known, out, place, target + place.sinks)

    CREW.side_by_side(decode_part, range(len(profile.parts)))


def stream_names(profile: Profile, level: str, place: Place, count: int) -> list[str]:
    """The streams of a block at a level, in reading order."""
    names = [SINKS] if place.sinks else []
    if place.sinks < count:
        names += [
            f"{name}.{index}" for name in LEVELS[: depth(level) + 1] for index in range(len(profile.parts))
        ]
    return names


def numbers_of(profile: Profile, part: Part, rows: list[Array], count: int) -> Coded:
    """A part's numbers for `count` tokens from its streams of the first levels. Raises InvalidObject."""
    coded = Coded(
        np.empty((part.width, count), np.int16),
        np.empty(part.width, np.uint8),
        np.empty(count, np.int8),
        np.empty(count, np.int8),
    )
    try:
        profile.coder.decode(rows, coded.numbers, coded.classes, part.classes, coded.steps, coded.energy)
    except (ValueError, TypeError) as error:
        raise InvalidObject(f"the block's streams do not decode: {error}") from error
    return coded


def sinks_of(profile: Profile, stream: Array, place: Place, position: int) -> dict[str, Array]:
    """The first tokens' numbers as they were kept, by array, keys moved to `position`.

    Raises InvalidObject.
    """
    item = container(place.dtype)
    shapes = {
        name: (layers, heads, place.sinks, dim)
        for name, (layers, heads, dim) in profile.array_shapes().items()
    }
    wanted = sum(math.prod(shape) for shape in shapes.values()) * item.itemsize
    if stream.size != wanted:
        raise InvalidObject(f"the block's first tokens take {stream.size} bytes, expected {wanted}")
    found = {}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * item.itemsize
        found[name] = stream[at : at + size].copy().view(item).reshape(shape)
        at += size
        if name.startswith("k") and position != place.first:
            rotation = rotation_of(profile, name)
            free = rotation.remove(to_floats(found[name], place.dtype), place.first)
            from_floats(rotation.apply(free, position), place.dtype, found[name])
    return found


def _encode_part(
    profile: Profile,
    part: Part,
    arrays: Mapping[str, Array],
    tokens: Tokens,
    place: Place,
    steps: npt.NDArray[np.int8],
    level: str,
) -> list[bytes]:
    values = components(profile, part, arrays, place)
    known = predicted(profile, part, tokens)
    if known is not None:
        values[: known.shape[0]] -= known
    coded = quantise(profile, part, values, steps, level, profile.known_tables.first)
    return profile.coder.encode(
        coded.numbers, coded.classes, part.classes, coded.steps, coded.energy, depth(level)
    )


def _sinks(profile: Profile, arrays: Mapping[str, Array], place: Place) -> Array:
    kept = [
        np.ascontiguousarray(arrays[name][:, :, : place.sinks]).reshape(-1) for name in profile.array_shapes()
    ]
    return np.concatenate(kept).view(np.uint8)


def _bytes(stream: bytes) -> Array:
    return np.frombuffer(stream, np.uint8)
