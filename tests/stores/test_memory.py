"""The memory store keeps the contract, and its arena takes objects up to its capacity."""

from __future__ import annotations

from pathlib import Path

from retain.stores.base import Store
from retain.stores.memory import MemoryStore
from retain.testing.store import StoreConformance


class TestMemoryStore(StoreConformance):
    def make_store(self, directory: Path) -> Store:
        return MemoryStore(3 * self.largest)

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        return MemoryStore(capacity)
