"""Audit: a share of hits is computed again while the model is idle, and compared with what was reused.

Two computations of the same tokens differ by rounding, so the engine's own noise is measured first: a prompt
in two chunkings, once, and again when one comes that is twice as long. What differs by more than ten times
that was not computed by this model from these tokens. Of KV that was coded with loss, how much it changed the
next tokens is measured instead, and kept by model and level (retain.codecs.ladder.measured).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from retain.cache import BlockCache
from retain.codecs.ladder.measured import record
from retain.identity import Tokens

from .coded import loss_of, quality_used
from .host import Host
from .layers import Rows, rows_of
from .session import Reused, Session

log = logging.getLogger("retain.audit")

MOST_CHUNKS = (512, 384)
LEAST_TOKENS = 64
"""A shorter prompt says nothing about noise: it is computed in one way only."""

FACTOR = 10.0
FLOOR_ULPS = 8.0
"""Differences below so many steps of the dtype, relative to the largest number, are never an alarm."""

PATIENCE_SECONDS = 120.0
"""How long an audit waits for the model to be idle before it is given up."""


@dataclass(frozen=True)
class Noise:
    """Largest differences between two computations of a prompt, relative to the largest number: of KV, and of
    logits."""

    tokens: int
    kv: float
    logits: float


class Auditor:
    """Compares one hit at a time, in a thread of its own."""

    def __init__(self, cache: BlockCache, host: Host) -> None:
        self._cache = cache
        self._host = host
        self._state = threading.Condition()
        self._waiting: Session | None = None
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.noise: Noise | None = None

    def offer(self, session: Session) -> None:
        """Audit this finished request when the model is idle; skipped while another audit is under way."""
        with self._state:
            if self._closed or self._busy or self._waiting is not None:
                self._cache.count("audits_skipped")
                return
            session.buffers.use()
            self._waiting = session
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="retain-audit", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def settle(self, timeout: float) -> bool:
        """Wait until no audit is under way."""
        with self._state:
            return self._state.wait_for(lambda: self._waiting is None and not self._busy, timeout)

    def close(self) -> None:
        """End the thread, between two chunks of a recomputation if there is one."""
        with self._state:
            self._closed = True
            waiting, self._waiting = self._waiting, None
            self._state.notify_all()
        if waiting is not None:
            waiting.buffers.done()
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)

    def _work(self) -> None:
        while True:
            with self._state:
                self._busy = False
                self._state.notify_all()
                self._state.wait_for(lambda: self._waiting is not None or self._closed)
                session, self._waiting = self._waiting, None
                self._busy = session is not None
            if session is None:
                return
            try:
                self._audit(session)
            except Exception as error:
                self._cache.failure("an audit could not be made", f"{type(error).__name__}: {error}")
            finally:
                session.buffers.done()
                del session

    def _audit(self, session: Session) -> None:
        if quality_used(session) != "exact":
            self._audit_coded(session)
            return
        tokens = session.chain.tokens
        chunks = [min(most, int(tokens.size) // parts + 1) for parts, most in enumerate(MOST_CHUNKS, 2)]
        again = self._compute(tokens, chunks[0])
        if again is None:
            self._cache.count("audits_skipped")
            return
        fresh, logits = again
        noise = self.noise
        if noise is None or noise.tokens < tokens.size // 2:
            other = self._compute(tokens, chunks[1]) if tokens.size >= LEAST_TOKENS else None
            if other is None:
                self._cache.count("audits_skipped")
                return
            whole = Reused(b"", 0, int(tokens.size))
            kv, far = _distance(fresh, other[0], whole), _relative(logits, other[1])
            if noise is not None:
                kv, far = max(kv, noise.kv), max(far, noise.logits)
            noise = self.noise = Noise(int(tokens.size), kv, far)
        self._cache.count("audits")
        floor = FLOOR_ULPS * float(torch.finfo(fresh[0].k.dtype).eps)
        wrong = [
            part
            for part in session.reused
            if not _distance(fresh, session.rows, part) <= max(FACTOR * noise.kv, floor)
        ]
        far = 0.0 if session.logits is None else _relative(logits, session.logits)
        if not wrong and far <= max(FACTOR * noise.logits, floor):
            return
        self._cache.count("audit_failures")
        keys = [part.key for part in wrong]
        log.error(
            "audit: reused KV differs from a recomputation (logits by %.2g of their largest, "
            "noise is %.2g); wrong blocks: "
            "%s; reused were: %s",
            far,
            noise.logits,
            ", ".join(key.hex() for key in keys) or "none by itself",
            ", ".join(part.key.hex() for part in session.reused),
        )
        if keys:
            self._cache.drop(keys)

    def _audit_coded(self, session: Session) -> None:
        """What was decoded, or computed on such, differs by design: what counts is what that changes."""
        found = loss_of(session, self._host, self._run)
        if found is None:
            self._cache.count("audits_skipped")
            return
        self._cache.count("audits")
        record(self._host.spec.kin, found.quality, found.kl, found.tokens)

    def _compute(self, tokens: Tokens, chunk: int) -> tuple[tuple[Rows, ...], Tensor] | None:
        """The KV and last logits of a prompt; None when requests kept the model busy too long."""
        cache = self._host.empty_cache(int(tokens.size))
        logits = self._run(tokens, cache, 1, chunk)
        return None if logits is None else (rows_of(cache), logits[-1])

    def _run(
        self, tokens: Tokens, cache: DynamicCache, keep: int, chunk: int = MOST_CHUNKS[0]
    ) -> Tensor | None:
        """The logits of the last `keep` tokens behind what a cache holds, run in chunks while nobody waits;
        None when requests kept the model busy too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        logits: list[Tensor] = []
        for first in range(0, tokens.size, chunk):
            piece = tokens[first : first + chunk]
            left = int(tokens.size) - first - int(piece.size)
            while not self._host.turns.take_if_idle():
                if self._closed or time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
            try:
                wanted = max(1, min(int(piece.size), keep - left))
                found = self._host.run(piece, cache, wanted).logits[0, -wanted:]
            finally:
                self._host.turns.give()
            if left < keep:
                logits.append(found)
        return torch.cat(logits) if logits else torch.empty(0)


def _distance(fresh: Sequence[Rows], served: Sequence[Rows], part: Reused) -> float:
    """The largest difference of K or V over a stretch of tokens, relative to the largest number of the
    layer."""
    worst = 0.0
    for mine, theirs in zip(fresh, served, strict=True):
        first = max(part.first, mine.origin, theirs.origin)
        last = part.first + part.tokens
        if first < last:
            for a, b in zip(mine.view(first, last), theirs.view(first, last), strict=True):
                worst = max(worst, _relative(a, b))
    return worst


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    difference = float((a - b).abs().max())
    # A NaN compares as no difference at all, so it is made an infinite one.
    return difference / max(float(a.abs().max()), 1e-30) if difference == difference else float("inf")
