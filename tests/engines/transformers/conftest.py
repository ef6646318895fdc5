"""Caches and engines for tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from retain.cache import Cache, open_cache

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are slower on two threads than on one, and far slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
