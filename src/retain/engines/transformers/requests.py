"""Requests: how each gets the model's turn and its kept prefix, and how what it computed comes to be
stored."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

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

from .audit import Auditor
from .capture import PRODUCER, Recorder
from .host import Host
from .layers import ROOM_TOKENS, computed_tokens, rows_of
from .session import Reused, Session, Shared, Watcher

SETTLE_SECONDS = 2.0
"""How long a request waits for an earlier one with the same beginning to be stored."""

RESTORE_THREADS = 4


@dataclass(frozen=True)
class Request:
    """What is asked of the model: at most `usable` of the prompt's tokens are taken from the cache, `room`
    are expected to be generated. `fidelity` is the lowest that is accepted. `began` is on the clock of
    perf_counter."""

    tokens: Tokens
    salt: bytes | None
    fidelity: str
    usable: int
    room: int
    watcher: Watcher
    report: Report
    began: float


class Requests:
    """Serves one request at a time. Whatever goes wrong with the cache, the prompt is computed."""

    def __init__(
        self,
        host: Host,
        cache: BlockCache,
        *,
        store_generated: bool,
        tails: bool,
        audit: float,
        peers: Sequence[Peer] | None,
        interchange: str | None,
    ) -> None:
        self._host = host
        self._cache = cache
        self._store_generated = store_generated
        self._tails = tails
        self._audit = audit
        self._peers = Peers(PRODUCER, peers)
        self._interchange = interchange
        self._writer = Writer(cache)
        self._auditor = Auditor(cache, host)
        self._answers = Answers()
        threads = max(1, min(RESTORE_THREADS, torch.get_num_threads()))
        self._restorers = ThreadPoolExecutor(threads, thread_name_prefix="retain-restore")

    @contextmanager
    def serve(self, request: Request) -> Iterator[Session | None]:
        """A session with the model's turn; None when the request was cancelled before its turn came.

        However the block ends, what was computed in it is stored.
        """
        host = self._host
        if host.model.training:
            raise UnsupportedInput(
                "the model is in training mode, where dropout changes its KV; call model.eval()"
            )
        if host.vocabulary is not None and int(request.tokens.max()) >= host.vocabulary:
            raise UnsupportedInput(
                f"token {int(request.tokens.max())} is not in the model's vocabulary of {host.vocabulary}"
            )
        host.refresh()
        keys = self._keys(request)
        if host.stable_tokens is not None and request.tokens.size > host.stable_tokens:
            request.report.bypass = (
                f"beyond {host.stable_tokens} tokens the KV of this model depends on the prompt's length"
            )
        flight = (
            None
            if request.report.bypass
            else join_flight(self._cache, host.spec, keys, request.watcher.cancelled)
        )
        try:
            if not host.turns.take(request.watcher.cancelled):
                yield None
                return
            try:
                if host.refresh():  # another model than when it came
                    keys = self._keys(request)
                request.report.queue_seconds = time.perf_counter() - request.began
                session = self._open(request, keys, flight)
                try:
                    yield session
                finally:
                    flight = None  # it lands when the prompt is stored
                    self._finish(session)
            finally:
                host.turns.give()
        finally:
            if flight is not None:
                flight.land()

    def prefill(self, session: Session, keep: int) -> Any:
        """Compute what of the prompt is not restored, in one pass, as the model alone would."""
        start = time.perf_counter()
        output = self._host.run(session.chain.tokens[session.start :], session.cache, keep)
        session.logits = output.logits[0, -1].clone()
        self.prefilled(session, time.perf_counter() - start)
        return output

    def prefilled(self, session: Session, seconds: float) -> None:
        """The prompt is computed: note the times, and hand over its blocks; who waits for them goes on after
        that."""
        report = session.report
        report.prefill_seconds = seconds
        report.computed = int(session.chain.tokens.size) - session.start
        report.ttft = time.perf_counter() - session.began
        session.watcher.end()
        self._cache.planner.observe_prefill(self._host.spec, session.start, report.computed, seconds)
        self.record(session, int(session.chain.tokens.size))
        if session.flight is not None:
            self._writer.submit(session.chain, session.flight.land)

    def record(self, session: Session, computed: int) -> None:
        """Hand over the blocks that are complete."""
        if session.recorder is not None:
            try:
                session.recorder.advance(session.cache, session.tokens, computed)
            except Exception as error:
                session.recorder = None
                self._cache.failure("computed KV could not be stored", f"{type(error).__name__}: {error}")

    def settle(self, timeout: float) -> bool:
        """Wait until everything computed is stored in memory and no audit is under way."""
        deadline = time.monotonic() + timeout
        return self._writer.settle(timeout) and self._auditor.settle(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Store what is computed and end the threads. Idempotent."""
        self._auditor.close()
        self._writer.close(5 * SETTLE_SECONDS)
        self._restorers.shutdown()

    def _keys(self, request: Request) -> Chain:
        spec = self._host.spec
        return chain(space_of(spec.kin, spec.adapter, request.salt), request.tokens)

    def _open(self, request: Request, keys: Chain, flight: Flight | None) -> Session:
        report = request.report
        cache: DynamicCache | None = None
        reused: tuple[Reused, ...] = ()
        if not report.bypass:
            self._writer.settle(SETTLE_SECONDS, keys)
            try:
                cache, reused = self._load(request, keys)
            except Exception as error:
                report.reused = {}
                self._cache.failure("kept KV could not be used", f"{type(error).__name__}: {error}")
            report.lost = self._answers.lost(keys)
        if cache is None:
            cache = self._host.empty_cache(request.room + ROOM_TOKENS, request.watcher)
        start = sum(part.tokens for part in reused)
        session = Session(
            chain=keys,
            report=report,
            cache=cache,
            start=start,
            reused=reused,
            recorder=None if report.bypass else self._recorder(request, keys, reused),
            watcher=request.watcher,
            flight=flight,
            buffers=Shared(lambda: self._take_back(session)),
            began=request.began,
            tokens=request.tokens,
        )
        if session.recorder is not None:
            session.recorder.begin(cache)
        return session

    def _recorder(self, request: Request, keys: Chain, reused: Sequence[Reused]) -> Recorder:
        limits = [self._host.stable_tokens, None if self._store_generated else int(request.tokens.size)]
        limit = min((each for each in limits if each is not None), default=None)
        return Recorder(
            self._writer,
            self._cache,
            self._host.geometry,
            keys,
            request.report,
            kept=sum(part.tokens for part in reused),
            limit=limit,
            tails=self._tails,
            kept_as=kept_as(self._host.spec, self._interchange),
            inherits=inherited(reused),
        )

    def _load(self, request: Request, keys: Chain) -> tuple[DynamicCache | None, tuple[Reused, ...]]:
        """A cache with the kept prefix in it, and where that came from; None where there is none."""
        host, report = self._host, request.report
        start = time.perf_counter()
        query = Query(keys, host.spec, fidelity=request.fidelity, limit=request.usable)
        hit = search(self._cache, query, self._peers.of(host.spec))
        report.found = hit.found
        report.lookup_seconds = time.perf_counter() - start
        if not hit.tokens:
            hit.release()
            return None, ()
        with load(self._cache, hit) as loaded:
            if not loaded.tokens:
                return None, ()
            cache = host.empty_cache(request.room + ROOM_TOKENS, request.watcher)
            host.geometry.restore(
                cache,
                loaded.blocks,
                loaded.lengths,
                room=int(request.tokens.size) - loaded.tokens + request.room + ROOM_TOKENS,
                pool=host.pool,
                device=host.model.device,
                workers=self._restorers,
            )
            report.reused = dict(loaded.tokens_by_tier)
            report.classes = dict(loaded.tokens_by_class)
            firsts = np.cumsum([0, *loaded.lengths]).tolist()
            reused = tuple(
                Reused(
                    block.header.key, first, length, block.header.fidelity, block.header.lineage,
                    block.header.codec,
                )
                for block, first, length in zip(loaded.blocks, firsts, loaded.lengths, strict=False)
            )  # fmt: skip
            report.fidelity = inherited(reused)[0]
        report.load_seconds = time.perf_counter() - start - report.lookup_seconds
        return cache, reused

    def _finish(self, session: Session) -> None:
        """Store the rest in the background, then give the buffers back."""
        session.watcher.end()
        session.rows = rows_of(session.cache)
        computed = min(computed_tokens(session.cache), len(session.tokens))
        try:
            if session.recorder is not None:
                session.recorder.finish(session.cache, session.tokens, computed)
                self._answers.remember(session.chain, as_tokens(session.tokens[:computed]))
        except Exception as error:
            self._cache.failure("computed KV could not be stored", f"{type(error).__name__}: {error}")
        own = session.report.fidelity in ("exact", "lossy")  # another variant's KV is as far off as it is
        if session.reused and session.rows and own and random.random() < self._audit:
            self._auditor.offer(session)
        self._writer.submit(session.chain, lambda: _end(session))

    def _take_back(self, session: Session) -> None:
        rows, session.rows = session.rows, ()
        if not session.returned:
            session.cache.layers = []
            self._host.pool.give([buffer for each in rows for buffer in each.buffers])


def _end(session: Session) -> None:
    if session.flight is not None:
        session.flight.land()
    session.buffers.done()
