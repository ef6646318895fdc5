"""Slices of one block, stored by ranks, become a whole block: tails included, and below as in memory."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import retain
from retain.block import cut
from retain.cache import Query, join
from retain.model import Slice
from tests.blocks import block_at, chain_of, mixed_spec, small_spec

SPEC = small_spec(layers=4, heads=4)
RANKS = [Slice(0, 4, 0, 1, 2), Slice(0, 4, 1, 2, 2)]


def names(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if len(path.name) > 64)


def read(cache, chain, spec=SPEC, **fields):
    """(tokens, copied arrays of the blocks) that a lookup and load give."""
    with cache.load(cache.lookup(Query(chain, spec, **fields))) as loaded:
        return loaded.tokens, [{n: a.copy() for n, a in block.arrays.items()} for block in loaded.blocks]


def same(got, block):
    return got.keys() == block.arrays.keys() and all(
        np.array_equal(got[name], block.arrays[name]) for name in got
    )


@pytest.mark.parametrize(
    "parts",
    [
        RANKS,
        [Slice(0, 4, i, i + 1, 4) for i in (2, 0, 3, 1)],
        [Slice(2, 4), Slice(0, 2)],
        [Slice(low, low + 2, i, i + 1, 2) for low in (0, 2) for i in (1, 0)],
    ],
    ids=["two ranks", "four ranks", "two stages", "two stages of two ranks"],
)
def test_slices_that_cover_a_block_go_below_as_one_whole_block(tmp_path, parts):
    chain = chain_of(range(40))  # two blocks of 16 and a tail of 8
    wholes = [block_at(SPEC, chain, i) for i in range(3)]
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        for block in wholes:
            for part in parts:
                assert cache.store(cut(block, part)).kept
        assert cache.flush(30)
        assert names(tmp_path) == sorted(block.header.name for block in wholes)
        memory = cache.stats().tiers["memory"]
        assert (memory.objects, memory.leased) == (3, 0)
        counters = cache.stats().counters
        assert counters["joined_blocks"] == 3
        assert counters["stored_blocks"] + counters["joined_blocks"] - counters["joined_slices"] == 3
        assert cache.store(cut(wholes[0], parts[0])).reason == "present"
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        for wanted in (None, parts[0]):
            tokens, blocks = read(cache, chain, slice=wanted)
            assert tokens == 32  # the tail of 8 tokens is less than is worth a lookup
            assert all(
                same(got, block if wanted is None else cut(block, wanted))
                for got, block in zip(blocks, wholes, strict=False)
            )


def test_a_tail_of_two_ranks_serves_readers_at_once_and_after_it_was_joined(tmp_path, monkeypatch):
    chain, longer = chain_of(range(40), 32), chain_of([*range(40), 99, 98, 97], 32)
    monkeypatch.setattr(join, "JOIN_SECONDS", 60.0)
    with retain.open("memory:8MiB") as cache:
        tail = block_at(SPEC, chain_of(range(24), 32), 0)
        monkeypatch.setattr(cache.joiner, "_join", lambda found: False)  # as if there were no room
        for part in RANKS:
            cache.store(cut(tail, part))
        assert cache.flush(30)
        assert cache.stats().tiers["memory"].objects == 2
        for wanted in (None, RANKS[1], Slice(0, 4, 1, 4, 4)):
            tokens, blocks = read(cache, longer, slice=wanted)
            assert tokens == 24
            assert same(blocks[0], tail if wanted is None else cut(tail, wanted))
    with retain.open("memory:8MiB") as cache:
        for part in RANKS:
            cache.store(cut(tail, part))
        assert cache.flush(30)
        assert cache.stats().tiers["memory"].objects == 1
        tokens, blocks = read(cache, chain)
        assert tokens == 24
        assert same(blocks[0], tail)


def test_a_slice_whose_others_never_come_goes_below_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "JOIN_SECONDS", 0.1)
    chain = chain_of(range(16))
    lone = cut(block_at(SPEC, chain, 0), RANKS[0])
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        cache.store(lone)
        assert cache.flush(30)
        assert names(tmp_path) == [lone.header.name]
        assert cache.lookup(Query(chain, SPEC)).tokens == 0
        assert cache.stats().tiers["memory"].leased == 0
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        assert cache.lookup(Query(chain, SPEC, slice=RANKS[0])).tokens == 16


def test_where_there_is_no_room_for_the_whole_its_slices_go_below(tmp_path):
    spec = small_spec(layers=8, heads=4, dim=64)
    chain = chain_of(range(256), 256)
    whole = block_at(spec, chain, 0)
    size = sum(array.nbytes for array in whole.arrays.values())
    with retain.open(f"memory:{size + size // 2}", f"disk:{tmp_path}") as cache:
        parts = [Slice(0, 8, i, i + 1, 2) for i in range(2)]
        for part in parts:
            assert cache.store(cut(whole, part)).reason == "stored"
        assert cache.flush(30)
        assert len(names(tmp_path)) == 2
        tokens, blocks = read(cache, chain, spec)
        assert tokens == 256
        assert same(blocks[0], whole)


def test_a_reader_of_a_slice_keeps_it_while_it_is_joined():
    chain = chain_of(range(16))
    whole = block_at(SPEC, chain, 0)
    with retain.open("memory:8MiB") as cache:
        cache.store(cut(whole, RANKS[0]))
        with cache.load(cache.lookup(Query(chain, SPEC, slice=RANKS[0]))) as loaded:
            cache.store(cut(whole, RANKS[1]))
            assert cache.flush(30)
            assert same(dict(loaded.blocks[0].arrays), cut(whole, RANKS[0]))
        del loaded
        assert cache.stats().tiers["memory"].objects == 1
        assert same(read(cache, chain)[1][0], whole)


@pytest.mark.parametrize("call", ["clear", "drop", "space"])
def test_nothing_of_a_block_that_was_removed_while_it_was_joined_comes_back(tmp_path, monkeypatch, call):
    chain = chain_of(range(16))
    whole = block_at(SPEC, chain, 0)
    begun, go_on = threading.Event(), threading.Event()
    with retain.open("memory:8MiB", f"disk:{tmp_path}") as cache:
        block = cache.joiner._block

        def slow(*arguments):
            begun.set()
            assert go_on.wait(30)
            return block(*arguments)

        monkeypatch.setattr(cache.joiner, "_block", slow)
        for part in RANKS:
            cache.store(cut(whole, part))
        assert begun.wait(30)
        if call == "drop":
            cache.drop([whole.header.key])
        else:
            cache.clear(space=whole.header.space if call == "space" else None)
        go_on.set()
        assert cache.flush(30)
        stats = cache.stats().tiers
        assert stats["memory"].objects == stats["disk"].objects == stats["memory"].leased == 0
        assert not names(tmp_path)


def test_slices_of_layers_with_different_shapes_are_joined():
    spec = mixed_spec()
    chain = chain_of(range(16))
    whole = block_at(spec, chain, 0)
    count = len(spec.layers)
    with retain.open("memory:8MiB") as cache:
        for part in (Slice(0, count // 2), Slice(count // 2, count)):
            cache.store(cut(whole, part))
        assert cache.flush(30)
        assert cache.stats().counters["joined_blocks"] == 1
        assert same(read(cache, chain, spec)[1][0], whole)


def test_a_cache_that_closes_waits_for_no_rank(tmp_path):
    chain = chain_of(range(16))
    lone = cut(block_at(SPEC, chain, 0), RANKS[1])
    cache = retain.open("memory:8MiB", f"disk:{tmp_path}")
    cache.store(lone)
    started = time.monotonic()
    cache.close()
    assert time.monotonic() - started < join.JOIN_SECONDS
    assert names(tmp_path) == [lone.header.name]
