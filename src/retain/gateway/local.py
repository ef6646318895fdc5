"""Engines in this process as the server sees them: opened by a model's name, their runs in the server's
words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import retain
from retain.address import TierAddress
from retain.cache import BlockCache
from retain.engines import wishes
from retain.engines.generation import Generation
from retain.engines.report import Report as Told
from retain.errors import ConfigError, UnsupportedModel
from retain.gateway.engine import Report, Sampling, Step
from retain.identity import Chain, Tokens
from retain.model import ModelSpec
from retain.models import Source

SETTLE_SECONDS = 1.0
"""How long the end of an answer waits, at the most, to say how many tokens were kept."""

Opened = tuple["LocalEngine", BlockCache]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs its model; None is the engine's own choice.

    `dtype` is that of its KV (transformers computes in it as well), `interchange` float16 keeps float32 KV in
    half the bytes; `flash` and `context` are llama.cpp's.
    """

    dtype: str | None = None
    interchange: str | None = None
    flash: bool | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        if self.interchange not in (None, "float16"):
            raise ConfigError(f"KV is interchanged as it is held, or as float16; not as {self.interchange}")


def open_engine(
    engine: str,
    model: Source,
    tiers: Sequence[str | TierAddress],
    *,
    policy: str,
    audit: float,
    fidelity: str,
    options: EngineOptions,
) -> Opened:
    """Load a model in `engine` and open the cache that it works on.

    Raises ConfigError for an engine that is not served in this process, and the RetainErrors of loading.
    """
    opener = ENGINES.get(engine)
    if opener is None:
        raise ConfigError(f"no engine {engine!r} serves a model here; known are {', '.join(ENGINES)}")
    cache = retain.open(*tiers, policy=policy)
    try:
        return opener(model, cache, audit, fidelity, options), cache
    except BaseException:
        cache.close()
        raise


def _transformers(
    model: Source, cache: BlockCache, audit: float, fidelity: str, options: EngineOptions
) -> LocalEngine:
    from retain.engines import transformers
    from retain.engines.transformers.loading import load

    if options.flash is not None or options.context is not None:
        raise ConfigError("flash attention and the context are chosen for llama.cpp only: --engine llamacpp")
    loaded = load(model, options.dtype or "float32")
    engine = transformers.attach(
        loaded.model,
        loaded.tokenizer,
        cache,
        audit=audit,
        fidelity=fidelity,
        interchange=options.interchange,
        spec=loaded.spec,
    )
    config = engine.model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise UnsupportedModel(
            "the model's config does not say how long its context is (max_position_embeddings)"
        )
    return LocalEngine(engine, context)


def _llamacpp(
    model: Source, cache: BlockCache, audit: float, fidelity: str, options: EngineOptions
) -> LocalEngine:
    from retain.engines import llamacpp
    from retain.engines.transformers.loading import load_tokenizer

    if audit:
        raise ConfigError("the llama.cpp engine has no audit; serve with audit 0, or with transformers")
    settings = llamacpp.Settings(
        dtype=options.dtype or "float16", flash=options.flash is not False, context=options.context
    )
    engine = llamacpp.attach(
        model,
        cache,
        settings,
        tokenizer=load_tokenizer(model),
        fidelity=fidelity,
        interchange=options.interchange,
    )
    return LocalEngine(engine, engine.context)


ENGINES: Mapping[str, Callable[[Source, BlockCache, float, str, EngineOptions], LocalEngine]] = {
    "transformers": _transformers,
    "llamacpp": _llamacpp,
}


class InProcess(Protocol):
    """What the engines of this process have in common."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def cache(self) -> BlockCache: ...

    def chain(
        self, tokens: Sequence[int] | Tokens, *, tenant: str | None = None, salt: str | None = None
    ) -> Chain: ...

    def stream(
        self,
        tokens: Sequence[int] | Tokens,
        sampling: wishes.Sampling | None = None,
        *,
        salt: str | None = None,
        tenant: str | None = None,
        fidelity: str | None = None,
        cancelled: Callable[[], bool] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Generation: ...

    def settle(self, timeout: float = 30.0) -> bool: ...

    def close(self) -> None: ...


class LocalEngine:
    """Serves retain.gateway.engine.Engine with a model in this process."""

    def __init__(self, engine: InProcess, context: int) -> None:
        self._engine = engine
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
        fidelity: str | None,
        cancelled: Callable[[], bool],
        progress: Callable[[float], None],
    ) -> LocalRun:
        chosen = wishes.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            top_logprobs=sampling.top_logprobs,
        )
        generation = self._engine.stream(
            tokens,
            chosen,
            tenant=tenant,
            salt=cache_salt,
            fidelity=fidelity,
            cancelled=cancelled,
            progress=progress,
        )
        return LocalRun(self._engine, generation)

    def settle(self) -> None:
        self._engine.settle()

    def close(self) -> None:
        self._engine.close()


class LocalRun:
    """One generation of the engine."""

    def __init__(self, engine: InProcess, generation: Generation) -> None:
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
            classes=dict(told.classes),
            found=told.found,
            computed=told.computed,
            written=told.written,
            load_seconds=told.lookup_seconds + told.load_seconds,
            saved_seconds=self._saved_seconds(told),
            fidelity=told.fidelity,
            lost=told.lost,
        )

    def close(self) -> None:
        self._generation.close()
        # What was computed is copied to the cache behind the answer; the report counts it when it is there.
        self._engine.settle(SETTLE_SECONDS)

    def _saved_seconds(self, told: Told) -> float | None:
        if not told.reused_tokens:
            return 0.0
        computing = self._engine.cache.planner.prefill_seconds(self._engine.spec, 0, told.reused_tokens)
        return None if computing is None else max(0.0, computing - told.lookup_seconds - told.load_seconds)
