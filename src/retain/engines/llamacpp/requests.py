"""Requests: how each gets a sequence and its kept prefix, and how what it computed comes to be stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from retain.block import Block
from retain.cache import BlockCache, Flight, Query
from retain.engines.answers import Answers
from retain.engines.joining import join_flight
from retain.engines.kinship import Peers, load, search
from retain.engines.report import Report
from retain.engines.writing import Writer
from retain.errors import UnsupportedInput
from retain.fidelity import inherited
from retain.handshake import Peer, kept_as
from retain.identity import Chain, Tokens, as_tokens, chain, space_of

from .capture import PRODUCER, Recorder
from .host import Host
from .native import Logits

SETTLE_SECONDS = 2.0
"""How long a request waits for an earlier one with the same beginning to be stored."""


class Cancelled(Exception):
    """Raised inside a prefill whose request was cancelled."""


@dataclass(frozen=True)
class Request:
    """What is asked of the model. At most `usable` of the prompt's tokens are taken from the cache, of
    `fidelity` at the lowest; `began` is on the clock of perf_counter."""

    tokens: Tokens
    salt: bytes | None
    usable: int
    fidelity: str
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


@dataclass(frozen=True)
class Kept:
    """What a sequence was filled with: how many tokens, the last block with how much of it was used where
    that is not a whole one, and what is inherited by what is computed behind."""

    tokens: int
    partial: tuple[Block, int] | None
    inherits: tuple[str, bytes | None]


class Requests:
    """Serves requests. Whatever goes wrong with the cache, the prompt is computed."""

    def __init__(
        self,
        host: Host,
        cache: BlockCache,
        *,
        store_generated: bool,
        peers: Sequence[Peer] | None,
        interchange: str | None,
    ) -> None:
        self._host = host
        self._cache = cache
        self._store_generated = store_generated
        self._peers = Peers(PRODUCER, peers)
        self._kept_as = kept_as(host.spec, interchange)
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
        kept = Kept(0, None, ("exact", None))
        try:
            kept = self._load(request, keys, sequence)
        except Exception as error:
            report.reused, report.classes = {}, {}
            self._cache.failure("kept KV could not be used", f"{type(error).__name__}: {error}")
        report.lost = self._answers.lost(keys)
        report.fidelity = kept.inherits[0]
        recorder = Recorder(
            self._writer,
            self._cache,
            self._host,
            keys,
            report,
            sequence,
            kept.tokens,
            kept.partial,
            kept.inherits,
            self._kept_as,
        )  # fmt: skip
        return Session(sequence, keys, request, kept.tokens, recorder, flight, request.tokens.tolist())

    def _load(self, request: Request, keys: Chain, sequence: int) -> Kept:
        """Fill the sequence with the kept prefix."""
        report, spec = request.report, self._host.spec
        start = time.perf_counter()
        query = Query(keys, spec, fidelity=request.fidelity, limit=request.usable)
        hit = search(self._cache, query, self._peers.of(spec))
        report.found = hit.found
        report.lookup_seconds = time.perf_counter() - start
        if not hit.tokens:
            hit.release()
            return Kept(0, None, ("exact", None))
        with load(self._cache, hit) as loaded:
            if not loaded.tokens:
                return Kept(0, None, ("exact", None))
            self._host.restore(sequence, loaded.blocks, loaded.lengths)
            report.reused = dict(loaded.tokens_by_tier)
            report.classes = dict(loaded.tokens_by_class)
            report.load_seconds = time.perf_counter() - start - report.lookup_seconds
            inherits = inherited(block.header for block in loaded.blocks)
            if loaded.tokens % keys.block_tokens == 0:
                return Kept(loaded.tokens, None, inherits)
            # Its lease ends here: what the recorder needs of it is copied.
            block, used = loaded.blocks[-1], loaded.lengths[-1]
            held = {name: array[:, :, :used].copy() for name, array in block.arrays.items()}
            return Kept(loaded.tokens, (Block(block.header, block.tokens, held), used), inherits)

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
