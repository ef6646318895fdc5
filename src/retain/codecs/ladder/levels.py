"""The ladder's levels, and the sizes that its format fixes (docs/codecs.md)."""

from __future__ import annotations

LEVELS = ("tiny", "balanced", "near", "fine")
"""From the coarsest quantiser to the finest; each step is a third of the one before."""

CLASSES = 40
"""Half-octave classes of how large a component's numbers are; class 24 has a mean of one step of `tiny`."""

UNIT_CLASS = 24
SYMBOLS = 128
ZERO_SYMBOL = 63
ESCAPE = 127
LARGEST = 1213
"""The largest number of `tiny`: three refinements of it still fit 16 bits."""

CONTEXTS = 4
STEP_RANGE = (-6, 9)
"""A token's step classes, in half-octaves: a token of class k has steps 2**(-k / 2) times as large."""

ENERGY_RANGE = (-4, 4)
TOTAL = 4096
"""What the frequencies of a table sum to."""


def depth(level: str) -> int:
    """The number of refinements of a level: 0 for tiny."""
    return LEVELS.index(level)


def multiple(level: str) -> int:
    """How many steps of `fine` a step of this level has."""
    return int(3 ** (len(LEVELS) - 1 - depth(level)))
