"""The contract of caches, kept by one in a daemon."""

from __future__ import annotations

import pytest

from tests.cache.conformance import CacheConformance, Open


class TestInADaemon(CacheConformance):
    @pytest.fixture
    def opened(self, connect: Open) -> Open:
        return connect
