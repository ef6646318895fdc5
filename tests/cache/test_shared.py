"""Tiers that hosts share: what one stores another finds, and trouble with the server is a miss."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import retain
from retain.cache import Query, open_cache
from retain.fidelity import lineage_of
from retain.identity import chain, salt_of, space_of
from tests.blocks import block_at, chain_of, small_spec
from tests.cache.test_cache import fill, read, same
from tests.stores.servers import Proxy, Running, free_port, program, redis_server

SPEC = small_spec()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def tier(redis: Running, tmp_path: Path) -> str:
    return f"redis://127.0.0.1:{redis.port}?prefix={tmp_path}:&wait=5s"


def flat(text: str, *words: str) -> str:
    command = [program("redis-cli"), "-p", text, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_what_one_host_stores_another_finds(tier):
    prompt = chain_of(range(64))
    with open_cache("memory:8MiB", tier) as one, open_cache("memory:8MiB", tier) as other:
        assert read(other, prompt)[0] == 0
        blocks = fill(one, prompt)
        assert one.flush(10)
        tokens, got = read(other, prompt)
        assert tokens == 64
        assert same(got, blocks)
        assert other.stats().counters["asked_objects"] > 0
        assert other.stats().failures == {}
        assert other.lookup(Query(prompt, SPEC)).tokens_by_tier == {"memory": 64}


def test_a_lossy_tier_serves_who_accepts_it_and_finds_what_was_computed_on_its_blocks(tier):
    prompt = chain_of(range(48))
    lossy = f"{tier}&codec=int8"
    with open_cache("memory:8MiB", lossy) as one, open_cache("memory:8MiB", lossy) as other:
        blocks = [block_at(SPEC, prompt, index) for index in range(3)]
        behind = replace(blocks[2].header, fidelity="lossy", lineage=lineage_of("int8"))
        for block in (*blocks[:2], replace(blocks[2], header=behind)):
            assert one.store(block).kept
        assert one.flush(10)
        for fidelity, tokens in (("exact", 0), ("fine", 0), ("int8", 48), ("near", 48)):
            with other.lookup(Query(prompt, SPEC, fidelity=fidelity), plan=False) as hit:
                assert hit.tokens == tokens
        with other.load(other.lookup(Query(prompt, SPEC, fidelity="near"), plan=False)) as loaded:
            headers = [block.header for block in loaded.blocks]
            assert {(each.fidelity, each.lineage) for each in headers} == {("lossy", lineage_of("int8"))}
            held = [
                replace(each, arrays={name: array.copy() for name, array in each.arrays.items()})
                for each in loaded.blocks
            ]
        assert other.lookup(Query(prompt, SPEC), plan=False).tokens == 0
        # What was decoded is not written a second time to where it came from.
        other.clear(tier="memory")
        assert all(other.store(block).kept for block in held)
        assert other.flush(10)
        assert other.stats().counters["written_objects"] == 0
        assert other.stats().failures == {}


def test_a_tail_at_the_prompts_end_is_found_by_its_key(tier):
    tokens = list(range(100, 356)) + list(range(60))
    prompt = chain(space_of(b"k" * 32), tokens, 256)
    with open_cache("memory:8MiB", tier) as one, open_cache("memory:8MiB", tier) as other:
        for block in (block_at(SPEC, prompt, 0), block_at(SPEC, prompt, 1, count=48)):
            assert one.store(block).kept
        one.flush(10)
        assert read(other, prompt)[0] == 256 + 48
        assert read(other, prompt, limit=256 + 40)[0] == 256 + 40
        assert read(other, chain(space_of(b"k" * 32), tokens[:-20], 256))[0] in (256, 256 + 40)


def test_a5_a_tail_that_ends_with_the_prompt_is_found_whatever_its_length(tier):
    prompt = chain(space_of(b"k" * 32), list(range(100, 356)) + list(range(57)), 256)
    with open_cache("memory:8MiB", tier) as one, open_cache("memory:8MiB", tier) as other:
        for block in (block_at(SPEC, prompt, 0), block_at(SPEC, prompt, 1, count=57)):
            assert one.store(block).kept
        one.flush(10)
        assert read(other, prompt, limit=256 + 56)[0] == 256 + 56


def test_a_lookup_asks_once_for_all_keys(redis, tmp_path):
    prompt = chain_of(range(1600))
    with Proxy(redis.port) as proxy:
        tier = f"redis://127.0.0.1:{proxy.port}?prefix={tmp_path}:&wait=5s"
        with open_cache("memory:8MiB", tier) as cache:
            read(cache, chain_of([7] * 32))
            proxy.delay = 0.2
            started = time.monotonic()
            assert read(cache, prompt)[0] == 0
            assert time.monotonic() - started < 0.6


def test_what_the_server_evicts_is_a_plain_miss_and_is_stored_again(tier, redis, tmp_path):
    prompt = chain_of(range(64))
    with open_cache("memory:8MiB", tier) as cache:
        blocks = fill(cache, prompt)
        cache.flush()
        cache.clear(tier="memory")
        flat(str(redis.port), "del", f"{tmp_path}:{blocks[1].header.name}")
        assert read(cache, prompt)[0] == 16
        assert cache.stats().failures == {}
        assert cache.stats().counters["gone_objects"] == 1
        assert read(cache, prompt)[0] == 16, "it is asked for again, and is not there"
        assert cache.store(blocks[1]).kept
        assert cache.flush(10)
        cache.clear(tier="memory")
        assert read(cache, prompt)[0] == 64


def test_a_server_without_room_costs_only_the_copy_there(tmp_path):
    with redis_server(tmp_path / "redis", "--maxmemory", "100kb") as server:
        tier = f"redis://127.0.0.1:{server.port}?wait=5s"
        with open_cache("memory:8MiB", tier) as cache:
            prompt = chain_of(range(64))
            blocks = fill(cache, prompt)
            cache.flush(10)
            assert same(read(cache, prompt)[1], blocks)
            assert cache.stats().tiers["redis"].objects == 0
            assert sum(cache.stats().failures.values()) == 4


def test_a_damaged_object_is_a_miss_for_all_and_is_replaced(tier, redis, tmp_path):
    prompt = chain_of(range(32))
    with open_cache("memory:8MiB", tier) as cache:
        blocks = fill(cache, prompt)
        cache.flush()
        cache.clear(tier="memory")
        flat(str(redis.port), "setrange", f"{tmp_path}:{blocks[0].header.name}", "3000", "XXXX")
        assert read(cache, prompt)[0] == 0
        assert flat(str(redis.port), "exists", f"{tmp_path}:{blocks[0].header.name}") == "0"
        assert cache.store(blocks[0]).reason == "stored"
        cache.flush()
        cache.clear(tier="memory")
        assert same(read(cache, prompt)[1], blocks)


def test_a20_a_shared_tier_serves_no_tenant_anothers_blocks(tier):
    alice, bob = (chain_of(range(64), salt=salt_of(name)) for name in ("alice", "bob"))
    with open_cache("memory:8MiB", tier) as one, open_cache("memory:8MiB", tier) as other:
        fill(one, alice)
        one.flush()
        assert read(other, bob)[0] == 0
        assert other.nearest(bob) is None
        assert read(other, alice)[0] == 64


def test_a30_clear_empties_a_shared_tier_of_what_no_index_here_knows(tier):
    alice, bob = (chain_of(range(64), salt=salt_of(name)) for name in ("alice", "bob"))
    with open_cache("memory:8MiB", tier) as one:
        fill(one, alice)
        fill(one, bob)
        one.flush()
    with open_cache("memory:8MiB", tier) as other:
        removed = other.clear(space=alice.space)
        assert removed.objects == 4
        assert removed.bytes > 0
        assert read(other, alice)[0] == 0
        assert other.clear(tier="redis", space=alice.space).objects == 0
        keys = bob.keys[2:3]
        assert other.drop(keys).objects == 1
        assert read(other, bob)[0] == 32
        assert other.clear(tier="redis").objects == 3
        other.clear()
        assert read(other, bob)[0] == 0


def test_a21_a_tier_that_is_down_costs_a_request_next_to_nothing(caplog):
    with open_cache("memory:8MiB", f"redis://127.0.0.1:{free_port()}") as cache:
        prompt = chain_of(range(320))
        blocks = fill(cache, prompt)
        cache.flush(10)
        cold = [chain_of(range(n, n + 320)) for n in range(1000, 1010)]
        taken = []
        for each in cold:
            started = time.monotonic()
            assert read(cache, each)[0] == 0
            taken.append(time.monotonic() - started)
        assert max(taken[3:]) < 0.05, taken
        assert same(read(cache, prompt)[1], blocks)
        health = cache.stats().tiers["redis"].health
        assert health is not None
        assert health.state == "down"
        assert "refused" in health.text
        named = [record for record in caplog.records if "refused" in record.getMessage()]
        assert len(named) <= 4, "once by the store, once by each kind of failure of the cache"


def test_a21_a_server_that_hangs_costs_a_request_50_ms_until_the_breaker_opens(tmp_path):
    with redis_server(tmp_path / "redis") as server:
        address = f"redis://127.0.0.1:{server.port}"
        prompt = chain_of(range(64))
        with open_cache("memory:8MiB", address) as cache:
            fill(cache, prompt)
            assert cache.flush(10)
            read(cache, chain_of([9] * 32))
            cache.clear(tier="memory")
            server.stop()
            taken = []
            for n in range(8):
                each = prompt if n == 0 else chain_of(range(1000 * n, 1000 * n + 64))
                started = time.monotonic()
                assert read(cache, each)[0] == 0
                taken.append(time.monotonic() - started)
            # 50 ms, and what a busy machine adds.
            assert max(taken) < 0.25, taken
            assert max(taken[4:]) < 0.05, taken
            server.go_on()
            deadline = time.monotonic() + 20
            while read(cache, prompt)[0] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a22_a_slow_answer_is_not_waited_for_and_serves_the_next_request(redis, tmp_path):
    prompt = chain_of(range(64))
    tier = f"redis://127.0.0.1:{redis.port}?prefix={tmp_path}:&wait=5s"
    with open_cache("memory:8MiB", tier) as cache:
        fill(cache, prompt)
        cache.flush()
    with Proxy(redis.port, delay=0.15) as proxy:
        far = f"redis://127.0.0.1:{proxy.port}?prefix={tmp_path}:&wait=5s"
        with open_cache("memory:8MiB", far) as cache:
            for _ in range(4):
                cache.planner.observe_prefill(SPEC, 0, 64, 0.2)
            started = time.monotonic()
            assert cache.lookup(Query(prompt, SPEC)).found == 0
            assert time.monotonic() - started < 0.12
            deadline = time.monotonic() + 10
            while cache.lookup(Query(prompt, SPEC)).found == 0:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_daemon_asks_its_shared_tiers_for_its_clients(tier, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tokens = list(range(300))
    prompt = chain(space_of(b"k" * 32), tokens, 256)
    with open_cache("memory:8MiB", tier) as one:
        for block in (block_at(SPEC, prompt, 0), block_at(SPEC, prompt, 1, count=32)):
            assert one.store(block).kept
        one.flush(10)
    with retain.open("daemon", "memory:8MiB", tier) as cache:
        assert read(cache, prompt)[0] == 288
        state = cache.state()
        assert state is not None
        assert state.health == {"redis": "up"}
        cache.stop_daemon()
