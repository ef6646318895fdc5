"""The objects that a store bench goes over: more bytes than the processor's caches hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BATCH_BYTES = 32 << 20


class Pool:
    """Objects of one size: `source`, and as many `target` places, all touched before anything is timed."""

    def __init__(self, size: int, pool_bytes: int) -> None:
        self.size = size
        self.batch = max(1, min(BATCH_BYTES, pool_bytes) // size)
        self.count = max(1, pool_bytes // size // self.batch) * self.batch
        self.source: Bytes = np.random.default_rng(size).integers(0, 256, (self.count, size), np.uint8)
        self.target: Bytes = np.ones((self.count, size), np.uint8)
        self.out: Bytes = np.ones(size, np.uint8)

    def turns(self, turn: int) -> range:
        """The objects of a round: the rounds go over the whole pool before they come back."""
        start = turn * self.batch % self.count
        return range(start, start + self.batch)

    def names(self, prefix: str) -> list[str]:
        return [f"{prefix}{number}" for number in range(self.count)]
