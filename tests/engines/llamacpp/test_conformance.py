"""llama.cpp keeps what every engine keeps, in every shape of KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from retain.cache import Cache
from retain.engines.llamacpp import Engine, Sampling, Settings, attach
from retain.testing.engine import EngineConformance, Seen

pytestmark = pytest.mark.engine


class Llama:
    """llama.cpp as the suite's subject."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def read(self, tokens: Sequence[int], salt: str | None = None) -> Seen:
        found = self.engine.forward(tokens, salt=salt)
        assert self.engine.settle()
        return Seen(found.logits[-1], found.report.reused_tokens)

    def answer(self, tokens: Sequence[int], count: int, cancelled: Callable[[], bool]) -> list[int]:
        sampling = Sampling(max_tokens=count)
        steps = list(self.engine.stream(tokens, sampling, stop=(), cancelled=cancelled))
        assert self.engine.settle()
        return [step.token for step in steps]

    def close(self) -> None:
        self.engine.close()


class _LlamaCpp(EngineConformance):
    model = "llama-gqa"
    settings = Settings(threads=1, context=1024, flash=False, dtype="float32")

    @pytest.fixture(autouse=True)
    def _file(self, gguf: Callable[[str], Path]) -> None:
        self.path = gguf(self.model)

    def attach(self, cache: Cache) -> Llama:
        return Llama(attach(str(self.path), cache, self.settings))


class TestGroupedHeads(_LlamaCpp):
    pass


class TestOneHead(_LlamaCpp):
    model = "llama-mqa"
    settings = Settings(threads=1, context=1024, flash=False)
    tolerance = 5e-3  # some processors multiply V in float16, in another order for short batches


class TestOddHeadsFlash(_LlamaCpp):
    model = "llama-head-80"
    settings = Settings(threads=1, context=1024)
    tolerance = (
        0.05  # with flash attention llama.cpp multiplies in float16, in another order for short batches
    )


class TestOneLayer(_LlamaCpp):
    model = "llama-1-layer"
    settings = Settings(threads=1, context=1024, flash=False, batch=100)
    tolerance = 5e-3


class TestSlidingWindow(_LlamaCpp):
    model = "gemma3-window-32"
    settings = Settings(threads=1, context=1024, dtype="float32", flash=False)
    tolerance = 5e-3  # its GELU is looked up in a table of float16


class TestSlidingWindowFlash(_LlamaCpp):
    model = "gemma3-window-32"
    settings = Settings(threads=1, context=1024)
    tolerance = 0.05
