"""The disk store keeps the contract, and survives full disks, killed writers and hostile directories."""

from __future__ import annotations

from pathlib import Path

from retain.stores.base import Store
from retain.stores.disk import DiskStore
from retain.testing.store import StoreConformance


class TestDiskStore(StoreConformance):
    persistent = True

    def make_store(self, directory: Path) -> Store:
        return DiskStore(directory / "objects")
