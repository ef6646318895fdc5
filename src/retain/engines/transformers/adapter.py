"""The engine: a transformers model that uses kept KV for any prefix, and keeps what it computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from retain.cache import BlockCache
from retain.engines.generation import Generation, salt_for
from retain.engines.report import Report
from retain.engines.wishes import Sampling, Step
from retain.errors import UnsupportedInput
from retain.fidelity import checked
from retain.handshake import Peer
from retain.identity import Chain, Tokens, as_tokens, chain, space_of
from retain.model import ModelSpec

from .host import Host
from .inputs import check_generate, prompt_tokens
from .layers import ROOM_TOKENS, computed_tokens
from .requests import Request, Requests
from .sampling import Sampler
from .session import Cancelled, Session, Watcher

MOST_ROOM = 1024
"""Spare tokens a cache begins with, at the most: an answer may end long before the limit its caller set."""


class Signal(Protocol):
    """Something that can be set, such as a threading.Event."""

    def is_set(self) -> bool:
        """Whether it is."""


Cancel = Signal | Callable[[], bool] | None


def attach(
    model: Any,
    tokenizer: Any = None,
    cache: BlockCache | None = None,
    *,
    tenant: str | None = None,
    store_generated: bool = True,
    tails: bool = True,
    audit: float = 0.0,
    fidelity: str = "kin",
    peers: Sequence[Peer] | None = None,
    interchange: str | None = None,
    spec: ModelSpec | None = None,
) -> Engine:
    """Join a transformers model and a cache. The model itself is not changed.

    `tenant` separates what is kept from that of other tenants. `store_generated` False keeps prompts only,
    `tails` False whole blocks only. `audit` is the share of hits that is computed again when idle, and
    compared. `fidelity` is the lowest that requests accept which name none themselves (retain.fidelity).
    `peers` are the other variants whose KV it may take, by default those of the handshakes on record.
    `interchange` float16 keeps float32 KV in half the bytes, at a KL of about 1e-7.
    `spec` saves the digest of the weights where it is known. Raises UnsupportedModel, naming what cannot be
    kept.
    """
    if cache is None:
        raise TypeError("attach needs a cache: attach(model, tokenizer, retain.open('memory:4GiB'))")
    if not 0 <= audit <= 1:
        raise ValueError(f"audit is a share of hits between 0 and 1, got {audit}")
    host = Host(model, spec)
    requests = Requests(
        host,
        cache,
        store_generated=store_generated,
        tails=tails,
        audit=audit,
        peers=peers,
        interchange=interchange,
    )
    return Engine(host, requests, tokenizer, cache, tenant, checked(fidelity))


@dataclass(frozen=True, eq=False)
class Forward:
    """What `Engine.forward` gives: the model's output, whose cache is the caller's own, and the report."""

    output: Any
    report: Report

    @property
    def logits(self) -> Tensor:
        """`[1, kept, vocabulary]`."""
        found: Tensor = self.output.logits
        return found


class Engine:
    """A model with a memory. Safe from several threads: requests run one at a time, in the order they
    came."""

    def __init__(
        self,
        host: Host,
        requests: Requests,
        tokenizer: Any,
        cache: BlockCache,
        tenant: str | None,
        fidelity: str,
    ) -> None:
        self.model = host.model
        self.tokenizer = tokenizer
        self.cache = cache
        self.tenant = tenant
        self.fidelity = fidelity
        self._host = host
        self._requests = requests
        self._last = threading.local()

    @property
    def spec(self) -> ModelSpec:
        """What is kept: the model as it was at the last request."""
        return self._host.spec

    @property
    def queue_depth(self) -> int:
        """Requests that run or wait for this model."""
        return self._host.turns.depth

    @property
    def last_report(self) -> Report:
        """The report of this thread's last `generate` or `forward`."""
        found: Report = getattr(self._last, "report", None) or Report()
        return found

    def chain(
        self, tokens: Sequence[int] | Tokens, *, tenant: str | None = None, salt: str | None = None
    ) -> Chain:
        """The keys of a prompt in its space: of this model and adapter, the tenant, and the request's own
        salt."""
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
        cancelled: Cancel = None,
        progress: Callable[[float], None] | None = None,
    ) -> Generation:
        """Answer a prompt token by token. The work is done where the result is iterated, as it is iterated.

        `stop` are the token ids that end the answer, those of the model's generation config by default.
        `fidelity` is the lowest that is accepted of what is kept. `cancelled`, an event or a function, ends
        the answer within a layer of the prefill or a step of the decode; what was completed is kept.
        `progress` is told the share of the prefill that is done. Raises UnsupportedInput, ConfigError.
        """
        ids = prompt_tokens(np.asarray(tokens, dtype=np.int64))
        report = Report(prompt_tokens=int(ids.size))
        chosen = sampling or Sampling()
        ends = self._host.end_tokens() if stop is None else frozenset(stop)
        watcher = Watcher(len(self._host.windows), _as_function(cancelled), progress)
        request = Request(
            tokens=ids,
            salt=self._salt(tenant, salt),
            fidelity=self._fidelity(fidelity),
            usable=int(ids.size) - 1,
            room=min(chosen.max_tokens, MOST_ROOM),
            watcher=watcher,
            report=report,
            began=time.perf_counter(),
        )
        return Generation(self._steps(request, chosen, ends), report)

    def forward(
        self,
        input_ids: Any,
        *,
        logits_to_keep: int = 1,
        attention_mask: Any = None,
        position_ids: Any = None,
        salt: str | None = None,
        tenant: str | None = None,
        fidelity: str | None = None,
    ) -> Forward:
        """The model's output for a prompt's last `logits_to_keep` tokens; 0 stands for all, and reuses
        nothing.

        The output's cache belongs to the caller: nothing that is kept lies in it. Raises UnsupportedInput.
        """
        began = time.perf_counter()
        ids = prompt_tokens(input_ids, attention_mask, position_ids)
        count = int(ids.size)
        keep = count if logits_to_keep == 0 else logits_to_keep
        if not 1 <= keep <= count:
            raise UnsupportedInput(
                f"logits_to_keep must lie between 0 and the prompt's {count} tokens, got {keep}"
            )
        request = self._whole_call(ids, count - keep, 0, tenant, salt, fidelity, began)
        with self._requests.serve(request) as session:
            output = self._requests.prefill(_running(session), keep)
            _running(session).returned = True
        return Forward(output, request.report)

    def generate(
        self,
        inputs: Any = None,
        *,
        input_ids: Any = None,
        salt: str | None = None,
        tenant: str | None = None,
        fidelity: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the model's own `generate`, with kept KV: same arguments, same result; `last_report` tells what
        was reused.

        Raises UnsupportedInput for what kept KV cannot serve: batches, padding, beams, a cache of the
        caller's own.
        """
        began = time.perf_counter()
        given = inputs if input_ids is None else input_ids
        if given is None or (inputs is not None and input_ids is not None):
            raise UnsupportedInput("generate needs the prompt's tokens once, as input_ids")
        check_generate(kwargs, self.model.generation_config)
        ids = prompt_tokens(given, kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None))
        processors = LogitsProcessorList(kwargs.pop("logits_processor", None) or [])
        room = min(kwargs.get("max_new_tokens") or ROOM_TOKENS, MOST_ROOM)
        request = self._whole_call(ids, int(ids.size) - 1, room, tenant, salt, fidelity, began)
        with self._requests.serve(request) as served:
            session = _running(served)
            prompt = torch.from_numpy(ids.astype(np.int64))[None].to(self.model.device)
            result = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                logits_processor=LogitsProcessorList([*processors, _Observer(self._requests, session)]),
                **{self._host.cache_name: session.cache},
                **kwargs,
            )
            session.returned = not isinstance(result, Tensor)
            sequences = result.sequences if session.returned else result
            session.tokens = as_tokens(sequences[0].cpu().numpy())
            request.report.generated = int(session.tokens.size - ids.size)
        return result

    def settle(self, timeout: float = 30.0) -> bool:
        """Wait until everything computed so far is stored in memory and no audit is under way."""
        return self._requests.settle(timeout)

    def close(self) -> None:
        """Store what is computed and end the engine's threads. Idempotent; the model and the cache stay
        open."""
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _steps(self, request: Request, sampling: Sampling, ends: frozenset[int]) -> Iterator[Step]:
        sampler = Sampler(sampling)
        report = request.report
        with self._requests.serve(request) as session:
            if session is None:
                return
            try:
                output = self._requests.prefill(session, 1)
            except Cancelled:
                return
            tokens: list[int] = request.tokens.tolist()
            session.tokens = tokens
            while True:
                step = sampler.choose(output.logits[0, -1])
                tokens.append(step.token)
                report.generated += 1
                if step.token in ends:
                    step = replace(step, finish="stop")
                elif report.generated >= sampling.max_tokens:
                    step = replace(step, finish="length")
                yield step
                if step.finish is not None or request.watcher.cancelled():
                    return
                output = self._host.run(tokens[-1:], session.cache, 1)
                self._requests.record(session, len(tokens))

    def _whole_call(
        self,
        ids: Tokens,
        usable: int,
        room: int,
        tenant: str | None,
        salt: str | None,
        fidelity: str | None,
        began: float,
    ) -> Request:
        """A request that is answered in one call, which nobody cancels."""
        report = self._last.report = Report(prompt_tokens=int(ids.size))
        watcher = Watcher(len(self._host.windows), _never)
        lowest = self._fidelity(fidelity)
        return Request(ids, self._salt(tenant, salt), lowest, usable, room, watcher, report, began)

    def _fidelity(self, asked: str | None) -> str:
        return self.fidelity if asked is None else checked(asked)

    def _salt(self, tenant: str | None, salt: str | None) -> bytes | None:
        return salt_for(self.cache, self.spec, self.tenant if tenant is None else tenant, salt)


class _Observer(LogitsProcessor):
    """Looks on while `generate` runs: stores blocks as they are completed, and leaves the scores as they
    are."""

    def __init__(self, requests: Requests, session: Session) -> None:
        self._requests = requests
        self._session = session
        self._began = time.perf_counter()
        self._first = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        session = self._session
        session.tokens = as_tokens(input_ids[0].cpu().numpy())
        if self._first:
            self._first = False
            self._requests.prefilled(session, time.perf_counter() - self._began)
        else:
            self._requests.record(session, min(computed_tokens(session.cache), len(session.tokens)))
        return scores


def _running(session: Session | None) -> Session:
    if session is None:
        raise RuntimeError("a call that nobody cancels was cancelled")
    return session


def _never() -> bool:
    return False


def _as_function(cancelled: Cancel) -> Callable[[], bool]:
    if cancelled is None:
        return _never
    return cancelled if callable(cancelled) else cancelled.is_set
