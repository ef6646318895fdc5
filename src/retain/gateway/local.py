"""The transformers engine as the server sees it: opened by a model's name, its runs in the server's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import retain
from retain.address import TierAddress
from retain.cache import BlockCache
from retain.engines import transformers as engines
from retain.engines.transformers.loading import load
from retain.errors import UnsupportedModel
from retain.gateway.engine import Report, Sampling, Step
from retain.identity import Chain, Tokens
from retain.model import ModelSpec
from retain.models import Source

SETTLE_SECONDS = 1.0
"""How long the end of an answer waits, at the most, to say how many tokens were kept."""


def open_transformers(
    model: Source, tiers: Sequence[str | TierAddress], *, policy: str, audit: float, dtype: str
) -> tuple[LocalEngine, BlockCache]:
    """Load a model and open the cache that it works on. Raises the RetainErrors of both."""
    cache = retain.open(*tiers, policy=policy)
    try:
        loaded = load(model, dtype)
        engine = engines.attach(loaded.model, loaded.tokenizer, cache, audit=audit, spec=loaded.spec)
        return LocalEngine(engine), cache
    except BaseException:
        cache.close()
        raise


class LocalEngine:
    """Serves retain.gateway.engine.Engine with a model in this process."""

    def __init__(self, engine: engines.Engine) -> None:
        self._engine = engine
        config = engine.model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None)
        if not isinstance(context, int):
            raise UnsupportedModel(
                "the model's config does not say how long its context is (max_position_embeddings)"
            )
        self.context = context

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def chain(self, tokens: Sequence[int] | Tokens, tenant: str | None, cache_salt: str | None) -> Chain:
        return self._engine.chain(tokens, tenant=tenant, salt=cache_salt)

    def run(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        tenant: str | None,
        cache_salt: str | None,
        cancelled: Callable[[], bool],
        progress: Callable[[float], None],
    ) -> LocalRun:
        chosen = engines.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            top_logprobs=sampling.top_logprobs,
        )
        generation = self._engine.stream(
            tokens, chosen, tenant=tenant, salt=cache_salt, cancelled=cancelled, progress=progress
        )
        return LocalRun(self._engine, generation)

    def settle(self) -> None:
        self._engine.settle()

    def close(self) -> None:
        self._engine.close()


class LocalRun:
    """One generation of the engine."""

    def __init__(self, engine: engines.Engine, generation: engines.Generation) -> None:
        self._engine = engine
        self._generation = generation

    def __iter__(self) -> Iterator[Step]:
        for step in self._generation:
            yield Step(step.token, step.finish, step.logprob, step.top)

    @property
    def report(self) -> Report:
        told = self._generation.report
        return Report(
            tokens_by_tier=dict(told.reused),
            found=told.found,
            computed=told.computed,
            written=told.written,
            load_seconds=told.lookup_seconds + told.load_seconds,
            saved_seconds=self._saved_seconds(told),
            lost=told.lost,
        )

    def close(self) -> None:
        self._generation.close()
        # What was computed is copied to the cache behind the answer; the report counts it when it is there.
        self._engine.settle(SETTLE_SECONDS)

    def _saved_seconds(self, told: engines.Report) -> float | None:
        if not told.reused_tokens:
            return 0.0
        computing = self._engine.cache.planner.prefill_seconds(self._engine.spec, 0, told.reused_tokens)
        return None if computing is None else max(0.0, computing - told.lookup_seconds - told.load_seconds)
