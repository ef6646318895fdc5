"""Rules across restarts, holes in chains, several tiers, and servers that hosts share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import retain
from retain.cache import Prefix, Query, Selection, open_cache
from retain.errors import StoreUnavailable
from retain.identity import chain, salt_of, space_of
from retain.stores.disk import DiskStore
from tests.blocks import block_at, chain_of, small_spec
from tests.cache.conformance import ALICE, BOB, SIZE, SLOT, wait_for
from tests.cache.test_cache import SPEC, cache_over, files, fill, read
from tests.stores.servers import Proxy, Running, redis_server


def test_a7_a_tenants_quota_counts_what_earlier_runs_left(tmp_path: Path) -> None:
    tier = f"disk:{tmp_path}?capacity={SIZE * 20}&quota={SIZE * 5}&quota.bob={SIZE * 3}"
    for run in range(3):
        with retain.open("memory:8MiB", tier) as cache:
            for salt in (ALICE, BOB, None):
                fill(cache, chain_of(range(1000 * run, 1000 * run + 64), salt=salt))
            assert cache.flush()
            tenants = cache.stats().tiers["disk"].tenants
            assert tenants["bob"] == (3, 3 * SIZE)
            assert sorted(size for _, size in tenants.values())[1] <= 5 * SIZE
            assert tenants[""] == (4 * (run + 1), 4 * (run + 1) * SIZE)
            assert cache.stats().tiers["disk"].bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_a7_a_smaller_quota_is_kept_from_the_start(tmp_path: Path) -> None:
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        for salt in (ALICE, BOB):
            fill(cache, chain_of(range(96), salt=salt))
    with retain.open("memory:8MiB", f"disk:{tmp_path}?quota.bob={SIZE * 2}") as cache:
        wait_for(lambda: cache.stats().tiers["disk"].tenants["bob"] == (2, 2 * SIZE))
        assert read(cache, chain_of(range(96), salt=BOB))[0] == 32
        assert read(cache, chain_of(range(96), salt=ALICE))[0] == 96


def test_ages_and_times_count_from_when_a_block_was_stored_not_from_a_restart(tmp_path: Path) -> None:
    old, young = chain_of(range(32)), chain_of(range(100, 132))
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        fill(cache, old)
        fill(cache, young)
    for path in files(tmp_path):
        if path.name[:64] in {key.hex() for key in old.keys}:
            os.utime(path, (time.time() - 3600, time.time() - 3600))
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        assert cache.remove(Selection(older_than=7200)).objects == 0
        assert cache.missing(Query(old, SPEC)) == []
    with retain.open("memory:8MiB", f"disk:{tmp_path}?ttl=30m") as cache:
        assert read(cache, old)[0] == 0
        assert read(cache, young)[0] == 32
    assert len(files(tmp_path)) == 2


def test_a_clock_that_jumps_does_not_make_blocks_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = chain_of(range(32))
    with retain.open("memory:8MiB?ttl=1h", f"disk:{tmp_path}?ttl=1h") as cache:
        fill(cache, prompt)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 1e6)
        assert read(cache, prompt)[0] == 32
        monkeypatch.setattr(time, "time", lambda: now - 1e6)
        assert cache.flush()
        assert read(cache, prompt)[0] == 32
    with retain.open("memory:8MiB?ttl=1h", f"disk:{tmp_path}?ttl=1h") as cache:
        assert read(cache, prompt)[0] == 32, "what seems to come from the future is new"


def test_a_restart_knows_of_a_chain_what_no_prompt_can_reach(tmp_path: Path) -> None:
    broken, whole = chain_of(range(64)), chain_of(range(1000, 1064))
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        fill(cache, broken)
        fill(cache, whole)
    next(path for path in files(tmp_path) if path.name.startswith(broken.keys[0].hex())).unlink()
    with retain.open("memory:8MiB", f"disk:{tmp_path}?capacity={SIZE * 7}") as cache:
        wait_for(lambda: cache.stats().tiers["disk"].unreachable == (3, 3 * SIZE))
        fill(cache, chain_of(range(2000, 2048)))
        assert cache.flush()
        assert cache.stats().tiers["disk"].unreachable == (0, 0)
        assert read(cache, whole)[0] == 64


class Moody(DiskStore):
    """A store on disk that takes no writes while it is told so."""

    refuses = False

    def write(self, name, chunks):  # type: ignore[no-untyped-def]
        if self.refuses:
            raise StoreUnavailable("not now")
        super().write(name, chunks)


def test_a_hole_is_filled_before_what_lies_behind_it_is_written(tmp_path: Path) -> None:
    store, prompt = Moody(tmp_path), chain_of(range(96))
    cache = cache_over(store)
    fill(cache, prompt, blocks=[0])
    cache.flush()
    store.refuses = True
    fill(cache, prompt, blocks=[1, 2])
    cache.flush()
    store.refuses = False
    fill(cache, prompt, blocks=[3])
    cache.flush()
    assert len(files(tmp_path)) == 4, "the two that failed went first"
    assert cache.stats().counters["refilled_blocks"] == 2
    store.refuses = True
    fill(cache, prompt, blocks=[4])
    cache.flush()
    cache.clear(tier="memory")
    assert read(cache, prompt)[0] == 64
    store.refuses = False
    fill(cache, prompt, blocks=[5])
    cache.flush()
    assert len(files(tmp_path)) == 4, "nothing is written behind a hole that stays"
    assert cache.stats().counters["unchained_blocks"] >= 1
    fill(cache, prompt, blocks=[4])
    cache.flush()
    assert len(files(tmp_path)) == 6, "and all is when it is filled"
    cache.close()


def test_writes_that_failed_are_tried_again_when_others_succeed(tmp_path: Path) -> None:
    store = Moody(tmp_path)
    cache = cache_over(store)
    store.refuses = True
    fill(cache, chain_of(range(64)))
    cache.flush()
    store.refuses = False
    fill(cache, chain_of(range(1000, 1016)))
    wait_for(lambda: cache.flush() and len(files(tmp_path)) == 5)
    cache.close()


def test_a_block_computed_anew_though_it_lies_below_stays_in_memory(tmp_path: Path) -> None:
    prompt = chain_of(range(32))
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        fill(cache, prompt)
        cache.flush()
        cache.clear(tier="memory")
        fill(cache, prompt)
        with cache.lookup(Query(prompt, SPEC)) as hit:
            assert hit.tokens_by_tier == {"memory": 32}
        assert cache.flush()
        assert len(files(tmp_path)) == 2


def test_a32_memory_does_not_grow_with_prompts_and_tenants_that_come_and_go() -> None:
    spec = small_spec(layers=1, heads=1, dim=2)
    with open_cache(f"memory:{4096 * 64}?quota=1MiB") as cache:
        memory = cache.tiers[0]

        def come_and_go(first: int) -> int:
            for number in range(first, first + 300):
                prompt = chain_of([number] * 32, salt=salt_of(f"tenant {number}"))
                cache.own(prompt.space, f"tenant {number}")
                read(cache, prompt, spec)
                for index in range(2):
                    cache.store(block_at(spec, prompt, index))
            return memory.index.nbytes

        size = come_and_go(0)
        assert come_and_go(10_000) <= size
        assert len(memory.spaces._spaces) <= 66
        assert len(memory.tenants._spaces) <= 66
        assert len(cache.gaps._suspects) <= 256
        assert len(cache._hits) == 0


# several tiers, and servers that hosts share


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def tier(redis: Running, tmp_path: Path) -> str:
    return f"redis://127.0.0.1:{redis.port}?prefix={tmp_path}:&wait=5s"


def test_a_hit_is_promoted_to_the_tiers_above_that_take_it(tier: str, tmp_path: Path) -> None:
    prompt = chain_of(range(64))
    with open_cache("memory:8MiB", tier) as one:
        fill(one, prompt)
        one.flush(10)
    for rules, expected in (("", 4), ("?promote=no", 0), ("?admit=reused", 4), ("?writes=evicted", 0)):
        folder = tmp_path / f"disk{rules.strip('?')}"
        with open_cache("memory:8MiB", f"disk:{folder}{rules}", tier) as cache:
            assert read(cache, prompt)[0] == 64
            assert cache.demoter._workers.wait_idle(10)
            assert len(files(folder)) == expected, rules
            cache.clear(tier="memory")


def test_a_capacity_of_a_shared_tier_counts_what_others_wrote(tier: str) -> None:
    with open_cache("memory:8MiB", tier) as one:
        for start in range(0, 5000, 1000):
            fill(one, chain_of(range(start, start + 32)))
        one.flush(10)
    with open_cache("memory:8MiB", f"{tier}&capacity={SIZE * 6}") as cache:
        wait_for(lambda: cache.stats().tiers["redis"].bytes == 6 * SIZE)
        fill(cache, chain_of(range(9000, 9064)))
        cache.flush(10)
        with open_cache("memory:8MiB", tier) as other:
            other.finder.adopter.discover(other.tiers[1])
            assert other.stats().tiers["redis"].bytes == 6 * SIZE, "what was evicted is gone from the server"


def test_a30_a_shared_tier_is_cleared_in_few_round_trips(redis: Running, tmp_path: Path) -> None:
    with Proxy(redis.port) as proxy:
        tier = f"redis://127.0.0.1:{proxy.port}?prefix={tmp_path}:&wait=5s"
        with open_cache("memory:8MiB", tier) as cache:
            fill(cache, chain_of(range(1600)))
            assert cache.flush(20)
            proxy.delay = 0.05
            began = time.monotonic()
            gone = cache.clear(tier="redis")
            assert gone.objects == 100
            assert time.monotonic() - began < 2.5, "100 round trips would take 10 s"


def test_a30_prefixes_tenants_and_ages_reach_what_only_the_server_knows(tier: str) -> None:
    alice, bob = chain_of(range(64), salt=ALICE), chain_of(range(64), salt=BOB)
    tailed = chain(space_of(b"k" * 32), [*range(500, 532), *range(20)], 32)
    with open_cache("memory:8MiB", tier) as one:
        fill(one, alice)
        fill(one, bob)
        one.store(block_at(SPEC, tailed, 0))
        one.store(block_at(SPEC, tailed, 1, count=16))
        one.flush(10)
    with open_cache("memory:8MiB", tier) as cache:
        assert cache.remove(Selection(tenant="alice")).tiers["redis"] == (4, 4 * SIZE)
        assert cache.remove(Selection(prefix=Prefix.of(tailed))).blocks == 2
        assert cache.remove(Selection(prefix=Prefix.of(chain_of(range(40), salt=BOB)))).blocks == 4
        assert read(cache, alice)[0] == read(cache, bob)[0] == read(cache, tailed)[0] == 0


def test_a30_what_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        tier = f"redis://127.0.0.1:{server.port}"
        with open_cache("memory:8MiB", tier, "http://127.0.0.1:9/kv") as cache:
            fill(cache, chain_of(range(32)))
            assert cache.flush(10)
            cache.tiers[1].shared._remote._deadline = 0.5
            server.stop()
            gone = cache.clear()
            assert gone.tiers["memory"] == (2, 2 * SIZE)
            assert gone.tiers["redis"] == (0, 0)
            assert any(text.startswith("redis:") for text in gone.missed)
            assert any("only read here" in text for text in gone.missed)
            pinned = cache.pin(Selection())
            assert any("its server decides" in text for text in pinned.missed)
            server.go_on()


def test_a_full_memory_that_waits_for_writes_below_refuses_nothing(tmp_path: Path) -> None:
    with open_cache(f"memory:{SLOT * 4}", f"disk:{tmp_path}?writes=evicted") as cache:
        for start in range(0, 40_000, 1000):
            fill(cache, chain_of(range(start, start + 16)))
        assert cache.stats().counters["refused_blocks"] == 0
        assert cache.flush()
        assert len(files(tmp_path)) == 40
