"""Capacity, eviction, leases and the counters that account for them."""

import gc
import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import retain
from retain.cache import Query
from retain.cache import cache as cache_module
from retain.codecs import codec
from retain.identity import salt_of
from tests.blocks import block_at, chain_of, small_spec
from tests.cache.test_cache import SPEC, files, fill, read, same

SIZE = sum(len(chunk) for chunk in block_at(SPEC, chain_of(range(16))).encode(codec("raw")))
PAGE = 4096
SLOT = -(-SIZE // PAGE) * PAGE


def du(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def test_a6_lookups_that_nobody_loads_do_not_keep_blocks():
    with retain.open(f"memory:{SLOT * 8}", policy="lru-leaf") as cache:
        chain = chain_of(range(64))
        fill(cache, chain)
        for _ in range(10_000):
            cache.lookup(Query(chain, SPEC))
        gc.collect()
        assert cache.stats().tiers["memory"].leased == 0
        fill(cache, chain_of(range(1000, 1128)))
        assert read(cache, chain)[0] == 0


def test_a6_hits_that_are_held_on_to_lapse(monkeypatch):
    monkeypatch.setattr(cache_module, "LEASE_SECONDS", 0.05)
    with retain.open(f"memory:{SLOT * 4}", policy="lru-leaf") as cache:
        chain = chain_of(range(64))
        blocks = fill(cache, chain)
        held = [cache.lookup(Query(chain, SPEC)) for _ in range(100)]
        assert cache.store(block_at(SPEC, chain_of(range(500, 516)))).reason == "no room"
        time.sleep(0.06)
        late = cache.load(held[0])
        assert same([dict(b.arrays) for b in late.blocks], blocks), "a lapsed hit is looked up again"
        late.close()
        fill(cache, chain_of(range(1000, 1064)))
        assert cache.load(held[1]).tokens == 0
        assert cache.stats().tiers["memory"].leased == 0


def test_blocks_that_are_read_are_not_evicted_until_the_last_view_is_gone():
    with retain.open(f"memory:{SLOT * 2}") as cache:
        chain = chain_of(range(32))
        blocks = fill(cache, chain)
        arrays = cache.load(cache.lookup(Query(chain, SPEC))).blocks[0].arrays["k"][1:]
        gc.collect()
        cache.store(block_at(SPEC, chain_of(range(500, 516))))
        cache.store(block_at(SPEC, chain_of(range(600, 616))))
        assert arrays.tobytes() == blocks[0].arrays["k"][1:].tobytes()
        del arrays
        gc.collect()
        assert cache.stats().tiers["memory"].leased == 0


def test_a7_the_limit_counts_what_earlier_runs_left(tmp_path):
    limit = SIZE * 10
    tier = f"disk:{tmp_path}?capacity={limit}"
    for run in range(3):
        with retain.open("memory:8MiB", tier) as cache:
            for i in range(8):
                fill(cache, chain_of(range(10_000 * run + 100 * i, 10_000 * run + 100 * i + 16)))
                cache.flush()
                assert du(tmp_path) <= limit + SIZE
            assert cache.stats().tiers["disk"].bytes == sum(path.stat().st_size for path in files(tmp_path))
    with retain.open("memory:8MiB", f"disk:{tmp_path}?capacity={SIZE * 3}") as cache:
        assert du(tmp_path) <= SIZE * 3, "a smaller limit is kept from the start"
        assert cache.stats().tiers["disk"].objects == 3


def test_a8_files_of_a_killed_process_are_adopted_and_foreign_ones_left_alone(tmp_path, caplog):
    program = f"""
import os, retain
from tests.blocks import *
cache = retain.open("memory:8MiB", "disk:{tmp_path}")
chain = chain_of(range(64))
for i in range(4):
    cache.store(block_at(small_spec(), chain, i))
cache.flush()
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parent.parent.parent
    run = subprocess.run([sys.executable, "-c", program], cwd=root, check=False)
    assert run.returncode == -9
    shard = files(tmp_path)[0].parent
    (shard / "notes.txt").write_text("mine")
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        assert cache.stats().counters["adopted_objects"] == 4
        assert read(cache, chain_of(range(64)))[0] == 64
    assert (shard / "notes.txt").read_text() == "mine"


def test_a12_the_counters_give_the_hit_rate_of_the_oracle():
    rng = np.random.default_rng(3)
    prompts = [
        chain_of([int(p), *range(16 * int(n))])
        for p, n in zip(rng.integers(0, 6, 200), rng.integers(1, 6, 200), strict=True)
    ]
    kept: set[bytes] = set()
    asked = hits = 0
    with retain.open("memory:64MiB") as cache:
        for chain in prompts:
            depth = 0
            while depth < len(chain.keys) and chain.keys[depth] in kept:
                depth += 1
            asked += len(chain.tokens)
            with cache.lookup(Query(chain, SPEC)) as hit:
                hits += depth * 16
                assert hit.tokens >= depth * 16
                hits += hit.tokens - depth * 16
            for index in cache.missing(Query(chain, SPEC)):
                cache.store(block_at(SPEC, chain, index))
            kept.update(chain.keys)
        counters = cache.stats().counters
        assert counters["requested_tokens"] == asked
        assert counters["hit_tokens"] == hits
        assert counters["lookups"] == 200 == counters["lookup_hits"] + counters["lookup_misses"]


def test_a14_every_counter_moves_when_its_event_happens_and_only_then(tmp_path):
    with retain.open(f"memory:{SLOT * 4}", f"disk:{tmp_path}?capacity={SIZE * 6}") as cache:

        def moved(action):
            cache.flush()
            before = cache.stats().counters
            action()
            cache.flush()
            after = cache.stats().counters
            assert all(after[name] >= value for name, value in before.items()), "counters never fall"
            return {name: n for name in after if (n := after[name] - before.get(name, 0))}

        chain = chain_of(range(64))
        assert moved(lambda: cache.lookup(Query(chain, SPEC)).release()) == {
            "lookups": 1,
            "lookup_misses": 1,
            "requested_tokens": 64,
        }
        assert moved(lambda: fill(cache, chain)) == {
            "stored_blocks": 4,
            "stored_bytes": 4 * SIZE,
            "written_objects": 4,
            "written_bytes": 4 * SIZE,
        }
        assert moved(lambda: cache.store(block_at(SPEC, chain))) == {"present_blocks": 1}
        assert moved(lambda: read(cache, chain, limit=63)) == {
            "lookups": 1,
            "lookup_hits": 1,
            "requested_tokens": 63,
            "hit_tokens": 63,
            "loads": 1,
            "loaded_blocks": 4,
            "loaded_tokens": 63,
            "loaded_bytes": 4 * SIZE,
        }
        assert moved(lambda: cache.clear(tier="memory")) == {"dropped_objects": 4, "dropped_bytes": 4 * SIZE}
        assert moved(lambda: read(cache, chain, limit=32)) == {
            "lookups": 1,
            "lookup_hits": 1,
            "requested_tokens": 32,
            "hit_tokens": 32,
            "loads": 1,
            "loaded_blocks": 2,
            "loaded_tokens": 32,
            "loaded_bytes": 2 * SIZE,
            "promoted_blocks": 2,
        }
        more = moved(lambda: fill(cache, chain_of(range(1000, 1064))))
        assert more["stored_blocks"] == 4
        assert more["evicted_objects"] == 2 + 2, "two of memory's places, two of disk's"
        assert moved(lambda: cache.count("audits")) == {"audits": 1}
        stats = cache.stats()
        counters = stats.counters
        resident = sum(tier.objects for tier in stats.tiers.values())
        came = counters["stored_blocks"] + counters["written_objects"] + counters["promoted_blocks"]
        assert came - counters["evicted_objects"] - counters["dropped_objects"] == resident
        assert counters["lookups"] == counters["lookup_hits"] + counters["lookup_misses"]


def replay_reference(requests, capacity):
    """LRU over block keys: hits are leading blocks present; then every block is touched in chain order."""
    kept: OrderedDict[bytes, None] = OrderedDict()
    hits = evictions = 0
    for keys in requests:
        depth = 0
        while depth < len(keys) and keys[depth] in kept:
            depth += 1
        hits += depth
        for key in keys:
            if key in kept:
                kept.move_to_end(key)
            else:
                if len(kept) >= capacity:
                    kept.popitem(last=False)
                    evictions += 1
                kept[key] = None
    return hits, evictions


@pytest.mark.parametrize("capacity", [5, 17, 60])
def test_a31_a_cache_with_policy_lru_evicts_like_the_reference(capacity):
    rng = np.random.default_rng(capacity)
    spec = small_spec(layers=1, heads=1, dim=2)
    chains = [
        chain_of([int(p) for p in rng.zipf(1.3, 1) % 9] * 16 + [*range(16 * int(n))])
        for n in rng.integers(0, 4, 300)
    ]
    size = -(-sum(len(c) for c in block_at(spec, chains[0]).encode(codec("raw"))) // PAGE) * PAGE
    hits = 0
    with retain.open(f"memory:{size * capacity}", policy="lru") as cache:
        for chain in chains:
            with cache.lookup(Query(chain, spec)) as hit:
                hits += hit.tokens // 16
            for index in range(len(chain.keys)):
                if cache.tiers[0].index.same_key(chain.keys[index]):
                    cache.tiers[0].touch([chain.keys[index]])
                else:
                    assert cache.store(block_at(spec, chain, index)).reason == "stored"
        expected_hits, evictions = replay_reference([chain.keys for chain in chains], capacity)
        assert hits == expected_hits
        assert cache.stats().counters["evicted_objects"] == evictions


def test_children_go_before_their_parents():
    with retain.open(f"memory:{SLOT * 6}") as cache:
        old = chain_of(range(64))
        fill(cache, old)
        fill(cache, chain_of(range(1000, 1064)))
        assert read(cache, old)[0] == 32, "the ends of the older chain went, its beginning is still of use"


KILLER = """
import os, random, signal, sys, time
import numpy, retain
from tests.blocks import *

def store_for_ever(round_, ready):
    cache = retain.open("memory:8MiB", "disk:{folder}")
    for n in range(100000):
        chain = chain_of(range(100 * n + 10**7 * round_, 100 * n + 10**7 * round_ + 64))
        for i in range(4):
            cache.store(block_at(small_spec(layers=8, heads=4, dim=16), chain, i))
        if n == 0:
            os.write(ready, b"x")
        cache.flush()

random.seed(0)
for round_ in range(100):
    heard, ready = os.pipe()
    child = os.fork()
    if child == 0:
        store_for_ever(round_, ready)
    os.read(heard, 1)
    time.sleep(random.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(heard), os.close(ready)
"""


@pytest.mark.slow
def test_a_process_killed_while_storing_a_hundred_times_leaves_a_usable_cache(tmp_path):
    spec = small_spec(layers=8, heads=4, dim=16)
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", KILLER.format(folder=tmp_path)], cwd=root, check=True)
    with retain.open("memory:64MiB", f"disk:{tmp_path}") as cache:
        seen = 0
        for round_ in range(100):
            for n in range(3):
                chain = chain_of(range(100 * n + 10**7 * round_, 100 * n + 10**7 * round_ + 64))
                tokens, got = read(cache, chain, spec)
                assert same(got, [block_at(spec, chain, i) for i in range(tokens // 16)])
                seen += tokens
        assert seen > 0
        assert not cache.stats().failures, cache.stats().failures
        fill(cache, chain_of(range(5, 69), salt=salt_of("new")), spec)
    whole = set(files(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path not in whole], (
        "no parts of files"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_is_a_counted_miss_and_leaves_no_part_of_a_file(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        spec = small_spec(layers=8, heads=4, dim=16)
        with retain.open("memory:8MiB", f"disk:{mount / 'kept'}") as cache:
            chain = chain_of(range(320))
            blocks = fill(cache, chain, spec)
            cache.flush()
            assert same(read(cache, chain, spec)[1], blocks), "memory still serves"
            stats = cache.stats()
            assert stats.tiers["disk"].objects == len(files(mount))
            assert stats.counters["evicted_objects"] + sum(stats.failures.values()) > 0
        with retain.open("memory:8MiB", f"disk:{mount / 'kept'}") as cache:
            tokens, got = read(cache, chain, spec)
            assert same(got, blocks[: tokens // 16])
            assert not cache.stats().failures
    finally:
        subprocess.run(["umount", mount], check=True)
