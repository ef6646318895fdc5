"""The service behind the HTTP paths: a request goes in, pieces of an answer and an account come out."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from retain.cache import BlockCache, Stats
from retain.engines import handover
from retain.errors import UnsupportedInput
from retain.gateway.answers import Account
from retain.gateway.engine import Engine, Report, Sampling
from retain.gateway.explain import Kept, Miss, explain
from retain.gateway.generation import Ending, Wish, generate
from retain.gateway.metrics import Meter
from retain.gateway.refusal import Refusal, too_long, unavailable
from retain.gateway.schema import Ask
from retain.gateway.tenants import Tenant
from retain.gateway.tokenizer import Prompt, Tokenizer
from retain.gateway.waiting import Closed, Full, Job, Line
from retain.identity import TAIL_TOKENS

log = logging.getLogger("retain.gateway")

PROGRESS_SECONDS = 2.0
"""A prefill that takes longer says how far it is, this often."""

STOPPING = "The server is stopping."

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to answer, with the cache that it works on."""

    engine: Engine
    tokenizer: Tokenizer
    cache: BlockCache


class Service:
    """One model behind a waiting line. `state` is loading, ok, stopping or failed."""

    def __init__(self, name: str, max_queue: int = 64) -> None:
        self.name = name
        self.created = int(time.time())
        self.line = Line(max_queue)
        self.meter = Meter(self.line, self.stats)
        self.state = "loading"
        self._loaded: Loaded | None = None
        self._totals: dict[str | None, Counter[str]] = {}
        self._totals_lock = threading.Lock()
        # Apart from the event loop's own threads, so that /health answers while long prompts are read.
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="retain-prompt")

    async def aside(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Run something slow beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, partial(work, *arguments, **named)
        )

    def ready(self, engine: Engine, cache: BlockCache) -> None:
        """The model is loaded: requests are served from now on."""
        tokenizer = Tokenizer(engine.tokenizer)
        tokenizer.warm()
        self._loaded = Loaded(engine, tokenizer, cache)
        if self.state == "loading":
            self.state = "ok"

    def stop(self) -> None:
        """Take no more requests."""
        self.state = "stopping"
        self.line.close()

    @property
    def loaded(self) -> Loaded:
        """What answers requests. Raises Refusal while there is nothing yet."""
        if self._loaded is None or self.state == "failed":
            raise unavailable(f"The model {self.name} is {self.state}.", 5)
        return self._loaded

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: another model variant has another."""
        return f"fp_{self.loaded.engine.spec.variant.hex()[:16]}"

    def stats(self) -> Stats | None:
        """The cache's statistics, once there is a cache."""
        return None if self._loaded is None else self._loaded.cache.stats()

    def check_model(self, name: str) -> None:
        """Raises Refusal when another model is asked for."""
        if name != self.name:
            raise Refusal(
                404,
                f"The model {name[:200]!r} is not served here; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    def prepare(self, ask: Ask) -> tuple[Prompt, Wish]:
        """The prompt as tokens, and what to do with it. Raises Refusal. Takes a while for long texts."""
        loaded = self.loaded
        context = loaded.engine.context
        prompt = self._prompt(ask, loaded.tokenizer, context)
        length = int(prompt.tokens.size)
        if length == 0:
            raise Refusal(400, "the prompt has no tokens", param="prompt")
        room = context - length
        if room < 1:
            raise too_long(length, None, context)
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise too_long(length, ask.max_tokens, context)
        sampling = Sampling(
            max_tokens=ask.max_tokens or room,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            top_logprobs=ask.top_logprobs,
        )
        return prompt, Wish(sampling, ask.stop, tools=bool(ask.tools))

    def submit(self, ask: Ask, tenant: Tenant, prompt: Prompt, wish: Wish, arrived: float) -> Job:
        """Put a request into the line. Its events: Pieces, then an Account or Refusal. Raises Refusal."""

        def work(job: Job) -> None:
            self._work(job, ask, tenant, prompt, wish, arrived)

        job = Job(work, asyncio.get_running_loop())
        try:
            self.line.enter(job)
        except Full:
            self.meter.refused()
            raise unavailable(
                f"{self.line.limit} requests are waiting already; try again later.",
                1 + self.line.waiting // 4,
            ) from None
        except Closed:
            raise unavailable(STOPPING, 30) from None
        return job

    def leave(self, job: Job) -> None:
        """The client has gone, or has all it wanted: nothing more is done for it."""
        if self.line.leave(job):
            self.meter.abandoned()
            log.info("a client hung up while its request was waiting")

    def clear(
        self, tenant: Tenant, *, everything: bool, tier: str | None, cache_salt: str | None
    ) -> dict[str, Any]:
        """Remove what the tenant's space holds, or everything, from one tier or all; how much that was."""
        loaded = self.loaded
        loaded.engine.settle()
        space = None if everything else loaded.engine.chain((), tenant.name, cache_salt).space
        try:
            removed = loaded.cache.clear(tier=tier, space=space)
        except ValueError as error:
            raise Refusal(400, str(error), param="tier") from error
        log.info("cleared %d objects, %d bytes of %s", removed.objects, removed.bytes, tier or "all tiers")
        return {
            "cleared": "everything" if everything else "space",
            "tier": tier,
            "objects": removed.objects,
            "bytes": removed.bytes,
        }

    def totals(self, tenant: Tenant) -> dict[str, int]:
        """What this tenant's requests took so far: requests, and tokens by source."""
        with self._totals_lock:
            return dict(self._totals.get(tenant.name, Counter()))

    def _prompt(self, ask: Ask, tokenizer: Tokenizer, context: int) -> Prompt:
        if ask.tokens is not None:
            if len(ask.tokens) >= context:
                raise too_long(len(ask.tokens), None, context)
            return Prompt(tokenizer.check(ask.tokens))
        if ask.messages is None:
            text = ask.text or ""
            self._check_size(text, tokenizer, context)
            return Prompt(tokenizer.encode(text))
        if len(ask.messages) >= context:
            raise too_long(len(ask.messages), None, context, at_least=True)
        text = tokenizer.chat(ask.messages, ask.tools)
        self._check_size(text, tokenizer, context)
        return tokenizer.prompt_of_chat(text, ask.messages, ask.tools)

    def _check_size(self, text: str, tokenizer: Tokenizer, context: int) -> None:
        """Refuse a text that cannot fit without tokenising it, which takes seconds for megabytes."""
        least = len(text) // tokenizer.longest
        if least >= context:
            raise too_long(least, None, context, at_least=True)

    def _work(self, job: Job, ask: Ask, tenant: Tenant, prompt: Prompt, wish: Wish, arrived: float) -> None:
        if job.cancelled:
            self.meter.abandoned()
            job.emit(unavailable(STOPPING, 30))
            return
        loaded = self.loaded
        length = int(prompt.tokens.size)
        try:
            self._await_promised(loaded, job, ask, tenant, prompt)
            kept = self._nearest(loaded, prompt, tenant, ask)
            progress = _Progress(length)
            for event in generate(
                loaded.engine,
                loaded.tokenizer,
                prompt,
                wish,
                tenant=tenant.name,
                cache_salt=ask.cache_salt,
                fidelity=ask.fidelity,
                cancelled=lambda: job.cancelled,
                progress=progress,
            ):
                if not isinstance(event, Ending):
                    job.emit(event)
                    continue
                account = self._account(job, ask, loaded, prompt, kept, event, arrived)
                self.meter.ended(account)
                self._add(tenant, account)
                _log_account(ask, tenant, account, time.monotonic() - arrived)
                job.emit(unavailable(STOPPING, 30) if event.reason == "cancelled" else account)
        except UnsupportedInput as error:
            self.meter.failed()
            job.emit(Refusal(400, str(error)))
        except Exception:
            self.meter.failed()
            log.exception("a generation failed after a prompt of %d tokens", length)
            job.emit(
                Refusal(500, "The server had an error while processing your request.", code="internal_error")
            )

    def _await_promised(self, loaded: Loaded, job: Job, ask: Ask, tenant: Tenant, prompt: Prompt) -> None:
        """Wait briefly for what another server that prefilled this prompt is still storing."""
        if promised := handover.promised(ask.transfer):
            chain = loaded.engine.chain(prompt.tokens, tenant.name, ask.cache_salt)
            handover.wait(loaded.cache, loaded.engine.spec, chain, promised, lambda: job.cancelled)

    def _nearest(self, loaded: Loaded, prompt: Prompt, tenant: Tenant, ask: Ask) -> Kept | None:
        """The kept prompt that an explanation compares with. Asked before this prompt is kept itself."""
        try:
            chain = loaded.engine.chain(prompt.tokens, tenant.name, ask.cache_salt)
            nearest = loaded.cache.nearest(chain)
        except Exception:
            log.exception("the nearest kept prompt cannot be had; the request goes on without an explanation")
            return None
        return None if nearest is None else Kept(nearest.common, np.asarray(nearest.kept))

    def _account(
        self,
        job: Job,
        ask: Ask,
        loaded: Loaded,
        prompt: Prompt,
        kept: Kept | None,
        ending: Ending,
        arrived: float,
    ) -> Account:
        miss: Miss | None = None
        report = ending.report
        if ending.first_token_seconds is not None:
            try:
                # What this variant kept, the cache finds, unless a sliding layer cannot be restored from it.
                whole = all(layer.window is None for layer in loaded.engine.spec.layers)
                if whole and kept is not None and report.found + TAIL_TOKENS <= kept.common:
                    kept = replace(kept, readable=False)
                miss = explain(
                    prompt, kept, report.reused, lambda tokens: loaded.tokenizer.text(tokens, special=True)
                )
            except Exception:
                log.exception("a miss could not be explained; the request goes on without")
        began = job.started or arrived
        first = ending.first_token_seconds
        kept_tokens = handover.findable(min(int(prompt.tokens.size), report.reused + report.written))
        return Account(
            prompt_tokens=int(prompt.tokens.size),
            ending=ending,
            queued_seconds=job.queued_seconds,
            ttft_seconds=None if first is None else began - arrived + first,
            miss=miss,
            ignored=ask.ignored,
            transfer=handover.promise(kept_tokens) if handover.asked(ask.transfer) and kept_tokens else None,
        )

    def _add(self, tenant: Tenant, account: Account) -> None:
        report = account.ending.report
        with self._totals_lock:
            totals = self._totals.setdefault(tenant.name, Counter())
            totals["requests"] += 1
            totals["prompt_tokens"] += account.prompt_tokens
            totals["generated_tokens"] += account.ending.generated
            totals["written_tokens"] += report.written
            for source, tokens in [*report.tokens_by_tier.items(), ("computed", report.computed)]:
                totals[f"{source}_tokens"] += tokens


class _Progress:
    """Says in the log how far a long prefill is."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._told = time.monotonic()

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS:
            self._told = now
            log.info("prefill of %d tokens: %.0f %% done", self._tokens, 100 * share)


def _log_account(ask: Ask, tenant: Tenant, account: Account, seconds: float) -> None:
    report: Report = account.ending.report
    tiers = " ".join(f"{tier} {tokens}" for tier, tokens in sorted(report.tokens_by_tier.items()) if tokens)
    log.info(
        "%s%s: prompt %d tokens (%scomputed %d, kept %d), answer %d tokens, %s, "
        "ttft %s, queued %.3f s, total %.3f s%s",
        "/v1/chat/completions" if ask.is_chat else "/v1/completions",
        f" by {tenant.name}" if tenant.name else "",
        account.prompt_tokens,
        f"{tiers}, " if tiers else "",
        report.computed,
        report.written,
        account.ending.generated,
        account.ending.reason,
        "-" if account.ttft_seconds is None else f"{account.ttft_seconds:.3f} s",
        account.queued_seconds,
        seconds,
        f", missed: {account.miss.reason}" if account.miss else "",
    )
