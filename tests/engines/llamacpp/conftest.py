"""GGUF files of tiny models, caches for them, and engines on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from retain.cache import Cache, open_cache

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

from tests.engines.transformers import tiny  # noqa: E402  it needs transformers
from tests.model.ggufs import write_gguf  # noqa: E402

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}

MODELS: dict[str, Callable[[], Any]] = {
    "llama-gqa": tiny.llama,
    "llama-mqa": lambda: tiny.llama(num_key_value_heads=1),
    "llama-head-80": lambda: tiny.llama(head_dim=80),
    "llama-1-layer": lambda: tiny.llama(num_hidden_layers=1),
    "llama-31": lambda: tiny.llama(rope_parameters=LLAMA31),
    "llama-yarn": lambda: tiny.llama(rope_parameters=YARN),
    "qwen2": tiny.qwen2,
    "qwen3": tiny.qwen3,
    "gemma3-window-32": lambda: tiny.gemma3(
        num_hidden_layers=7, layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    ),
}
"""llama.cpp makes every sixth layer of Gemma 3 a full one."""


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The GGUF file of one of MODELS in float32, written once."""
    folder = tmp_path_factory.mktemp("ggufs")

    def written(name: str) -> Path:
        path: Path = folder / f"{name}.gguf"
        if not path.exists():
            write_gguf(MODELS[name](), path)
        return path

    return written


@pytest.fixture
def opened() -> Iterator[Callable[..., Cache]]:
    """Opens caches that load whatever they have: tiny models compute faster than anything loads."""
    with ExitStack() as stack:

        def open_one(*tiers: str) -> Cache:
            cache = stack.enter_context(open_cache(*(tiers or ("memory:256MiB",))))
            cache.planner.best_prefix = _everything  # type: ignore[method-assign]
            return cache

        yield open_one


def _everything(spec: Any, blocks: Any, total: int) -> int:
    return len(blocks)


@pytest.fixture
def cache(opened: Callable[..., Cache]) -> Cache:
    return opened()
