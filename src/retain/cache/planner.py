"""The planner: load a kept prefix, or only its first part, where that is predicted to beat computing it.

Both sides are measured as the cache runs: a prefill as a fixed time, a time a token and a time for each token
that attention goes over; a tier as latency an object and a time a byte. Until both are known, what is kept is
loaded, but a load is not waited for longer than computing would take.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from retain.model import ModelSpec

KEPT = 6
"""Observations kept of each size: a thousand small ones say nothing about a large one."""

RECENT = 0.7
"""How much an observation counts beside the next one of the same model or tier, down to LEAST_WEIGHT."""

LEAST_WEIGHT = 0.02

CHANGED = 2.0
"""A tier that was off by this factor twice in a row, both times to the same side, has changed: what was seen
of it before is forgotten.
"""

LATE = 2.0
"""What did not come in time is taken to need so many times as long as it was waited for."""

LEAST_PATIENCE = 1.0
"""Seconds that a load is waited for, however fast computing is: a machine that is busy now was not when the
prefill was measured.
"""

PROBE_SECONDS = 1.0
"""How long after one probe of a tier the next may begin, at the least."""

PROBE_SHARE = 0.05
"""How much of the time a tier may spend on probes."""

TELLING_TOKENS = 16
"""What fewer tokens take is nearly all of it one pass: alone it says nothing of how long a prompt takes."""

_PREFILL = (30.0, 1.0, 10.0)
_LOAD = (3.0, 1.0)
"""What explains an observation that more than one term could: the one with the smallest number most."""

_RIDGE = 1e-4


class Planner:
    """Predicts prefill and load times from what was observed. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill: dict[bytes, _Fit] = {}
        self._tiers: dict[str, _Fit] = {}
        self._probe_at: dict[str, float] = {}

    def observe_prefill(self, spec: ModelSpec, first: int, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` tokens behind `first` others took `seconds`."""
        if tokens > 0 and seconds > 0:
            with self._lock:
                if tokens < TELLING_TOKENS and spec.variant not in self._prefill:
                    return
                fit = self._prefill.setdefault(spec.variant, _Fit(_PREFILL))
                fit.add(_prefill_terms(first, tokens), seconds, tokens)

    def observe_load(
        self, tier: str, objects: int, size: int, seconds: float, *, complete: bool = True
    ) -> None:
        """Reading `objects` objects of `size` bytes in all from `tier` took `seconds`, verification and
        decoding included. Not `complete`: it was given up after so long.
        """
        if size > 0 and seconds > 0:
            with self._lock:
                fit = self._tiers.setdefault(tier, _Fit(_LOAD))
                taken = seconds if complete else LATE * seconds
                fit.note_change((float(objects), float(size)), taken)
                fit.add((float(objects), float(size)), taken, size)

    def prefill_seconds(self, spec: ModelSpec, first: int, tokens: int) -> float | None:
        """Predicted seconds to compute `tokens` tokens behind `first` others; None before the first
        observation.
        """
        with self._lock:
            fit = self._prefill.get(spec.variant)
            return fit.predict(_prefill_terms(first, tokens)) if fit and tokens > 0 else None

    def load_seconds(self, tier: str, objects: int, size: int) -> float | None:
        """Predicted seconds to read objects from `tier`; None before the first observation."""
        with self._lock:
            fit = self._tiers.get(tier)
            return fit.predict((float(objects), float(size))) if fit else None

    def tier_line(self, tier: str) -> tuple[float, float] | None:
        """Predicted (seconds an object, seconds a byte) of a tier; None before the first observation."""
        with self._lock:
            fit = self._tiers.get(tier)
            return None if fit is None else (fit.terms[0], fit.terms[1])

    def set_tier_line(self, tier: str, line: tuple[float, float]) -> None:
        """Take over what another process measured of a tier."""
        with self._lock:
            self._tiers[tier] = _Fit.of(_LOAD, line)

    def patience(self, spec: ModelSpec, first: int, tokens: int) -> float | None:
        """How many seconds the KV of `tokens` tokens behind `first` others is worth waiting for: as long as
        computing it would take, so that a tier that turned slow costs no more than that. None where that is
        not known.
        """
        seconds = self.prefill_seconds(spec, first, tokens)
        return None if seconds is None else max(LEAST_PATIENCE, seconds)

    def best_prefix(
        self, spec: ModelSpec, blocks: Sequence[tuple[int, int, Sequence[tuple[str, int]]]], total: int
    ) -> int:
        """How many of the first `blocks` to load so that loading and computing the rest of `total` tokens is
        soonest.

        A block is (first token, tokens used, [(tier, bytes) of its objects]).
        """
        soonest = self.prefill_seconds(spec, 0, total)
        if not blocks or soonest is None:
            return len(blocks)
        best = 0
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
        return best

    def may_probe(self, tier: str) -> bool:
        """Whether it is time for a probe of `tier`. Who is told so probes it, and says so by `probed`."""
        with self._lock:
            if time.monotonic() < self._probe_at.get(tier, 0.0):
                return False
            self._probe_at[tier] = float("inf")
            return True

    def probed(self, tier: str, seconds: float) -> None:
        """A probe of `tier` has ended, after so many seconds."""
        with self._lock:
            self._probe_at[tier] = time.monotonic() + max(PROBE_SECONDS, seconds / PROBE_SHARE)


class _Fit:
    """A fit of seconds = sum of coefficient x term, no coefficient negative, to the last observations.

    Least squares of the relative errors: a prefill of 16 tokens says as much as one of 4,096. With few
    observations, a small penalty decides which term explains them.
    """

    def __init__(self, penalties: Sequence[float]) -> None:
        self._penalties = np.array(penalties)
        self._rows: dict[int, deque[tuple[int, tuple[float, ...], float]]] = {}
        self._count = 0
        self._off = 0
        self._terms: tuple[float, ...] | None = None

    @classmethod
    def of(cls, penalties: Sequence[float], terms: tuple[float, ...]) -> _Fit:
        """A fit that is known already."""
        fit = cls(penalties)
        fit._terms = terms
        return fit

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients."""
        if self._terms is None:
            self._terms = self._solve()
        return self._terms

    def predict(self, x: tuple[float, ...]) -> float:
        return sum(a * b for a, b in zip(self.terms, x, strict=True))

    def add(self, x: tuple[float, ...], seconds: float, size: int) -> None:
        """An observation; `size` tells large ones from small ones."""
        kept = self._rows.setdefault(size.bit_length() // 2, deque(maxlen=KEPT))
        kept.append((self._count, x, seconds))
        self._count += 1
        self._terms = None

    def note_change(self, x: tuple[float, ...], seconds: float) -> None:
        """Forget the past where this observation, the next to be added, shows that it is over."""
        if not self._rows:
            return
        predicted = self.predict(x)
        off = 1 if seconds > CHANGED * predicted else -1 if CHANGED * seconds < predicted else 0
        if off and off == self._off:
            for number, kept in list(self._rows.items()):
                self._rows[number] = deque((row for row in kept if row[0] == self._count - 1), maxlen=KEPT)
        self._off = off

    def _solve(self) -> tuple[float, ...]:
        rows = [row for kept in self._rows.values() for row in kept]
        seconds = np.array([row[2] for row in rows])
        design = np.array([row[1] for row in rows])
        age = self._count - 1 - np.array([row[0] for row in rows])
        weight = np.sqrt(np.maximum(RECENT**age, LEAST_WEIGHT)) / np.maximum(seconds, 1e-9)
        scale = np.maximum(design.max(axis=0), 1e-30)
        # Both sides in units of the largest observation, so that the penalties mean the same for all.
        unit = float(seconds.max())
        found = _non_negative(
            design / scale * weight[:, None] * unit,
            seconds * weight,
            _RIDGE * self._penalties,
        )
        return tuple(float(each) for each in found * unit / scale)


def _non_negative(
    a: npt.NDArray[np.float64], y: npt.NDArray[np.float64], ridge: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The x >= 0 with the least |a x - y|^2 + sum of ridge * x^2, for the few columns there are here."""
    products, target = a.T @ a + np.diag(ridge), a.T @ y
    best, least = np.zeros(a.shape[1]), 0.0
    columns = range(a.shape[1])
    for count in range(1, a.shape[1] + 1):
        for chosen in map(list, itertools.combinations(columns, count)):
            x = np.linalg.solve(products[np.ix_(chosen, chosen)], target[chosen])
            loss = -float(target[chosen] @ x)  # |a x - y|^2 + penalty, less the constant |y|^2
            if (x >= 0).all() and loss < least:
                best, least = np.zeros(a.shape[1]), loss
                best[chosen] = x
    return best


def _prefill_terms(first: int, tokens: int) -> tuple[float, float, float]:
    """One pass, its tokens, and tokens times the mean number of tokens before them: what attention has to go
    over.
    """
    return 1.0, float(tokens), tokens * (first + tokens / 2)
