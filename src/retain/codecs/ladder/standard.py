"""Tables for numbers of a logistic law, for KV of which nothing is known.

They are part of the format, so every machine must compute the same: by decimals of 40 digits, whose
exponential is correctly rounded everywhere.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import lru_cache

import numpy as np

from retain.codecs.ladder.levels import (
    CLASSES,
    CONTEXTS,
    ESCAPE,
    LEVELS,
    SYMBOLS,
    TOTAL,
    UNIT_CLASS,
    ZERO_SYMBOL,
)
from retain.codecs.ladder.profile import Tables

_SIDE_REACH = CLASSES - 1
_HALF = Decimal("0.5")
_LOG2 = 2 * Decimal(2).ln(Context(prec=50))


@lru_cache(maxsize=1)
def standard_tables() -> Tables:
    """The tables, made once: 0.1 s."""
    with localcontext() as context:
        context.prec = 40
        frequencies = np.zeros((CLASSES + 3, SYMBOLS), np.uint16)
        splits = np.empty((len(LEVELS) - 1, CLASSES, CONTEXTS, 2), np.uint16)
        for own in range(CLASSES):
            size = Decimal(2) ** (Decimal(own - UNIT_CLASS) / 2)
            frequencies[own] = _numbers(_scale(size))
            for level in range(1, len(LEVELS)):
                for near in range(CONTEXTS):
                    splits[level - 1, own, near] = _digits(_scale(size * 3**level), near)
        for side in range(3):
            frequencies[CLASSES + side] = _side()
    return Tables(frequencies, splits, np.zeros(len(LEVELS), np.uint8))


def _scale(mean: Decimal) -> Decimal:
    """The logistic law's scale for a mean magnitude: E|x| = scale * 2 ln 2."""
    return mean / _LOG2


def _below(edge: Decimal, scale: Decimal) -> Decimal:
    return 1 / (1 + (-edge / scale).exp())


def _numbers(scale: Decimal) -> list[int]:
    below = [_below(Decimal(edge) + _HALF, scale) for edge in range(ZERO_SYMBOL + 1)]
    likely = [2 * below[0] - 1] + [below[i] - below[i - 1] for i in range(1, ZERO_SYMBOL + 1)]
    rows = [likely[abs(symbol - ZERO_SYMBOL)] for symbol in range(ESCAPE)]
    return _frequencies([*rows, 2 * (1 - below[-1])], ESCAPE)


def _digits(scale: Decimal, near: int) -> tuple[int, int]:
    edges = [_below(3 * near + Decimal(edge) + _HALF, scale) for edge in (-2, -1, 0, 1)]
    parts = [edges[i + 1] - edges[i] for i in range(3)]
    whole = sum(parts) or Decimal(1)
    low = max(1, min(TOTAL - 2, int(parts[0] / whole * TOTAL + _HALF)))
    middle = max(1, min(TOTAL - 1 - low, int(parts[1] / whole * TOTAL + _HALF)))
    return low, low + middle


def _side() -> list[int]:
    sizes = [abs(symbol - ZERO_SYMBOL) for symbol in range(SYMBOLS)]
    return _frequencies(
        [Decimal(1) / (1 + size) ** 2 if size <= _SIDE_REACH else Decimal(0) for size in sizes], ZERO_SYMBOL
    )


def _frequencies(likely: list[Decimal], needed: int) -> list[int]:
    """Whole frequencies that sum to 4096: rounded, at least 1 where above half of that or needed, and what is
    then left over given to the most likely symbol."""
    total = sum(likely)
    made = [int(each / total * TOTAL + _HALF) for each in likely]
    made[needed] = max(1, made[needed])
    made = [min(each, TOTAL - 2) for each in made]
    most = max(range(SYMBOLS), key=lambda symbol: (likely[symbol], -symbol))
    made[most] += TOTAL - sum(made)
    return made
