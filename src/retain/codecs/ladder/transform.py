"""Between a block's arrays and the components of a profile's parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retain import _native
from retain.codecs.base import Array
from retain.codecs.ladder.levels import STEP_RANGE
from retain.codecs.ladder.profile import Floats, Part, Profile, Segment
from retain.codecs.ladder.rope import Rotation, Turn
from retain.identity import Tokens

_LEAST_NORM = 1e-9
_LARGEST_HALF = np.float32(65504)
_PAD = 16


@dataclass(frozen=True)
class Place:
    """Where a block's coded tokens lie: their dtype, the first position, how many tokens are sinks."""

    dtype: str
    first: int
    sinks: int

    @property
    def start(self) -> int:
        """The position of the first token that is coded."""
        return self.first + self.sinks


def place_of(profile: Profile, dtype: str, first: int, count: int) -> Place:
    """The place of a block of `count` tokens at position `first`."""
    return Place(dtype, first, min(count, max(0, profile.sinks - first)))


def components(profile: Profile, part: Part, arrays: Mapping[str, Array], place: Place) -> Floats:
    """The components `[width, tokens]` of a block's coded tokens, not yet divided by any step."""
    tokens = next(iter(arrays.values())).shape[2] - place.sinks
    rows = _rows(part, tokens)
    at = 0
    for segment in part.segments:
        heads = _held(arrays, segment, place)
        size = heads.shape[0] * heads.shape[1] * heads.shape[3]
        mean, weight = part.mean[at : at + size], part.weight[at : at + size]
        turns = _turns(profile, segment, place.start, tokens, inverse=True)
        _native.ladder_gather(heads, place.dtype, turns, mean, weight, rows, at)
        at += size
    values = np.empty((part.width, tokens), np.float32)
    _native.ladder_project(part.basis.view(np.uint16), rows, values)
    return values


def restore(
    profile: Profile,
    part: Part,
    numbers: npt.NDArray[np.int16],
    scale: Floats,
    known: Floats | None,
    out: Mapping[str, Array],
    place: Place,
    position: int,
) -> None:
    """The inverse of `components`: write what numbers `[width, tokens]` of the tokens' steps `scale` stand
    for, with keys at `position` onwards; `known` are leading components to be added."""
    tokens = numbers.shape[1]
    rows = _rows(part, tokens)
    _native.ladder_spread(part.basis.view(np.uint16), numbers, scale, known, rows)
    at = 0
    for segment in part.segments:
        heads = _held(out, segment, place)
        size = heads.shape[0] * heads.shape[1] * heads.shape[3]
        mean, inverse = part.mean[at : at + size], part.inverse[at : at + size]
        turns = _turns(profile, segment, position, tokens, inverse=False)
        _native.ladder_scatter(heads, place.dtype, turns, mean, inverse, rows, at)
        at += size


def rotation_of(profile: Profile, array: str) -> Rotation:
    """The rotary positions of the keys of one array."""
    return profile.rotations[array]


def predicted(profile: Profile, part: Part, tokens: Tokens) -> Floats | None:
    """The components known from the tokens alone, `[some, tokens]`; None where the profile knows none."""
    if part.predicted is None or not part.predicted.size:
        return None
    rows = np.minimum(np.searchsorted(profile.token_ids, tokens), profile.token_ids.size - 1)
    known = profile.token_ids[rows] == tokens
    return np.ascontiguousarray(np.where(known[:, None], part.predicted[rows], 0).T.astype(np.float32))


def step_classes(
    profile: Profile, part: Part, arrays: Mapping[str, Array], place: Place
) -> npt.NDArray[np.int8]:
    """How much finer than others each token is to be quantised, in half-octaves, by its keys and values."""
    if part.probe is None:
        return np.zeros(next(iter(arrays.values())).shape[2] - place.sinks, np.int8)
    first = part.segments[0]
    suffix = first.array[1:]
    found, norms = _probed(profile, Segment(f"k{suffix}", first.start, first.stop), part.probe, arrays, place)
    size = part.probe.shape[2] - 3
    found += _log(norms) * part.probe[:, :, size, None]
    if f"v{suffix}" in arrays:
        values = Segment(f"v{suffix}", first.start, first.stop)
        none = np.zeros((*part.probe.shape[:2], arrays[values.array].shape[3]), np.float32)
        found += _log(_probed(profile, values, none, arrays, place)[1]) * part.probe[:, :, size + 1, None]
    found += part.probe[:, :, size + 2, None]
    return steps_of(profile, part, np.log2(np.exp2(np.clip(found, -100, 100)).mean(axis=1)).mean(axis=0))


def steps_of(profile: Profile, part: Part, importance: Floats) -> npt.NDArray[np.int8]:
    """Step classes from importances, the log2 of squared gradients."""
    steps = np.nan_to_num(np.rint(profile.alpha * (importance - part.center)))
    return np.asarray(np.clip(steps, *STEP_RANGE), np.int8)


def to_floats(array: Array, dtype: str) -> Floats:
    """Numbers of a KV dtype as float32."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def from_floats(numbers: Floats, dtype: str, out: Array) -> None:
    """Write float32 numbers as a KV dtype, rounded to the nearest finite one; `numbers` may be changed."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        np.copyto(out, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    elif dtype == "float16":
        np.clip(numbers, -_LARGEST_HALF, _LARGEST_HALF, out=numbers)
        np.copyto(out, numbers, casting="same_kind")
    else:
        np.copyto(out, numbers)


def _rows(part: Part, tokens: int) -> Floats:
    """Room for a part's numbers, a token a row, padded as the matrix products want it."""
    rows = np.empty((tokens, -(-part.width // _PAD) * _PAD), np.float32)
    rows[:, part.width :] = 0
    return rows


def _held(arrays: Mapping[str, Array], segment: Segment, place: Place) -> Array:
    return arrays[segment.array][segment.start : segment.stop, :, place.sinks :]


def _turns(profile: Profile, segment: Segment, first: int, count: int, *, inverse: bool) -> list[Turn | None]:
    if not segment.array.startswith("k"):
        return [None] * (segment.stop - segment.start)
    rotation = rotation_of(profile, segment.array)
    return [rotation.turn(row, first, count, inverse=inverse) for row in range(segment.start, segment.stop)]


def _probed(
    profile: Profile, segment: Segment, probe: Floats, arrays: Mapping[str, Array], place: Place
) -> tuple[Floats, Floats]:
    heads = _held(arrays, segment, place)
    dots = np.empty(heads.shape[:3], np.float32)
    norms = np.empty(heads.shape[:3], np.float32)
    turns = _turns(profile, segment, place.start, heads.shape[2], inverse=True)
    _native.ladder_probe(heads, place.dtype, turns, probe, dots, norms)
    return dots, norms


def _log(norms: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(norms, _LEAST_NORM)), np.float32)
