"""Between a block's arrays and the components of a profile's parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retain.codecs.base import Array
from retain.codecs.ladder.levels import STEP_RANGE
from retain.codecs.ladder.profile import Floats, Part, Profile
from retain.codecs.ladder.rope import Rotation

_LEAST_NORM = 1e-9
_LARGEST_HALF = np.float32(65504)


@dataclass(frozen=True)
class Place:
    """Where a block's coded tokens lie: their dtype, the first position, how many of them are sinks."""

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


def freed(profile: Profile, arrays: Mapping[str, Array], place: Place) -> dict[str, Floats]:
    """A block's arrays without sinks, as float32, keys free of positions."""
    plain = {}
    for name, array in arrays.items():
        numbers = to_floats(array[:, :, place.sinks :], place.dtype)
        if name.startswith("k"):
            numbers = rotation_of(profile, name).remove(numbers, place.start)
        plain[name] = numbers
    return plain


def rotation_of(profile: Profile, array: str) -> Rotation:
    """The rotary positions of the keys of one array."""
    return Rotation([profile.layers[index] for index in profile.group(array).layers])


def components(part: Part, plain: Mapping[str, Floats]) -> Floats:
    """The components of a part, `[width, tokens]`, not yet divided by any step."""
    columns = [
        np.moveaxis(plain[s.array][s.start : s.stop], 2, 0).reshape(plain[s.array].shape[2], -1)
        for s in part.segments
    ]
    numbers = np.concatenate(columns, axis=1) if len(columns) > 1 else columns[0]
    return np.asarray(part.matrix @ ((numbers - part.mean) * part.weight).T)


def spread(part: Part, values: Floats, plain: Mapping[str, Floats]) -> None:
    """The inverse of `components`, into the arrays of `plain`; `values` may hold leading components only."""
    numbers = values.T @ part.matrix[: values.shape[0]]
    numbers /= part.weight
    numbers += part.mean
    at = 0
    for segment in part.segments:
        rows = plain[segment.array][segment.start : segment.stop]
        layers, heads, tokens, dim = rows.shape
        size = layers * heads * dim
        rows[...] = np.moveaxis(numbers[:, at : at + size].reshape(tokens, layers, heads, dim), 0, 2)
        at += size


def predicted(profile: Profile, part: Part, tokens: npt.NDArray[np.uint32]) -> Floats | None:
    """The components known from the tokens alone, `[some, tokens]`; None where the profile knows none."""
    if part.predicted is None or not part.predicted.size:
        return None
    rows = np.minimum(np.searchsorted(profile.token_ids, tokens), profile.token_ids.size - 1)
    known = profile.token_ids[rows] == tokens
    return np.ascontiguousarray(np.where(known[:, None], part.predicted[rows], 0).T.astype(np.float32))


def step_classes(profile: Profile, part: Part, plain: Mapping[str, Floats]) -> npt.NDArray[np.int8]:
    """How much finer than others each token is to be quantised, in half-octaves, by its keys and values."""
    tokens = next(iter(plain.values())).shape[2]
    if part.probe is None:
        return np.zeros(tokens, np.int8)
    first = part.segments[0]
    suffix = first.array[1:]
    rows = slice(first.start, first.stop)
    keys = plain[f"k{suffix}"][rows]
    values = plain.get(f"v{suffix}")
    size = keys.shape[3]
    found = np.einsum("lhtd,lhd->lht", keys, part.probe[:, :, :size], optimize=False)
    found += _log_norm(keys) * part.probe[:, :, size, None]
    if values is not None:
        found += _log_norm(values[rows]) * part.probe[:, :, size + 1, None]
    found += part.probe[:, :, size + 2, None]
    return steps_of(profile, part, np.log2(np.exp2(np.clip(found, -100, 100)).mean(axis=1)).mean(axis=0))


def steps_of(profile: Profile, part: Part, importance: Floats) -> npt.NDArray[np.int8]:
    """Step classes from importances, the log2 of squared gradients."""
    steps: npt.NDArray[np.int8] = np.clip(
        np.rint(profile.alpha * (importance - part.center)), *STEP_RANGE
    ).astype(np.int8)
    return steps


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


def _log_norm(rows: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(np.sqrt(np.einsum("lhtd,lhtd->lht", rows, rows)), _LEAST_NORM)))
