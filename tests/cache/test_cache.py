"""The cache: what is stored is found again, from memory, from disk, after a restart; what fails is a miss."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import retain
from retain.block import cut
from retain.cache import Cache, Ledger, Query, Tier
from retain.codecs import codec
from retain.errors import ConfigError, StoreUnavailable
from retain.identity import Media, salt_of
from retain.model import Slice
from retain.stores.disk import DiskStore
from retain.stores.memory import MemoryStore
from tests.blocks import block_at, chain_of, mixed_spec, small_spec

SPEC = small_spec()


def fill(cache, chain, spec=SPEC, blocks=None):
    made = [block_at(spec, chain, i) for i in (range(len(chain.keys)) if blocks is None else blocks)]
    for block in made:
        assert cache.store(block).reason == "stored"
    return made


def read(cache, chain, spec=SPEC, **fields):
    """(tokens, copied arrays of the blocks) that a lookup and load give."""
    with cache.load(cache.lookup(Query(chain, spec, **fields))) as loaded:
        return loaded.tokens, [{n: a.copy() for n, a in block.arrays.items()} for block in loaded.blocks]


def same(got, blocks):
    return len(got) == len(blocks) and all(
        g.keys() == b.arrays.keys() and all(g[n].tobytes() == b.arrays[n].tobytes() for n in g)
        for g, b in zip(got, blocks, strict=True)
    )


def files(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file() and len(path.name) > 64]


@pytest.fixture
def disk(tmp_path):
    return f"disk:{tmp_path / 'kept'}"


@pytest.mark.parametrize("make", [small_spec, mixed_spec])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_stored_is_loaded_bit_for_bit(make, dtype):
    spec = make(dtype)
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(64))
        blocks = fill(cache, chain, spec)
        tokens, got = read(cache, chain, spec)
        assert tokens == 64
        assert same(got, blocks)


@pytest.mark.parametrize("name", ["raw", "lossless"])
def test_a_restarted_cache_finds_what_lies_on_disk(disk, name):
    chain = chain_of(range(64))
    with retain.open("memory:8MiB", f"{disk}?codec={name}") as cache:
        blocks = fill(cache, chain)
    with retain.open("memory:8MiB", f"{disk}?codec={name}") as cache:
        hit = cache.lookup(Query(chain, SPEC))
        assert hit.tokens_by_tier == {"disk": 64}
        with cache.load(hit) as loaded:
            assert same([dict(b.arrays) for b in loaded.blocks], blocks)
        again = cache.lookup(Query(chain, SPEC))
        assert again.tokens_by_tier == {"memory": 64}, "loaded blocks stay in memory"
        again.release()


def test_a_prefix_is_used_up_to_the_first_token_that_differs():
    with retain.open("memory:8MiB") as cache:
        fill(cache, chain_of([*range(100, 164)], 32))
        other = [*range(100, 157), 7, 8, 9]
        tokens, got = read(cache, chain_of(other, 32))
        assert tokens == 57
        assert len(got) == 2
        tokens, _ = read(cache, chain_of([*range(100, 110), 1, 2], 32))
        assert tokens == 0, "less than a tail's granularity is not worth a load"
        tokens, _ = read(cache, chain_of([1, *range(101, 164)], 32))
        assert tokens == 0


def test_the_longest_of_several_continuations_is_used():
    with retain.open("memory:8MiB") as cache:
        base = [*range(32)]
        for tail in ([5] * 16, [*range(50, 66)], [*range(50, 70), *[0] * 12]):
            chain = chain_of([*base, *tail], 32)
            for index in range(2):
                count = min(32, len(base) + len(tail) - 32 * index) // 16 * 16
                cache.store(block_at(SPEC, chain, index, count=count))
        tokens, _ = read(cache, chain_of([*base, *range(50, 82)], 32))
        assert tokens == 32 + 20


def test_at_most_the_limit_is_used_so_that_a_last_token_is_left_to_compute():
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(64))
        blocks = fill(cache, chain)
        for limit, expected in ((63, 63), (48, 48), (1, 1), (0, 0), (64, 64), (1000, 64)):
            tokens, got = read(cache, chain, limit=limit)
            assert tokens == expected
            assert same(got, blocks[: -(-expected // 16)])


def test_media_bound_the_use_of_a_partly_equal_block():
    spec = SPEC
    with retain.open("memory:8MiB") as cache:
        tokens = [*range(64)]
        kept = chain_of(tokens, 64)
        made = type(kept)(kept.space, kept.tokens, 64, (), ())
        cache.store(block_at(spec, made, 0, count=48))
        plain, _ = read(cache, chain_of([*range(40), 99], 64), spec)
        assert plain == 40
        from retain.identity import chain

        image = chain(kept.space, [*range(40), 99], 64, [Media(20, 4, b"m" * 32)])
        tokens_used, _ = read(cache, image, spec)
        assert tokens_used == 20


def test_a_hole_in_a_chain_ends_the_hit():
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(64))
        fill(cache, chain, blocks=[0, 1, 3])
        assert read(cache, chain)[0] == 32
        assert cache.missing(Query(chain, SPEC)) == [2]


def test_storing_twice_keeps_one():
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(16))
        fill(cache, chain)
        assert cache.store(block_at(SPEC, chain)) == type(cache.store(block_at(SPEC, chain)))(True, "present")
        assert cache.stats().tiers["memory"].objects == 1


def test_a29_a_store_owns_its_bytes_and_loads_are_read_only():
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(16))
        block = block_at(SPEC, chain)
        expected = block.arrays["k"].copy()
        cache.store(block)
        block.arrays["k"][:] = 0
        with cache.load(cache.lookup(Query(chain, SPEC))) as loaded:
            assert loaded.blocks[0].arrays["k"].tobytes() == expected.tobytes()
            with pytest.raises(ValueError, match="read-only"):
                loaded.blocks[0].arrays["k"][:] = 0


def test_slices_of_two_ranks_serve_a_reader_of_the_whole_and_back(disk):
    spec = small_spec(layers=4, heads=4)
    chain = chain_of(range(32))
    halves = [Slice(0, 4, 0, 1, 2), Slice(0, 4, 1, 2, 2)]
    whole = [block_at(spec, chain, i, seed=i) for i in range(2)]
    with retain.open("memory:8MiB", disk) as cache:
        for block in whole:
            for half in halves:
                assert cache.store(cut(block, half)).reason == "stored"
        assert same(read(cache, chain, spec)[1], whole)
    with retain.open("memory:8MiB", disk) as cache:
        assert read(cache, chain, spec)[0] == 32
        quarter = Slice(1, 3, 1, 2, 4)
        assert same(read(cache, chain, spec, slice=quarter)[1], [cut(b, quarter) for b in whole])
        cache.drop([chain.keys[1]])
        cache.store(cut(whole[1], halves[0]))
        assert read(cache, chain, spec)[0] == 16, "half of a block is not the whole"


def test_another_variant_or_geometry_never_hits():
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(32))
        fill(cache, chain)
        assert read(cache, chain, small_spec(variant=b"w" * 32))[0] == 0
        assert read(cache, chain, SPEC)[0] == 32


# damage and trouble


def damage_truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def damage_empty(path):
    path.write_bytes(b"")


def damage_remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_remove])
@pytest.mark.parametrize("when", ["before opening", "after lookup"])
def test_a_damaged_object_is_a_miss_and_is_replaced_by_the_next_store(tmp_path, disk, damage, when):
    chain = chain_of(range(48))
    with retain.open("memory:8MiB", disk) as cache:
        blocks = fill(cache, chain)
    victim = next(path for path in files(tmp_path) if path.name.startswith(chain.keys[1].hex()))
    if when == "before opening":
        damage(victim)
    with retain.open("memory:8MiB", disk) as cache:
        hit = cache.lookup(Query(chain, SPEC))
        if when == "after lookup":
            assert hit.tokens == 48
            damage(victim)
        with cache.load(hit) as loaded:
            assert loaded.tokens == 16
            assert same([dict(b.arrays) for b in loaded.blocks], blocks[:1])
        if when == "after lookup":
            assert sum(cache.stats().failures.values()) == 1
        assert cache.store(blocks[1]).kept
        assert same(read(cache, chain)[1], blocks)
    with retain.open("memory:8MiB", disk) as cache:
        assert same(read(cache, chain)[1], blocks)


def test_swapped_objects_of_equal_size_are_misses(tmp_path, disk):
    chain = chain_of(range(48))
    with retain.open("memory:8MiB", disk) as cache:
        fill(cache, chain)
    paths = {path.name[:64]: path for path in files(tmp_path)}
    one, two = paths[chain.keys[0].hex()], paths[chain.keys[1].hex()]
    a, b = one.read_bytes(), two.read_bytes()
    assert len(a) == len(b)
    with retain.open("memory:8MiB", disk) as cache:
        one.write_bytes(b)
        two.write_bytes(a)
        assert read(cache, chain)[0] == 0


class Hung:
    """A store that answers scans and sizes but hangs when read, until told otherwise."""

    kind = "slow"

    def __init__(self, inner):
        self.inner = inner
        self.gate = threading.Event()

    def read_into(self, name, buffer, offset=0):
        self.gate.wait(20)
        return self.inner.read_into(name, buffer, offset)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Broken(Hung):
    """A store whose every call fails."""

    kind = "broken"

    def _fail(self, *args, **fields):
        raise StoreUnavailable("the cable is out")

    write = read_into = size = delete = scan = close = _fail


def cache_over(*stores, memory=8 << 20, policy="lru-leaf", capacity=1 << 40):
    ledger = Ledger()
    tiers = [Tier("memory", MemoryStore(memory), memory, codec("raw"), policy, ledger)]
    tiers += [Tier(f"{s.kind}-{i}", s, capacity, codec("raw"), policy, ledger) for i, s in enumerate(stores)]
    return Cache(tiers, ledger)


def test_a_store_that_hangs_costs_no_more_than_the_deadline(tmp_path, disk):
    chain = chain_of(range(48))
    with retain.open("memory:8MiB", disk) as cache:
        blocks = fill(cache, chain)
    store = Hung(DiskStore(tmp_path / "kept"))
    store.gate.set()
    cache = cache_over(store)
    store.gate.clear()
    start = time.monotonic()
    with cache.load(cache.lookup(Query(chain, SPEC)), timeout=0.3) as loaded:
        assert loaded.tokens == 0
    assert time.monotonic() - start < 2
    assert cache.stats().failures
    store.gate.set()
    deadline = time.monotonic() + 10
    while any(tier.stats().leased for tier in cache.tiers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(tier.stats().leased == 0 for tier in cache.tiers), "a late answer gives its leases back"
    assert same(read(cache, chain)[1], blocks)
    cache.close()


def test_a_broken_store_never_reaches_the_caller():
    cache = cache_over(Broken(None))
    chain = chain_of(range(32))
    blocks = fill(cache, chain)
    assert cache.flush(10)
    assert same(read(cache, chain)[1], blocks)
    assert cache.stats().failures
    cache.clear()
    assert read(cache, chain)[0] == 0
    cache.close()


def test_a_closed_cache_only_misses():
    cache = retain.open("memory:8MiB")
    chain = chain_of(range(32))
    fill(cache, chain)
    hit = cache.lookup(Query(chain, SPEC))
    cache.close()
    cache.close()
    assert cache.load(hit).tokens == 0
    assert read(cache, chain)[0] == 0
    assert cache.store(block_at(SPEC, chain)).reason == "closed"
    assert cache.nearest(chain) is None


def test_a_block_that_fits_nowhere_is_a_counted_refusal():
    with retain.open("memory:8KiB") as cache:
        spec = small_spec(layers=8, heads=8, dim=64)
        assert cache.store(block_at(spec, chain_of(range(16)))).reason == "no room"
        assert cache.stats().counters["refused_blocks"] == 1
    with retain.open("memory:0") as cache:
        assert cache.store(block_at(SPEC, chain_of(range(16)))).reason == "no room"


def test_a23_a_capacity_of_one_byte_keeps_nothing_and_breaks_nothing(disk):
    chain = chain_of(range(16))
    with retain.open("memory:8MiB", f"{disk}?capacity=1B") as cache:
        blocks = fill(cache, chain)
        assert cache.flush()
        assert cache.stats().failures
        assert same(read(cache, chain)[1], blocks)


def test_tier_addresses_that_make_no_sense_are_refused_by_name(disk):
    for tiers in ((disk, "memory:1MiB"), ("memory:1MiB", "memory:2MiB")):
        with pytest.raises(ConfigError, match="memory"):
            retain.open(*tiers)
    with pytest.raises(ConfigError, match="fifo"):
        retain.open(disk, policy="fifo")


# the nearest kept prompt


def test_the_nearest_kept_prompt_tells_where_the_difference_begins(disk):
    kept = [*range(100, 140)]
    with retain.open("memory:8MiB", disk) as cache:
        assert cache.nearest(chain_of(kept)) is None
        fill(cache, chain_of(kept))
        assert cache.nearest(chain_of([*kept[:20], 7, 8])).common == 20
        assert cache.nearest(chain_of([*kept[:20], 7, 8])).kept.tolist() == kept[20:32]
        assert cache.nearest(chain_of([7, *kept])).common == 0
        whole = cache.nearest(chain_of([*kept[:32], 1, 2, 3]))
        assert (whole.common, whole.kept.size) == (32, 0)
        assert cache.nearest(chain_of(kept, salt=b"other")) is None
    with retain.open("memory:8MiB", disk) as cache:
        assert cache.nearest(chain_of([*kept[:20], 7, 8])).common == 20


# tenants, control


@pytest.mark.parametrize("from_disk", [False, True])
def test_a20_no_tier_serves_one_tenants_blocks_to_another(disk, from_disk):
    spec = SPEC
    alice, bob = (chain_of(range(64), salt=salt_of(name)) for name in ("alice", "bob"))
    with retain.open("memory:8MiB", disk) as cache:
        fill(cache, alice)
        cache.flush()
        if from_disk:
            cache.clear(tier="memory")
        assert read(cache, bob, spec)[0] == 0
        assert cache.nearest(bob) is None
        assert cache.clear(space=bob.space).objects == 0
        assert read(cache, alice, spec)[0] == 64


@pytest.mark.parametrize("restart", [False, True])
def test_a30_clear_returns_true_counts_and_nothing_hits_afterwards(tmp_path, disk, restart):
    alice, bob = (chain_of(range(64), salt=salt_of(name)) for name in ("alice", "bob"))
    cache = retain.open("memory:8MiB", disk)
    fill(cache, alice)
    fill(cache, bob)
    cache.flush()
    if restart:
        cache.close()
        cache = retain.open("memory:8MiB", disk)
    removed = cache.clear(space=alice.space)
    assert removed.objects == (4 if restart else 8)
    assert read(cache, alice)[0] == 0
    assert read(cache, bob)[0] == 64
    assert len(files(tmp_path)) == 4
    assert cache.clear(tier="memory").objects == 4
    assert read(cache, bob)[0] == 64, "still on disk"
    everything = cache.clear()
    assert everything.objects == 8
    assert everything.bytes > 0
    assert files(tmp_path) == []
    assert read(cache, bob)[0] == 0
    assert cache.clear().objects == 0
    with pytest.raises(ValueError, match="tape"):
        cache.clear(tier="tape")
    cache.close()


def test_a_block_dropped_while_it_is_read_stays_readable_for_its_reader():
    with retain.open("memory:8MiB") as cache:
        chain = chain_of(range(16))
        (block,) = fill(cache, chain)
        loaded = cache.load(cache.lookup(Query(chain, SPEC)))
        assert cache.clear().objects == 1
        assert read(cache, chain)[0] == 0
        fill(cache, chain_of(range(100, 420)))
        assert loaded.blocks[0].arrays["k"].tobytes() == block.arrays["k"].tobytes()
        assert cache.store(block).reason == "busy"
        loaded.close()
        assert cache.store(block).reason == "stored"


# planner and single flight


def test_the_planner_prefers_computing_where_a_tier_is_slow(disk):
    with retain.open("memory:8MiB", disk) as cache:
        chain = chain_of(range(64))
        fill(cache, chain)
        cache.flush()
        cache.clear(tier="memory")
        for _ in range(3):
            cache.planner.observe_prefill(SPEC, 0, 1000, 1.0)
            cache.planner.observe_load("disk", 1, 1000, 5.0)
        hit = cache.lookup(Query(chain, SPEC))
        assert (hit.tokens, hit.found) == (0, 64)
        assert cache.stats().counters["planned_away_tokens"] == 64
        with cache.lookup(Query(chain, SPEC), plan=False) as whole:
            assert whole.tokens == 64
        deadline = time.monotonic() + 10
        while cache.lookup(Query(chain, SPEC)).tokens == 0:
            assert time.monotonic() < deadline, "a tier that was slow once is measured again"
            time.sleep(0.01)
        assert cache.stats().counters["probes"] == 1


def test_a_hit_partly_in_memory_is_cut_where_disk_is_not_worth_it(disk):
    with retain.open("memory:8MiB", disk) as cache:
        chain = chain_of(range(64))
        fill(cache, chain)
        cache.flush()
        for key in chain.keys[2:]:
            for slot in cache.tiers[0].index.same_key(key):
                cache.tiers[0].remove(slot)
        cache.planner.observe_prefill(SPEC, 0, 1000, 1.0)
        cache.planner.observe_load("disk", 1, 1000, 5.0)
        cache.planner.observe_load("memory", 1, 1000, 1e-6)
        with cache.lookup(Query(chain, SPEC)) as hit:
            assert hit.tokens_by_tier == {"memory": 32}


# many threads


def test_many_threads_over_a_small_cache_never_read_wrong_bytes(disk):
    spec = small_spec(layers=4, heads=4, dim=16)
    chains = [chain_of(range(1000 * i, 1000 * i + 64)) for i in range(12)]
    size = sum(len(chunk) for chunk in block_at(spec, chains[0]).encode(codec("raw")))
    errors = []
    with retain.open(f"memory:{size * 14}", f"{disk}?capacity={size * 20}") as cache:

        def work(seed):
            rng = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    chain = chains[rng.integers(len(chains))]
                    tokens, got = read(cache, chain, spec)
                    expected = [block_at(spec, chain, i) for i in range(4)]
                    assert same(got, expected[: tokens // 16])
                    for block in expected:
                        cache.store(block)
                    if rng.random() < 0.05:
                        cache.clear(space=chain.space)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert cache.flush(20)
        stats = cache.stats()
        assert stats.tiers["disk"].bytes <= size * 20
        assert all(tier.leased == 0 for tier in stats.tiers.values())
        assert not stats.failures, stats.failures
