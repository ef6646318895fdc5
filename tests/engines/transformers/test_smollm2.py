"""A real model: the same words and logits from kept KV, in memory and on disk, as from a prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from retain.cache import open_cache
from retain.engines.transformers import attach
from tests.engines.transformers.test_reuse import answer
from tests.engines.transformers.tiny import logits_of, text_of

pytestmark = pytest.mark.engine

STORY = (
    "A lighthouse keeper wrote down every ship that passed. In the first year there were few, and he knew "
    "each by name. In the second year the harbour was widened, and they came in the night as well. "
)


def test_a_real_model_says_the_same_with_kept_kv_and_after_a_restart(smollm2: Any, tmp_path: Path) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": STORY * 6 + question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    first, second = ask("Who wrote down the ships?"), ask("What happened in the second year?")
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared > 256
    expected = {tuple(tokens): text_of(model, tokens, 8) for tokens in (first, second)}
    address = f"disk:{tmp_path}?capacity=1GiB"
    with (
        open_cache("memory:256MiB", address) as cache,
        attach(model, tokenizer, cache, spec=smollm2.spec) as engine,
    ):
        text, report = answer(engine, first, 8, stop=())
        assert (text, report.reused_tokens) == (expected[tuple(first)], 0)
        text, report = answer(engine, second, 8, stop=())
        assert (text, report.reused) == (expected[tuple(second)], {"memory": shared})
        warm = engine.forward(torch.tensor([second]))
        assert warm.report.reused_tokens >= len(second) - 16
        assert float((warm.logits[0, -1] - logits_of(model, second)).abs().max()) < 1e-4
        del warm
    with (
        open_cache("memory:256MiB", address) as cache,
        attach(model, tokenizer, cache, spec=smollm2.spec) as engine,
    ):
        text, report = answer(engine, first, 8, stop=())
        assert text == expected[tuple(first)]
        assert report.reused.keys() == {"disk"}
        assert report.reused_tokens >= len(first) - 16
