"""The engine: a GGUF model in llama.cpp that uses kept KV for any prefix, and keeps what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from retain.cache import BlockCache
from retain.engines.generation import Generation, salt_for
from retain.engines.report import Report
from retain.engines.wishes import Sampling, Step
from retain.errors import UnsupportedInput
from retain.fidelity import checked
from retain.handshake import Peer
from retain.identity import Chain, Tokens, as_tokens, chain, space_of
from retain.model import ModelSpec
from retain.models import Source, find

from . import selftest
from .host import Host, Settings
from .native import Logits
from .requests import Cancelled, Request, Requests, Session
from .sampling import Sampler


def attach(
    model: Source | str,
    cache: BlockCache,
    settings: Settings | None = None,
    *,
    tokenizer: Any = None,
    tenant: str | None = None,
    store_generated: bool = True,
    fidelity: str = "kin",
    peers: Sequence[Peer] | None = None,
    interchange: str | None = None,
) -> Engine:
    """Load a GGUF file in llama.cpp and join it with a cache.

    The form of its KV is tried before the first request. `tenant` separates what is kept from that of other
    tenants; `store_generated` False keeps prompts only. `fidelity` is the lowest that requests accept which
    name none themselves (retain.fidelity); `peers` are the other variants whose KV it may take, by default
    those of the handshakes on record; `interchange` float16 keeps float32 KV in half the bytes. Raises
    UnsupportedModel, naming what cannot be kept.
    """
    host = Host(find(model) if isinstance(model, str) else model, settings or Settings())
    try:
        selftest.check(host)
    except BaseException:
        host.close()
        raise
    requests = Requests(host, cache, store_generated=store_generated, peers=peers, interchange=interchange)
    return Engine(host, requests, tokenizer, cache, tenant, checked(fidelity))


@dataclass(frozen=True, eq=False)
class Forward:
    """What `Engine.forward` gives: logits `[kept, vocabulary]` of the prompt's last tokens, and the
    report."""

    logits: Logits
    report: Report


class Engine:
    """A model with a memory. Safe from several threads: as many requests as it has sequences take turns step
    by step, others wait."""

    def __init__(
        self,
        host: Host,
        requests: Requests,
        tokenizer: Any,
        cache: BlockCache,
        tenant: str | None,
        fidelity: str,
    ) -> None:
        self.host = host
        self.tokenizer = tokenizer
        self.cache = cache
        self.tenant = tenant
        self.fidelity = fidelity
        self._requests = requests

    @property
    def spec(self) -> ModelSpec:
        """What is kept."""
        return self.host.spec

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self.host.context

    def chain(
        self, tokens: Sequence[int] | Tokens, *, tenant: str | None = None, salt: str | None = None
    ) -> Chain:
        """The keys of a prompt in its space: of this model, the tenant, and the request's own salt."""
        return chain(space_of(self.spec.kin, self.spec.adapter, self._salt(tenant, salt)), tokens)

    def stream(
        self,
        tokens: Sequence[int] | Tokens,
        sampling: Sampling | None = None,
        *,
        salt: str | None = None,
        tenant: str | None = None,
        fidelity: str | None = None,
        stop: Collection[int] | None = None,
        cancelled: Callable[[], bool] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Generation:
        """Answer a prompt token by token. The work is done where the result is iterated, as it is iterated.

        `fidelity` is the lowest that is accepted of what is kept. `stop` are the token ids that end the
        answer, those of the model by default. `cancelled` ends the answer within a piece of the prefill or a
        step of the decode; what was completed is kept. `progress` is told the share of the prefill that is
        done. Raises UnsupportedInput.
        """
        report = Report()
        request = self._request(tokens, 1, report, tenant, salt, fidelity, cancelled, progress)
        return Generation(self._steps(request, sampling or Sampling(), stop), report)

    def forward(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        logits_to_keep: int = 1,
        salt: str | None = None,
        tenant: str | None = None,
        fidelity: str | None = None,
    ) -> Forward:
        """The logits of a prompt's last tokens; those are computed, whatever is kept. Raises
        UnsupportedInput."""
        report = Report()
        request = self._request(tokens, logits_to_keep, report, tenant, salt, fidelity, None, None)
        with self._requests.serve(request) as session:
            if session is None:
                raise RuntimeError("a call that nobody cancels was cancelled")
            logits = self._requests.prefill(session, logits_to_keep)
            self._requests.prefilled(session)
        return Forward(logits, report)

    def settle(self, timeout: float = 30.0) -> bool:
        """Wait until everything computed so far is stored in memory."""
        return self._requests.settle(timeout)

    def close(self) -> None:
        """Store what is computed and free the model; the cache stays open. Idempotent."""
        self._requests.close()
        self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self,
        tokens: Sequence[int] | Tokens,
        computed: int,
        report: Report,
        tenant: str | None,
        salt: str | None,
        fidelity: str | None,
        cancelled: Callable[[], bool] | None,
        progress: Callable[[float], None] | None,
    ) -> Request:
        try:
            ids = as_tokens(tokens)
        except ValueError as error:
            raise UnsupportedInput(f"the prompt is not a list of token ids: {error}") from error
        if not 1 <= computed <= ids.size:
            raise UnsupportedInput(f"a prompt of {ids.size} tokens has no last {computed}; give at least one")
        report.prompt_tokens = int(ids.size)
        return Request(
            tokens=ids,
            salt=self._salt(tenant, salt),
            usable=int(ids.size) - computed,
            fidelity=self.fidelity if fidelity is None else checked(fidelity),
            cancelled=cancelled or _never,
            progress=progress or _ignore,
            report=report,
            began=time.perf_counter(),
        )

    def _steps(self, request: Request, sampling: Sampling, stop: Collection[int] | None) -> Iterator[Step]:
        with self._requests.serve(request) as session:
            if session is None:
                return
            try:
                logits = self._requests.prefill(session, 1)[-1]
            except Cancelled:
                return
            yield from self._decode(session, logits, Sampler(sampling), stop)

    def _decode(
        self, session: Session, logits: Logits, sampler: Sampler, stop: Collection[int] | None
    ) -> Iterator[Step]:
        request, report = session.request, session.request.report
        while True:
            step = sampler.choose(logits)
            session.tokens.append(step.token)
            report.generated += 1
            ended = self.host.model.ends(step.token) if stop is None else step.token in stop
            if ended:
                step = replace(step, finish="stop")
            elif report.generated >= sampler.sampling.max_tokens or len(session.tokens) >= self.context:
                step = replace(step, finish="length")
            yield step
            if report.generated == 1:
                self._requests.prefilled(session)
            if step.finish is not None or request.cancelled():
                return
            logits = self._requests.step(session)

    def _salt(self, tenant: str | None, salt: str | None) -> bytes | None:
        return salt_for(self.cache, self.spec, self.tenant if tenant is None else tenant, salt)


def _never() -> bool:
    return False


def _ignore(share: float) -> None:
    """Nobody asked how far it is."""
