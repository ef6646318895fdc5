"""The contract of caches, kept by one in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import retain
from retain.cache import BlockCache
from tests.cache.conformance import CacheConformance, Open


class TestInProcess(CacheConformance):
    @pytest.fixture
    def opened(self) -> Iterator[Open]:
        caches: list[BlockCache] = []

        def open_one(*tiers: str, **fields: str) -> BlockCache:
            caches.append(retain.open(*tiers, **fields))
            return caches[-1]

        yield open_one
        for cache in caches:
            cache.close()
