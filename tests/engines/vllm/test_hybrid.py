"""Sliding windows under vLLM's hybrid KV cache manager: several tables of blocks, null blocks among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Answer, Engine, prompt, same

LENGTHS = (100, 257, 512, 530, 900)
WINDOWS = (96, 600)
"""One smaller than a block of 256 tokens, so that vLLM lets go of pages before their block is complete."""

OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 192, "num_gpu_blocks_override": 40}


@pytest.fixture(scope="module", params=WINDOWS)
def model(request: pytest.FixtureRequest, tiny_gemma: Callable[[int], Path]) -> Path:
    return tiny_gemma(request.param)


@pytest.fixture(scope="module")
def plain(engines: Callable[..., Engine], model: Path) -> dict[int, Answer]:
    engine = engines(model, None, **OPTIONS)
    answers = {length: engine.ask(prompt(length, length), tokens=20)[0] for length in LENGTHS}
    engine.close()
    return answers


@pytest.fixture(scope="module")
def engine(engines: Callable[..., Engine], model: Path, plain: dict[int, Answer]) -> Any:
    engine = engines(model, {"tiers": ["memory:256MiB"]}, **OPTIONS)
    yield engine
    engine.close()


def held_blocks(engine: Engine) -> int:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def test_a_prompt_is_found_again_and_answered_alike(engine: Engine, plain: dict[int, Answer]) -> None:
    assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    for length in LENGTHS:
        first, second = (engine.ask(prompt(length, length), tokens=20)[0] for _ in range(2))
        assert same(first, plain[length]), length
        assert same(second, plain[length]), length
        # A window of less than a block has whole blocks loaded alone.
        assert second.cached >= (length - 1) // 256 * 256
        if "600" in engine.llm.llm_engine.vllm_config.model_config.model:
            assert second.cached >= (length - 1) // 16 * 16 - 15
    assert not engine.cache.stats().failures
    assert engine.cache.stats().counters.get("uncaptured_blocks", 0) == 0
    assert held_blocks(engine) == 0


def test_many_at_once_in_a_tiny_pool_are_answered_alike(engine: Engine, plain: dict[int, Answer]) -> None:
    engine.cache.clear()
    for _ in range(2):
        answers = engine.ask(*(prompt(length, length) for length in LENGTHS * 2), tokens=20)
        for length, answer in zip(LENGTHS * 2, answers, strict=True):
            assert same(answer, plain[length]), length
    assert held_blocks(engine) == 0


def test_a_load_that_fails_has_the_whole_request_computed(
    engine: Engine, plain: dict[int, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ask(prompt(900, 900), tokens=20)
    load = engine.cache.load

    def short(hit: Any, **options: Any) -> Any:
        loaded = load(hit, **options)
        object.__setattr__(loaded, "blocks", loaded.blocks[:1])
        object.__setattr__(loaded, "lengths", loaded.lengths[:1])
        return loaded

    monkeypatch.setattr(engine.cache, "load", short)
    assert same(engine.ask(prompt(900, 900), tokens=20)[0], plain[900])
    assert held_blocks(engine) == 0
