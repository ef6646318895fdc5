"""From components to whole numbers, and the classes by which these are coded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

Numbers = npt.NDArray[np.int16]

_LOUD_CLASS = UNIT_CLASS - 4
_FEWEST_LOUD = 16
_SMALLEST = np.float32(2.0**-40)


class Unencodable(RetainError):
    """Numbers that the ladder cannot hold within its bound: not finite, or too large."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A part's numbers at a level, `[components, tokens]`, the classes of its components, and the step and
    energy classes of its tokens."""

    numbers: Numbers
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
    scaled = values * (step_sizes(steps) / np.float32(profile.step * multiple(level)))
    np.rint(scaled, out=scaled)
    largest = np.abs(scaled).max(axis=1)
    if not np.isfinite(largest).all() or largest.max() > LARGEST * 3 ** depth(level):
        raise Unencodable(f"the block holds numbers of {largest.max()} steps of {level}")
    sizes = np.abs(values)
    sizes *= np.float32(1 / (profile.step * multiple(LEVELS[0])))
    energy = _energy(sizes, part.classes)
    classes = _classes(sizes, energy, largest, level, first)
    return Coded(scaled.astype(np.int16), classes, steps, energy)


def dequantise(profile: Profile, coded: Coded, level: str) -> Floats:
    """The components that a part's numbers stand for, those behind the last that is not zero left out."""
    used = np.flatnonzero(coded.numbers.any(axis=1))
    count = int(used[-1]) + 1 if used.size else 0
    return coded.numbers[:count] * (np.float32(profile.step * multiple(level)) / step_sizes(coded.steps))


def step_sizes(steps: npt.NDArray[np.int8]) -> Floats:
    """How many times finer each token's step is: 2 ** (steps / 2)."""
    return np.exp2(steps.astype(np.float32) / 2)


def class_sizes() -> Floats:
    """The mean magnitude that each class stands for, in steps of tiny."""
    return np.exp2((np.arange(CLASSES, dtype=np.float32) - UNIT_CLASS) / 2)


def _energy(sizes: Floats, expected: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """How loud each token is over the components that matter, in half-octaves above what is expected."""
    loud = np.flatnonzero(expected >= _LOUD_CLASS)
    if loud.size < _FEWEST_LOUD:
        loud = np.argsort(-expected.astype(np.int16), kind="stable")[:_FEWEST_LOUD]
    relative = (sizes[loud] / class_sizes()[expected[loud], None]).mean(axis=0)
    energy: npt.NDArray[np.int8] = np.clip(
        np.rint(2 * np.log2(np.maximum(relative, _SMALLEST))), *ENERGY_RANGE
    ).astype(np.int8)
    return energy


def _classes(
    sizes: Floats, energy: npt.NDArray[np.int8], largest: Floats, level: str, first: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    mean = sizes @ np.exp2(-energy.astype(np.float32) / 2) / np.float32(sizes.shape[1])
    classes = np.clip(np.rint(2 * np.log2(np.maximum(mean, _SMALLEST))) + UNIT_CLASS, 0, CLASSES - 1)
    # A component that is all zero at a level is cheapest below that level's first class; others must not be.
    least = np.zeros(classes.size)
    for at in range(depth(level) + 1):
        some = largest > (3 ** (depth(level) - at) - 1) // 2
        least = np.maximum(least, np.where(some, first[at], 0))
        silent = ~some & (classes >= first[at]) & (classes <= first[at] + 1)
        classes = np.where(silent, np.maximum(least, first[at] - 1), classes)
    held: npt.NDArray[np.uint8] = np.maximum(classes, least).astype(np.uint8)
    return held
