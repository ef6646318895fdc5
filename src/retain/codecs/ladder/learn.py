"""Learning the entropy coder's tables, and the classes to expect, from samples of a model's KV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from retain.codecs.base import Array
from retain.codecs.ladder.levels import (
    CLASSES,
    CONTEXTS,
    ENERGY_RANGE,
    ESCAPE,
    LEVELS,
    STEP_RANGE,
    SYMBOLS,
    TOTAL,
    UNIT_CLASS,
    ZERO_SYMBOL,
    multiple,
)
from retain.codecs.ladder.profile import Floats, Part, Profile, Tables
from retain.codecs.ladder.quantise import Coded, class_sizes, quantise
from retain.codecs.ladder.transform import components, place_of, predicted, step_classes

FIRST = np.array([16, 13, 10, 7], np.uint8)
"""Below these classes, a mean of 1/16 of a step, components are all zero."""

_FINEST = LEVELS[-1]
_PRIOR = 200.0
"""How many numbers the Laplace law that tables start from counts for."""

Sample = tuple[Mapping[str, Array], npt.NDArray[np.uint32], int]
"""A block's arrays, its tokens, and the position of its first token."""


def learn_tables(profile: Profile, samples: Iterable[Sample], dtype: str) -> Profile:
    """The profile with the tables, and the classes to expect, that code the samples best.

    `samples` are gone through once; their components are kept in memory meanwhile.
    """
    kept: list[list[tuple[Floats, npt.NDArray[np.int8]]]] = [[] for _ in profile.parts]
    for arrays, tokens, first in samples:
        place = place_of(profile, dtype, first, tokens.size)
        for index, part in enumerate(profile.parts):
            values = components(profile, part, arrays, place)
            known = predicted(profile, part, tokens[place.sinks :])
            if known is not None:
                values[: known.shape[0]] -= known
            kept[index].append((values, step_classes(profile, part, arrays, place)))
    counts = Counts()
    parts = []
    for part, rows in zip(profile.parts, kept, strict=True):
        expecting = replace(part, classes=_expected(profile, part, rows))
        coded = [quantise(profile, expecting, values, steps, _FINEST, FIRST) for values, steps in rows]
        typical = np.rint(np.median([each.classes for each in coded], axis=0)).astype(np.uint8)
        for each in coded:
            counts.add(each, typical)
        parts.append(replace(expecting, classes=typical))
    return replace(profile, parts=tuple(parts), tables=counts.tables())


class Counts:
    """How often each symbol came."""

    def __init__(self) -> None:
        self.numbers = np.zeros((CLASSES, SYMBOLS))
        self.digits = np.zeros((len(LEVELS) - 1, CLASSES, CONTEXTS, 3))
        self.sides = np.zeros((3, SYMBOLS))

    def add(self, coded: Coded, expected: npt.NDArray[np.uint8]) -> None:
        """Count the symbols of a part at the finest level."""
        shift = coded.steps.astype(np.int16) + coded.energy
        numbers = coded.numbers.astype(np.int32)
        for level in range(len(LEVELS) - 1, 0, -1):
            coarse = coarser(numbers)
            rows = coded.classes >= FIRST[level]
            own = np.clip(coded.classes[rows, None] + shift, FIRST[level], CLASSES - 1)
            digits = numbers[rows] - 3 * coarse[rows]
            folded = np.where(coarse[rows] < 0, -digits, digits) + 1
            place = (own * CONTEXTS + np.minimum(np.abs(coarse[rows]), CONTEXTS - 1)) * 3 + folded
            self.digits[level - 1] += np.bincount(place.ravel(), minlength=CLASSES * CONTEXTS * 3).reshape(
                CLASSES, CONTEXTS, 3
            )
            numbers = coarse
        rows = coded.classes >= FIRST[0]
        own = np.clip(coded.classes[rows, None] + shift, FIRST[0], CLASSES - 1)
        symbols = np.where(np.abs(numbers[rows]) <= ZERO_SYMBOL, numbers[rows] + ZERO_SYMBOL, ESCAPE)
        self.numbers += np.bincount((own * SYMBOLS + symbols).ravel(), minlength=CLASSES * SYMBOLS).reshape(
            CLASSES, SYMBOLS
        )
        offsets = coded.classes.astype(np.int16) - expected
        for side, values in enumerate((coded.steps, coded.energy, offsets)):
            self.sides[side] += np.bincount(values + np.int16(ZERO_SYMBOL), minlength=SYMBOLS)

    def tables(self) -> Tables:
        """Tables for these counts, with what a Laplace law would give where there are few."""
        sizes = class_sizes().astype(np.float64)
        frequencies = np.zeros((CLASSES + 3, SYMBOLS), np.uint16)
        for row in range(CLASSES):
            prior = _laplace(sizes[row])
            weights = self.numbers[row] + _PRIOR * prior
            frequencies[row] = frequencies_of(weights, np.arange(SYMBOLS) == ESCAPE)
        ranges = (STEP_RANGE, ENERGY_RANGE, (1 - CLASSES, CLASSES - 1))
        for side, (low, high) in enumerate(ranges):
            allowed = np.zeros(SYMBOLS, bool)
            allowed[low + ZERO_SYMBOL : high + ZERO_SYMBOL + 1] = True
            frequencies[CLASSES + side] = frequencies_of(
                np.where(allowed, self.sides[side] + 0.01, 0), allowed
            )
        return Tables(frequencies, self._splits(sizes), FIRST.copy())

    def _splits(self, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
        splits = np.empty((len(LEVELS) - 1, CLASSES, CONTEXTS, 2), np.uint16)
        for level in range(1, len(LEVELS)):
            for own in range(CLASSES):
                for context in range(CONTEXTS):
                    weights = self.digits[level - 1, own, context] + 20 * _laplace_digits(
                        sizes[own] * 3**level, context
                    )
                    if context == 0:  # the sign of 0 is unknown: both sides are alike
                        weights[0] = weights[2] = (weights[0] + weights[2]) / 2
                    low, middle, _ = frequencies_of(weights, np.ones(3, bool)).tolist()
                    splits[level - 1, own, context] = (low, low + middle)
        return splits


def coarser(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The numbers of the next coarser quantiser: the nearest whole numbers to a third."""
    return np.where(numbers >= 0, (numbers + 1) // 3, -((1 - numbers) // 3)).astype(np.int32)


def frequencies_of(weights: Array, needed: Array) -> npt.NDArray[np.uint16]:
    """Whole frequencies that sum to 4096, in proportion to weights; those needed, at least two, are at least
    1, and symbols rarer than half of that have none."""
    share = weights / weights.sum() * TOTAL
    made = np.where(needed | (share >= 0.5), np.maximum(np.rint(share), 1), 0).astype(np.int64)
    while (excess := int(made.sum()) - TOTAL) != 0:
        # One at a time where it costs least: from the symbol whose frequency is the most above its share.
        change = -1 if excess > 0 else 1
        able = made > 1 if change < 0 else made > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = np.where(able, share * np.log((made + 0.0) / (made + change)), np.inf)
        made[int(np.argmin(cost))] += change
    return made.astype(np.uint16)


def _expected(
    profile: Profile, part: Part, rows: list[tuple[Floats, npt.NDArray[np.int8]]]
) -> npt.NDArray[np.uint8]:
    total = sum(values.shape[1] for values, _ in rows)
    mean = sum((np.abs(values).sum(axis=1) for values, _ in rows), np.zeros(part.width, np.float32)) / total
    scaled = np.maximum(mean / (profile.step * multiple(LEVELS[0])), 2.0**-40)
    typical: npt.NDArray[np.uint8] = np.clip(
        np.rint(2 * np.log2(scaled)) + UNIT_CLASS, 0, CLASSES - 1
    ).astype(np.uint8)
    return typical


def _laplace(mean: float) -> npt.NDArray[np.float64]:
    """How likely each symbol is for numbers of a Laplace law of mean magnitude `mean`."""
    sizes = np.abs(np.arange(SYMBOLS) - ZERO_SYMBOL).astype(float)
    likely = np.where(
        sizes == 0,
        1 - np.exp(-0.5 / mean),
        0.5 * (np.exp(-(np.maximum(sizes, 1) - 0.5) / mean) - np.exp(-(sizes + 0.5) / mean)),
    )
    likely[ESCAPE] = np.exp(-(ZERO_SYMBOL + 0.5) / mean)
    return np.asarray(likely, np.float64)


def _laplace_digits(mean: float, context: int) -> npt.NDArray[np.float64]:
    """How likely digits -1, 0, 1 are behind a coarse number, for a mean magnitude in the finer steps."""
    edges = 3 * context + np.array([-1.5, -0.5, 0.5, 1.5])
    if context == 0:
        likely = np.array([0.5 * (np.exp(-0.5 / mean) - np.exp(-1.5 / mean)), 1 - np.exp(-0.5 / mean), 0.0])
        likely[2] = likely[0]
    else:
        likely = np.exp(-(edges[:-1] - edges[0]) / mean) - np.exp(-(edges[1:] - edges[0]) / mean)
    return np.asarray(np.maximum(likely / likely.sum(), 1e-6), np.float64)
