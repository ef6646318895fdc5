"""transformers keeps what every engine keeps (retain.testing.engine), in the shapes that others have too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from retain.cache import Cache
from retain.engines.transformers import Engine, Sampling, attach
from retain.testing.engine import EngineConformance, Seen
from tests.engines.transformers import tiny

pytestmark = pytest.mark.engine


class Transformers:
    """A transformers model as the suite's subject."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def read(self, tokens: Sequence[int], salt: str | None = None) -> Seen:
        found = self.engine.forward(torch.tensor([list(tokens)]), salt=salt)
        assert self.engine.settle()
        return Seen(found.logits[0, -1].numpy().astype(np.float32), found.report.reused_tokens)

    def answer(self, tokens: Sequence[int], count: int, cancelled: Callable[[], bool]) -> list[int]:
        steps = list(self.engine.stream(tokens, Sampling(max_tokens=count), cancelled=cancelled))
        assert self.engine.settle()
        return [step.token for step in steps]

    def close(self) -> None:
        self.engine.close()


class TestGroupedHeads(EngineConformance):
    @pytest.fixture(autouse=True)
    def _model(self) -> None:
        self.model: Any = self.make()

    def make(self) -> Any:
        return tiny.llama()

    def attach(self, cache: Cache) -> Transformers:
        return Transformers(attach(self.model, None, cache))


class TestSlidingWindow(TestGroupedHeads):
    def make(self) -> Any:
        return tiny.gemma3()
