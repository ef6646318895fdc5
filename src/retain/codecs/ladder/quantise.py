"""From components to whole numbers, and the classes by which these are coded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retain import _native
from retain.codecs.ladder.levels import (
    CLASSES,
    ENERGY_RANGE,
    LARGEST,
    LEVELS,
    UNIT_CLASS,
    depth,
    multiple,
)
from retain.codecs.ladder.profile import Floats, Part, Profile
from retain.errors import RetainError

_LOUD_CLASS = UNIT_CLASS - 4
_FEWEST_LOUD = 16
_SMALLEST = np.float32(2.0**-40)


class Unencodable(RetainError):
    """Numbers that the ladder cannot hold within its bound: not finite, or too large."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A part's numbers at a level, `[components, tokens]`, the classes of its components, and the step and
    energy classes of its tokens."""

    numbers: npt.NDArray[np.int16]
    classes: npt.NDArray[np.uint8]
    steps: npt.NDArray[np.int8]
    energy: npt.NDArray[np.int8]


def quantise(
    profile: Profile,
    part: Part,
    values: Floats,
    steps: npt.NDArray[np.int8],
    level: str,
    first: npt.NDArray[np.uint8],
) -> Coded:
    """Quantise components `[width, tokens]`, to the nearest whole number of steps. Raises Unencodable."""
    numbers = np.empty(values.shape, np.int16)
    largest = np.empty(part.width, np.float32)
    scale = np.asarray(1 / token_steps(profile, steps, level), np.float32)
    _native.ladder_quantise(values, scale, numbers, largest)
    if not np.isfinite(largest).all() or largest.max() > LARGEST * 3 ** depth(level):
        raise Unencodable(f"the block holds numbers of {largest.max()} steps of {level}")
    unit = np.float32(profile.step * multiple(LEVELS[0]))
    energy = _energy(values, part.classes, unit)
    sizes = np.empty(part.width, np.float32)
    share = np.asarray(np.exp2(energy.astype(np.float32) / -2) / (unit * energy.size), np.float32)
    _native.ladder_sizes(values, share, sizes)
    return Coded(numbers, _classes(sizes, largest, level, first), steps, energy)


def token_steps(profile: Profile, steps: npt.NDArray[np.int8], level: str) -> Floats:
    """The step of each token at a level: 2 ** (class / 2) times finer than the level's own."""
    return np.asarray(np.float32(profile.step * multiple(level)) * np.exp2(steps.astype(np.float32) / -2))


def class_sizes() -> Floats:
    """The mean magnitude that each class stands for, in steps of tiny."""
    return np.exp2((np.arange(CLASSES, dtype=np.float32) - UNIT_CLASS) / 2)


def _energy(values: Floats, expected: npt.NDArray[np.uint8], unit: np.float32) -> npt.NDArray[np.int8]:
    """How loud each token is over the components that matter, in half-octaves above what is expected."""
    loud = np.flatnonzero(expected >= _LOUD_CLASS)
    if loud.size < _FEWEST_LOUD:
        loud = np.argsort(-expected.astype(np.int16), kind="stable")[:_FEWEST_LOUD]
    relative = np.zeros(values.shape[1], np.float32)
    factors = np.asarray(1 / (class_sizes()[expected[loud]] * unit * loud.size), np.float32)
    _native.ladder_loudness(values, loud.astype(np.uint32), factors, relative)
    energy: npt.NDArray[np.int8] = np.clip(
        np.rint(2 * np.log2(np.maximum(relative, _SMALLEST))), *ENERGY_RANGE
    ).astype(np.int8)
    return energy


def _classes(
    sizes: Floats, largest: Floats, level: str, first: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    classes = np.clip(np.rint(2 * np.log2(np.maximum(sizes, _SMALLEST))) + UNIT_CLASS, 0, CLASSES - 1)
    # A component that is all zero at a level is cheapest below that level's first class; others must not be.
    least = np.zeros(classes.size)
    for at in range(depth(level) + 1):
        some = largest > (3 ** (depth(level) - at) - 1) // 2
        least = np.maximum(least, np.where(some, first[at], 0))
        silent = ~some & (classes >= first[at]) & (classes <= first[at] + 1)
        classes = np.where(silent, np.maximum(least, first[at] - 1), classes)
    held: npt.NDArray[np.uint8] = np.maximum(classes, least).astype(np.uint8)
    return held
