"""What every BlockCache does, whoever keeps it: run for a cache in this process and for one in a daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retain.block import cut
from retain.cache import BlockCache, Prefix, Query, Selection
from retain.codecs import codec
from retain.identity import salt_of
from retain.model import Slice
from tests.blocks import block_at, chain_of, mixed_spec, small_spec
from tests.cache.test_cache import SPEC, files, fill, read, same

SIZE = sum(len(chunk) for chunk in block_at(SPEC, chain_of(range(16))).encode(codec("raw")))
SLOT = -(-SIZE // 4096) * 4096
ALICE, BOB, CAROL = (salt_of(name) for name in ("alice", "bob", "carol"))

Open = Callable[..., BlockCache]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class CacheConformance:
    """Subclasses give a fixture `opened`, which opens caches over tiers and closes them at the end."""

    @pytest.fixture
    def disk(self, tmp_path: Path) -> str:
        return f"disk:{tmp_path / 'disk'}"

    # what is stored is found

    @pytest.mark.parametrize("make", [small_spec, mixed_spec])
    def test_what_is_stored_is_loaded_bit_for_bit(self, opened: Open, make) -> None:
        cache, spec, chain = opened("memory:8MiB"), make("bfloat16"), chain_of(range(64))
        blocks = fill(cache, chain, spec)
        tokens, got = read(cache, chain, spec)
        assert tokens == 64
        assert same(got, blocks)
        assert cache.store(block_at(spec, chain)).reason == "present"

    def test_prefixes_limits_and_the_nearest_prompt(self, opened: Open) -> None:
        cache, kept = opened("memory:8MiB"), [*range(100, 164)]
        fill(cache, chain_of(kept, 32))
        for limit, expected in ((64, 64), (63, 63), (32, 32), (1, 1), (0, 0)):
            assert read(cache, chain_of(kept, 32), limit=limit)[0] == expected
        assert read(cache, chain_of([*kept[:57], 7, 8, 9], 32))[0] == 57
        assert read(cache, chain_of([*kept[:10], 7], 32))[0] == 0
        assert cache.nearest(chain_of([*kept[:40], 7], 32)).common == 40
        assert cache.nearest(chain_of([*kept[:40], 7], 32)).kept.tolist() == kept[40:]
        assert cache.missing(Query(chain_of([*kept, *range(32)], 32), SPEC)) == [2]

    def test_slices_are_assembled_and_cut(self, opened: Open) -> None:
        cache, spec, chain = opened("memory:8MiB"), small_spec(layers=4, heads=4), chain_of(range(16))
        whole = block_at(spec, chain)
        for half in (Slice(0, 4, 0, 1, 2), Slice(0, 4, 1, 2, 2)):
            assert cache.store(cut(whole, half)).kept
        assert same(read(cache, chain, spec)[1], [whole])
        quarter = Slice(1, 3, 2, 3, 4)
        assert same(read(cache, chain, spec, slice=quarter)[1], [cut(whole, quarter)])

    def test_a14_counters_add_up(self, opened: Open, disk: str) -> None:
        cache = opened(f"memory:{SLOT * 4}", f"{disk}?capacity={SIZE * 3}", policy="lru-leaf")
        for start in range(0, 640, 64):
            chain = chain_of(range(start, start + 64))
            read(cache, chain)
            for index in range(4):
                cache.store(block_at(SPEC, chain, index))
            assert cache.flush()
        stats = cache.stats()
        counters = stats.counters
        resident = sum(tier.objects for tier in stats.tiers.values())
        came = counters["stored_blocks"] + counters["written_objects"] + counters["promoted_blocks"]
        assert came - counters["evicted_objects"] == resident
        assert counters["lookups"] == counters["lookup_hits"] + counters["lookup_misses"] == 10

    # removing

    def test_a30_everything_a_space_or_a_tier_is_removed_and_truly_counted(
        self, opened: Open, disk: str, tmp_path: Path
    ) -> None:
        cache = opened("memory:8MiB", disk)
        alice, bob = chain_of(range(64), salt=ALICE), chain_of(range(64), salt=BOB)
        fill(cache, alice)
        fill(cache, bob)
        assert cache.flush()
        gone = cache.clear(space=alice.space)
        assert (gone.blocks, gone.objects, gone.bytes) == (4, 8, 8 * SIZE)
        assert gone.tiers == {"memory": (4, 4 * SIZE), "disk": (4, 4 * SIZE)}
        assert gone.missed == ()
        assert read(cache, alice)[0] == 0
        assert read(cache, bob)[0] == 64
        assert cache.clear(tier="memory").tiers == {"memory": (4, 4 * SIZE)}
        assert read(cache, bob)[0] == 64, "still on disk"
        assert cache.clear().blocks == 4
        assert files(tmp_path) == []
        assert read(cache, bob)[0] == 0
        assert cache.clear().objects == 0
        with pytest.raises(ValueError, match="tape"):
            cache.clear(tier="tape")

    def test_a30_what_is_on_its_way_is_called_off(self, opened: Open, disk: str, tmp_path: Path) -> None:
        cache = opened("memory:64MiB", disk)
        for start in range(0, 2000, 200):
            chain = chain_of(range(start, start + 160), salt=ALICE)
            fill(cache, chain)
            cache.remove(Selection(tenant="alice"))
            assert read(cache, chain)[0] == 0
        assert cache.flush()
        assert files(tmp_path) == []

    def test_blocks_go_by_key(self, opened: Open, disk: str, tmp_path: Path) -> None:
        cache, chain = opened("memory:8MiB", disk), chain_of(range(64))
        fill(cache, chain)
        cache.flush()
        assert cache.drop([chain.keys[2], b"?" * 32]).objects == 2
        assert read(cache, chain)[0] == 32
        assert len(files(tmp_path)) == 3

    def test_a_prefix_goes_with_all_that_continues_it(self, opened: Open, disk: str) -> None:
        cache = opened("memory:8MiB", disk)
        prompt = [*range(100, 140)]
        longer, other = chain_of([*prompt, *range(60)]), chain_of([*prompt[:20], *range(500, 560)])
        stranger = chain_of(prompt, salt=ALICE)
        for chain in (longer, other, stranger):
            for index in range(len(chain.keys)):
                cache.store(block_at(SPEC, chain, index))
        cache.flush()
        gone = cache.remove(Selection(prefix=Prefix.of(chain_of(prompt))))
        assert gone.blocks == 6, "the two blocks of the prefix, and the four that continue it"
        assert gone.objects == 12
        assert read(cache, longer)[0] == read(cache, chain_of(prompt))[0] == 0
        assert read(cache, stranger)[0] == 32
        fill(cache, other, blocks=[0])
        assert read(cache, other)[0] == 80, "what shared its first block only is there when that is"

    def test_a_tail_goes_with_its_prefix(self, opened: Open) -> None:
        cache = opened("memory:8MiB")
        chain = chain_of(range(100, 164), 64)
        tail = block_at(SPEC, chain, 0, count=48)
        assert cache.store(tail).kept
        assert read(cache, chain)[0] == 48
        assert cache.remove(Selection(prefix=Prefix.of(chain_of([*range(100, 130), 7], 64)))).blocks == 1
        assert read(cache, chain)[0] == 0

    def test_blocks_go_by_model_and_tenant(self, opened: Open, disk: str) -> None:
        cache = opened("memory:8MiB", disk)
        variant = replace(SPEC, variant=b"w" * 32)
        chains = {name: chain_of(range(32), salt=salt) for name, salt in (("alice", ALICE), ("bob", BOB))}
        for chain in chains.values():
            fill(cache, chain)
            fill(cache, chain, variant)
        cache.flush()
        assert cache.remove(Selection(variant=b"w" * 32, tenant="bob")).objects == 4
        assert read(cache, chains["bob"], variant)[0] == 0
        assert read(cache, chains["bob"])[0] == read(cache, chains["alice"], variant)[0] == 32
        assert cache.remove(Selection(kin=b"?" * 32)).objects == 0
        gone = cache.remove(Selection(kin=b"k" * 32, tenant="alice"))
        assert (gone.blocks, gone.objects) == (2, 8)
        assert read(cache, chains["alice"])[0] == 0
        assert cache.remove(Selection(tenant="nobody")).objects == 0
        assert read(cache, chains["bob"])[0] == 32

    def test_blocks_go_by_age(self, opened: Open, disk: str) -> None:
        cache = opened("memory:8MiB", disk)
        old, young = chain_of(range(32)), chain_of(range(100, 132))
        fill(cache, old)
        cache.flush()
        time.sleep(0.4)
        fill(cache, young)
        cache.flush()
        assert cache.remove(Selection(older_than=0.3)).objects == 4
        assert read(cache, old)[0] == 0
        assert read(cache, young)[0] == 32

    # room

    def test_a_tenant_over_its_quota_makes_room_among_its_own(self, opened: Open, disk: str) -> None:
        rules = f"quota={SIZE * 4}&quota.bob={SIZE * 6}"
        cache = opened(f"memory:8MiB?{rules}", f"{disk}?{rules}")
        shared = chain_of(range(160))
        first = {name: chain_of(range(32), salt=salt_of(name)) for name in ("alice", "bob", "carol")}
        fill(cache, shared)
        for chain in first.values():
            fill(cache, chain)
        assert cache.flush()  # what is being written cannot make room
        for number in range(1, 6):
            fill(cache, chain_of(range(1000 * number, 1000 * number + 64), salt=ALICE))
            assert cache.flush()
        tiers = cache.stats().tiers
        for tier in tiers.values():
            mine = [size for name, (_, size) in tier.tenants.items() if name not in ("", "bob")]
            assert sorted(mine) == [2 * SIZE, 4 * SIZE]
            assert tier.tenants["bob"] == (2, 2 * SIZE)
        assert read(cache, first["alice"])[0] == 0
        assert read(cache, first["bob"])[0] == read(cache, first["carol"])[0] == 32
        assert read(cache, shared)[0] == 160, "what belongs to no tenant has no quota"
        fill(cache, chain_of(range(5000, 5096), salt=BOB))
        cache.flush()
        assert cache.stats().tiers["disk"].tenants["bob"] == (6, 6 * SIZE)

    def test_within_its_quota_a_tenant_loses_what_it_used_longest_ago(self, opened: Open) -> None:
        cache = opened(f"memory:8MiB?quota={SIZE * 6}")
        one, two, three = (chain_of(range(n, n + 48), salt=ALICE) for n in (0, 1000, 2000))
        fill(cache, one)
        fill(cache, two)
        assert read(cache, one)[0] == 48
        fill(cache, three, blocks=[0, 1])
        assert read(cache, one)[0] == 48
        assert read(cache, two)[0] == 16, "children go before their parents"

    def test_a_block_larger_than_a_quota_is_a_counted_refusal(self, opened: Open) -> None:
        cache = opened(f"memory:8MiB?quota={SIZE - 1}")
        fill(cache, chain_of(range(16)))
        assert cache.store(block_at(SPEC, chain_of(range(16), salt=ALICE))).reason == "over quota"
        assert cache.stats().counters["refused_blocks"] == 1
        assert cache.stats().tiers["memory"].objects == 1

    def test_spaces_that_an_engine_owns_to_a_tenant_share_its_quota(self, opened: Open) -> None:
        cache = opened(f"memory:8MiB?quota.alice={SIZE * 2}")
        chains = [chain_of(range(16), salt=salt_of("alice", f"salt {n}")) for n in range(6)]
        for chain in chains:
            cache.own(chain.space, "alice")
            fill(cache, chain)
        assert cache.stats().tiers["memory"].tenants == {"alice": (2, 2 * SIZE)}
        assert [read(cache, chain)[0] for chain in chains] == [0, 0, 0, 0, 16, 16]

    def test_what_is_older_than_its_time_never_hits(self, opened: Open, disk: str, tmp_path: Path) -> None:
        cache = opened("memory:8MiB?ttl=600ms&ttl.bob=1h", f"{disk}?ttl=600ms&ttl.bob=1h")
        alice, bob = chain_of(range(32), salt=ALICE), chain_of(range(32), salt=BOB)
        fill(cache, alice)
        fill(cache, bob)
        cache.flush()
        assert read(cache, alice)[0] == 32
        time.sleep(0.7)
        assert read(cache, alice)[0] == 0
        assert cache.nearest(alice) is None
        assert read(cache, bob)[0] == 32
        assert len(files(tmp_path)) == 2
        assert cache.stats().counters["expired_objects"] == 4
        fill(cache, alice)
        assert read(cache, alice)[0] == 32

    def test_a_block_stored_for_a_time_is_gone_after_it_and_lies_in_memory_alone(
        self, opened: Open, disk: str, tmp_path: Path
    ) -> None:
        cache, chain = opened("memory:8MiB", disk), chain_of(range(32))
        assert cache.store(block_at(SPEC, chain), ttl=0.5).kept
        assert cache.flush()
        assert read(cache, chain)[0] == 16
        assert files(tmp_path) == []
        time.sleep(0.6)
        assert read(cache, chain)[0] == 0

    def test_pinned_blocks_stay_and_pins_have_a_bound(self, opened: Open) -> None:
        cache = opened(f"memory:{SLOT * 6}?pins={SIZE * 3}", policy="lru-leaf")
        chain, more = chain_of(range(32)), chain_of(range(500, 532))
        fill(cache, chain)
        pinned = cache.pin(Selection(prefix=Prefix.of(chain, beyond=False)))
        assert (pinned.blocks, pinned.bytes, pinned.missed) == (2, 2 * SIZE, ())
        fill(cache, more)
        over = cache.pin(Selection(keys=more.keys))
        assert over.blocks == 1
        assert "pins" in over.missed[0]
        fill(cache, chain_of(range(1000, 1160)))
        assert read(cache, chain)[0] == 32
        assert cache.stats().tiers["memory"].pinned_bytes == 3 * SIZE
        assert cache.unpin(Selection()).blocks == 3
        assert cache.stats().tiers["memory"].pinned_bytes == 0
        fill(cache, chain_of(range(2000, 2160)))
        assert read(cache, chain)[0] == 0

    def test_what_no_prompt_can_reach_is_counted_and_goes_first(self, opened: Open) -> None:
        cache = opened(f"memory:{SLOT * 8}")
        broken, whole = chain_of(range(64)), chain_of(range(1000, 1064))
        fill(cache, broken)
        fill(cache, whole)
        cache.drop([broken.keys[1]])
        assert cache.stats().tiers["memory"].unreachable == (2, 2 * SIZE)
        assert read(cache, broken)[0] == 16
        fill(cache, broken, blocks=[1])
        assert cache.stats().tiers["memory"].unreachable == (0, 0), "a hole that is filled is none"
        assert read(cache, broken)[0] == 64
        cache.drop([broken.keys[0]])
        assert cache.stats().tiers["memory"].unreachable == (3, 3 * SIZE)
        fill(cache, chain_of(range(2000, 2064)))
        assert read(cache, whole)[0] == 64
        assert cache.stats().tiers["memory"].unreachable == (0, 0)

    # what goes below, and when

    def test_a_tier_written_through_has_a_block_when_its_store_returns(
        self, opened: Open, disk: str, tmp_path: Path
    ) -> None:
        cache = opened("memory:8MiB", f"{disk}?writes=through")
        for start in range(0, 320, 16):
            fill(cache, chain_of(range(start, start + 16)))
            assert len(files(tmp_path)) == start // 16 + 1

    def test_a_tier_written_on_eviction_has_what_left_memory(
        self, opened: Open, disk: str, tmp_path: Path
    ) -> None:
        cache = opened(f"memory:{SLOT * 8}", f"{disk}?writes=evicted", policy="lru-leaf")
        chains = [chain_of(range(start, start + 64)) for start in range(0, 6400, 1000)]
        blocks = [fill(cache, chain) for chain in chains[:2]]
        assert files(tmp_path) == []
        blocks += [fill(cache, chain) for chain in chains[2:]]
        assert cache.stats().counters["evicted_objects"] == 4 * len(chains) - 8
        for chain, made in zip(chains, blocks, strict=True):
            tokens, got = read(cache, chain)
            assert tokens == 64
            assert same(got, made)
        assert cache.flush()
        assert len(files(tmp_path)) == 4 * len(chains), "a flush writes what is still in memory alone"

    @pytest.mark.parametrize("writes", ["back", "evicted"])
    def test_a_tier_that_admits_what_is_reused_never_has_what_is_read_once(
        self, opened: Open, disk: str, tmp_path: Path, writes: str
    ) -> None:
        cache = opened(f"memory:{SLOT * 8}", f"{disk}?admit=reused&writes={writes}", policy="lru-leaf")
        liked = chain_of(range(32))
        fill(cache, liked)
        assert read(cache, liked)[0] == 32
        for start in range(1000, 9000, 1000):
            fill(cache, chain_of(range(start, start + 64)))
        assert cache.flush()
        names = {path.name[:64] for path in files(tmp_path)}
        assert names == {key.hex() for key in liked.keys}
        counters = cache.stats().counters
        assert counters["written_objects"] == 2
        # 34 blocks in 8 slots; two of them may still lie there, held until their write is done
        assert 24 <= counters["declined_objects"] <= 26
        assert counters["declined_bytes"] == counters["declined_objects"] * SIZE
        again = chain_of(range(1000, 1064))
        fill(cache, again)
        for start in range(10_000, 13_000, 1000):
            fill(cache, chain_of(range(start, start + 64)))
        assert cache.flush()
        assert cache.missing(Query(again, SPEC)) == [], "stored a second time, it is one that is asked for"

    def test_kept_blocks_are_brought_up_by_their_keys(self, opened: Open, disk: str) -> None:
        cache, chain = opened(f"memory:{SLOT * 8}", disk), chain_of(range(64))
        fill(cache, chain)
        cache.flush()
        cache.clear(tier="memory")
        fill(cache, chain, blocks=[0])
        warm = cache.warm([*chain.keys, b"?" * 32])
        assert warm.tiers == {"memory": (1, SIZE), "disk": (3, 3 * SIZE)}
        assert warm.blocks == 4
        assert "1 blocks are kept nowhere" in warm.missed[0]
        with cache.lookup(Query(chain, SPEC)) as hit:
            assert hit.tokens_by_tier == {"memory": 64}
        long = chain_of(range(1000, 1320))
        for index in range(20):
            cache.store(block_at(SPEC, long, index))
            cache.flush()
        assert cache.warm(long.keys).blocks == 8, "as many as fit beside each other"

    def test_what_continues_a_hit_is_prefetched_into_free_room(self, opened: Open, disk: str) -> None:
        cache, chain = opened("memory:8MiB?ahead=3", disk), chain_of(range(160))
        fill(cache, chain)
        cache.flush()
        cache.clear(tier="memory")
        assert read(cache, chain_of(range(32)))[0] == 32
        wait_for(lambda: cache.stats().counters["prefetched_blocks"] == 3)
        with cache.lookup(Query(chain, SPEC)) as hit:
            assert hit.tokens_by_tier == {"memory": 80, "disk": 80}

    # single flight

    def test_one_of_many_computes_and_the_others_wait_for_it(self, opened: Open) -> None:
        cache, chain = opened("memory:8MiB"), chain_of(range(16))
        computed = []

        def request() -> None:
            with cache.flight(chain.keys[0], timeout=10) as flight:
                if flight.leader and cache.missing(Query(chain, SPEC)):
                    time.sleep(0.1)
                    computed.append(cache.store(block_at(SPEC, chain)))
            assert read(cache, chain)[0] == 16

        threads = [threading.Thread(target=request) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(computed) == 1
        assert cache.stats().counters["flights_joined"] >= 1

    def test_a_follower_waits_no_longer_than_it_said(self, opened: Open) -> None:
        cache = opened("memory:8MiB")
        with cache.flight(b"k" * 32, 1):
            started = time.monotonic()
            flight = cache.flight(b"k" * 32, 0.05)
            assert (flight.leader, flight.landed) == (False, False)
            assert time.monotonic() - started < 1
        assert cache.flight(b"k" * 32, 1).leader
