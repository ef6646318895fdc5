"""The planner: load a kept prefix, or only its first part, where that is predicted to beat computing it.

Both sides are measured as the cache runs: prefill as a*n + b*n*(mean context), a model's cost being linear in
tokens plus attention over what came before; a tier as latency + bytes / bandwidth. Until both are known, what
is kept is loaded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from retain.model import ModelSpec

WINDOW = 32
"""Observations kept of each model and tier: enough to smooth noise, few enough to follow a change of load."""

FORGET = 0.9
"""How much of a tier's predicted time survives a decision against it: it is tried again sooner or later."""


@dataclass
class _Line:
    """A least-squares fit of seconds = a*x + b*y with a, b >= 0 over the last observations."""

    rows: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def predict(self, x: float, y: float) -> float | None:
        line = self.fit()
        return None if line is None else line[0] * x + line[1] * y

    def fit(self) -> tuple[float, float] | None:
        """(a, b), None before the first observation."""
        if not self.rows:
            return None
        data = np.array(self.rows)
        design, seconds = data[:, :2], data[:, 2]
        # Relative errors count, not absolute ones: a row of 16 tokens says as much as one of 4,096.
        weight = 1.0 / np.maximum(seconds, 1e-9)
        scale = np.maximum(design.max(axis=0), 1e-30)
        solution, *_ = np.linalg.lstsq(design / scale * weight[:, None], seconds * weight, rcond=None)
        a, b = (solution / scale).tolist()
        if a < 0 or b < 0:
            kept = 1 if a < 0 else 0
            other = float((design[:, kept] * seconds).sum() / max(float((design[:, kept] ** 2).sum()), 1e-30))
            a, b = (0.0, other) if kept == 1 else (other, 0.0)
        return float(a), float(b)


class Planner:
    """Predicts prefill and load times from what was observed. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill: dict[bytes, _Line] = {}
        self._tiers: dict[str, _Line] = {}
        self._trust: dict[str, float] = {}

    def observe_prefill(self, spec: ModelSpec, first: int, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` tokens behind `first` others took `seconds`."""
        if tokens > 0 and seconds > 0:
            with self._lock:
                line = self._prefill.setdefault(spec.variant, _Line())
                line.rows.append((float(tokens), _context(first, tokens), seconds))

    def observe_load(self, tier: str, objects: int, size: int, seconds: float) -> None:
        """Reading `objects` objects of `size` bytes in all from `tier` took `seconds`, verification and
        decoding included.
        """
        if size > 0 and seconds > 0:
            with self._lock:
                self._tiers.setdefault(tier, _Line()).rows.append((float(objects), float(size), seconds))
                self._trust[tier] = 1.0

    def prefill_seconds(self, spec: ModelSpec, first: int, tokens: int) -> float | None:
        """Predicted seconds to compute `tokens` tokens behind `first` others; None before the first
        observation.
        """
        with self._lock:
            line = self._prefill.get(spec.variant)
            return line.predict(float(tokens), _context(first, tokens)) if line and tokens > 0 else None

    def load_seconds(self, tier: str, objects: int, size: int) -> float | None:
        """Predicted seconds to read objects from `tier`; None before the first observation."""
        with self._lock:
            line = self._tiers.get(tier)
            predicted = line.predict(float(objects), float(size)) if line else None
            return None if predicted is None else predicted * self._trust.get(tier, 1.0)

    def tier_line(self, tier: str) -> tuple[float, float] | None:
        """Predicted (seconds an object, seconds a byte) of a tier; None before the first observation."""
        with self._lock:
            line = self._tiers.get(tier)
            fit = line.fit() if line else None
            trust = self._trust.get(tier, 1.0)
            return None if fit is None else (fit[0] * trust, fit[1] * trust)

    def set_tier_line(self, tier: str, line: tuple[float, float]) -> None:
        """Take over what another process measured of a tier."""
        with self._lock:
            rows = self._tiers.setdefault(tier, _Line()).rows
            rows.clear()
            rows.extend([(1.0, 0.0, line[0]), (0.0, 1e9, line[1] * 1e9)])
            self._trust[tier] = 1.0

    def best_prefix(
        self, spec: ModelSpec, blocks: Sequence[tuple[int, int, Sequence[tuple[str, int]]]], total: int
    ) -> int:
        """How many of the first `blocks` to load so that loading and computing the rest of `total` tokens is
        soonest.

        A block is (first token, tokens used, [(tier, bytes) of its objects]).
        """
        if not blocks or self.prefill_seconds(spec, 0, 1) is None:
            return len(blocks)
        best, soonest = 0, self.prefill_seconds(spec, 0, total) or 0.0
        load: dict[str, list[int]] = {}
        for index, (first, tokens, objects) in enumerate(blocks):
            for tier, size in objects:
                sums = load.setdefault(tier, [0, 0])
                sums[0] += 1
                sums[1] += size
            seconds = sum(self.load_seconds(tier, count, size) or 0.0 for tier, (count, size) in load.items())
            done = first + tokens
            seconds += self.prefill_seconds(spec, done, total - done) or 0.0
            if seconds <= soonest:
                best, soonest = index + 1, seconds
        if best < len(blocks):
            self._forgive({tier for _, _, objects in blocks[best:] for tier, _ in objects})
        return best

    def _forgive(self, tiers: set[str]) -> None:
        with self._lock:
            for tier in tiers:
                self._trust[tier] = self._trust.get(tier, 1.0) * FORGET


def _context(first: int, tokens: int) -> float:
    """Tokens times the mean number of tokens before them: what attention has to go over."""
    return tokens * (first + tokens / 2)
