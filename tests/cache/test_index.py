"""What earlier runs left in a tier is listed in the background; lookups are served meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import retain
from retain.cache import Query
from retain.cache import adopt as adopting
from retain.stores.base import StoredObject
from retain.stores.disk import DiskStore
from tests.blocks import block_at, chain_of, small_spec

SPEC = small_spec()


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Listing a folder takes until the event is set."""
    go_on = threading.Event()
    scan = DiskStore.scan

    def slowly(store: DiskStore) -> Iterator[StoredObject]:
        go_on.wait(30)
        yield from scan(store)

    monkeypatch.setattr(DiskStore, "scan", slowly)
    monkeypatch.setattr(adopting, "INDEX_SECONDS", 0.01)
    yield go_on
    go_on.set()


def test_a8_a_folder_that_is_not_listed_yet_serves_lookups(tmp_path: Path, held_up: threading.Event) -> None:
    chain = chain_of(range(64))
    address = f"disk:{tmp_path / 'kv'}"
    held_up.set()
    with retain.open("memory:8MiB", address) as cache:
        for index in range(4):
            cache.store(block_at(SPEC, chain, index))
    held_up.clear()
    with retain.open("memory:8MiB", address) as cache:
        disk = cache.tiers[1]
        assert not disk.indexed.is_set()
        assert cache.lookup(Query(chain_of(range(100, 164)), SPEC)).tokens == 0
        with cache.load(cache.lookup(Query(chain, SPEC))) as loaded:
            assert loaded.tokens == 64
        held_up.set()
        assert disk.indexed.wait(30)
        cache.finder.adopter.wait(disk)
        assert cache.stats().tiers["disk"].objects == 4, "found twice, entered once"
        assert not cache.stats().failures


def test_a7_nothing_is_written_to_a_bounded_folder_before_it_is_known_what_it_holds(
    tmp_path: Path, held_up: threading.Event
) -> None:
    address = f"disk:{tmp_path / 'kv'}?capacity=1MiB"
    with retain.open("memory:8MiB", address) as cache:
        cache.store(block_at(SPEC, chain_of(range(16))))
        cache.flush()
        assert not list((tmp_path / "kv").glob("??/*"))
        held_up.set()
        assert cache.tiers[1].indexed.wait(30)
        cache.store(block_at(SPEC, chain_of(range(16, 32))))
        cache.flush()
        assert list((tmp_path / "kv").glob("??/*"))
