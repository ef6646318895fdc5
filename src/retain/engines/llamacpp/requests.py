"""Requests: how each gets a sequence and its kept prefix, and how what it computed comes to be stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from retain.block import Block
from retain.cache import BlockCache, Flight, Query
from retain.engines.answers import Answers
from retain.engines.joining import join_flight
from retain.engines.report import Report
from retain.engines.writing import Writer
from retain.errors import UnsupportedInput
from retain.identity import Chain, Tokens, as_tokens, chain, space_of

from .capture import Recorder
from .host import Host
from .native import Logits

SETTLE_SECONDS = 2.0
"""How long a request waits for an earlier one with the same beginning to be stored."""


class Cancelled(Exception):
    """Raised inside a prefill whose request was cancelled."""


@dataclass(frozen=True)
class Request:
    """What is asked of the model. At most `usable` of the prompt's tokens are taken from the cache; `began`
    is on the clock of perf_counter."""

    tokens: Tokens
    salt: bytes | None
    usable: int
    cancelled: Callable[[], bool]
    progress: Callable[[float], None]
    report: Report
    began: float


@dataclass
class Session:
    """A request that has a sequence, which holds the first `start` tokens when it begins.

    `tokens` are the prompt, then also the answer as far as it goes.
    """

    sequence: int
    chain: Chain
    request: Request
    start: int
    recorder: Recorder | None
    flight: Flight | None
    tokens: list[int]


class Requests:
    """Serves requests. Whatever goes wrong with the cache, the prompt is computed."""

    def __init__(self, host: Host, cache: BlockCache, *, store_generated: bool) -> None:
        self._host = host
        self._cache = cache
        self._store_generated = store_generated
        self._writer = Writer(cache)
        self._answers = Answers()

    @contextmanager
    def serve(self, request: Request) -> Iterator[Session | None]:
        """A session with a sequence; None when the request was cancelled before one was free.

        However the block ends, what was computed in it is stored.
        """
        host = self._host
        highest = int(request.tokens.max())
        if highest >= host.model.vocabulary:
            raise UnsupportedInput(
                f"token {highest} is not in the model's vocabulary of {host.model.vocabulary}"
            )
        if request.tokens.size > host.context:
            raise UnsupportedInput(
                f"the prompt has {request.tokens.size} tokens; this context takes {host.context}"
            )
        keys = chain(space_of(host.spec.kin, host.spec.adapter, request.salt), request.tokens)
        flight = join_flight(self._cache, host.spec, keys, request.cancelled)
        try:
            with host.sequence(request.cancelled) as sequence:
                if sequence is None:
                    yield None
                    return
                request.report.queue_seconds = time.perf_counter() - request.began
                session = self._open(request, keys, sequence, flight)
                try:
                    yield session
                finally:
                    flight = None  # it lands when the prompt is stored
                    self._finish(session)
        finally:
            if flight is not None:
                flight.land()

    def prefill(self, session: Session, keep: int) -> Logits:
        """Compute what of the prompt is not restored; logits of its last `keep` tokens. Raises Cancelled."""
        request, tokens = session.request, session.chain.tokens
        window = bool(self._host.layout.window)

        def done(end: int) -> None:
            if end < tokens.size or window:
                self._record(session, end, all_of_it=window)
            if request.cancelled():
                raise Cancelled
            request.progress((end - session.start) / (tokens.size - session.start))

        began = time.perf_counter()
        logits = self._host.prefill(session.sequence, tokens, session.start, keep, done)
        report = request.report
        report.prefill_seconds = time.perf_counter() - began
        report.computed = int(tokens.size) - session.start
        report.ttft = time.perf_counter() - request.began
        self._cache.planner.observe_prefill(
            self._host.spec, session.start, report.computed, report.prefill_seconds
        )
        return logits

    def prefilled(self, session: Session) -> None:
        """Hand over the prompt's blocks: once the first token is on its way, for copying takes a moment."""
        self._record(session, int(session.chain.tokens.size))
        if session.flight is not None:
            flight, session.flight = session.flight, None
            self._writer.submit(session.chain, flight.land)

    def step(self, session: Session) -> Logits:
        """Run the newest token; its logits `[vocabulary]`."""
        at = len(session.tokens) - 1
        logits: Logits = self._host.run(session.sequence, session.tokens[-1:], at)[0]
        if self._store_generated:
            self._record(session, at + 1)
        return logits

    def settle(self, timeout: float) -> bool:
        """Wait until everything computed is stored in memory."""
        return self._writer.settle(timeout)

    def close(self) -> None:
        """Store what is computed and end the thread. Idempotent."""
        self._writer.close(5 * SETTLE_SECONDS)

    def _open(self, request: Request, keys: Chain, sequence: int, flight: Flight | None) -> Session:
        report = request.report
        self._writer.settle(SETTLE_SECONDS, keys)
        start, partial = 0, None
        try:
            start, partial = self._load(request, keys, sequence)
        except Exception as error:
            report.reused = {}
            self._cache.failure("kept KV could not be used", f"{type(error).__name__}: {error}")
        report.lost = self._answers.lost(keys)
        recorder = Recorder(self._writer, self._cache, self._host, keys, report, sequence, start, partial)
        return Session(sequence, keys, request, start, recorder, flight, request.tokens.tolist())

    def _load(self, request: Request, keys: Chain, sequence: int) -> tuple[int, tuple[Block, int] | None]:
        """Fill the sequence with the kept prefix: how many tokens, and the last block with how much of it was
        used."""
        report = request.report
        start = time.perf_counter()
        hit = self._cache.lookup(Query(keys, self._host.spec, limit=request.usable))
        report.found = hit.found
        report.lookup_seconds = time.perf_counter() - start
        if not hit.tokens:
            hit.release()
            return 0, None
        with self._cache.load(hit) as loaded:
            if not loaded.tokens:
                return 0, None
            self._host.restore(sequence, loaded.blocks, loaded.lengths)
            report.reused = dict(loaded.tokens_by_tier)
            report.load_seconds = time.perf_counter() - start - report.lookup_seconds
            block, used = loaded.blocks[-1], loaded.lengths[-1]
            if loaded.tokens % keys.block_tokens == 0:
                return loaded.tokens, None
            # Its lease ends here: what the recorder needs of it is copied.
            held = {name: array[:, :, :used].copy() for name, array in block.arrays.items()}
            return loaded.tokens, (Block(block.header, block.tokens, held), used)

    def _record(self, session: Session, computed: int, *, all_of_it: bool = False) -> None:
        if session.recorder is not None:
            try:
                session.recorder.advance(session.tokens, computed, all_of_it=all_of_it)
            except Exception as error:
                session.recorder = None
                self._cache.failure("computed KV could not be stored", f"{type(error).__name__}: {error}")

    def _finish(self, session: Session) -> None:
        """Store the rest."""
        computed = min(self._host.length(session.sequence), len(session.tokens))
        if not self._store_generated:
            computed = min(computed, int(session.chain.tokens.size))
        try:
            if session.recorder is not None and computed > session.start:
                session.recorder.finish(session.tokens, computed)
                self._answers.remember(session.chain, as_tokens(session.tokens[:computed]))
        except Exception as error:
            self._cache.failure("computed KV could not be stored", f"{type(error).__name__}: {error}")
        if session.flight is not None:
            self._writer.submit(session.chain, session.flight.land)
