"""Replays of traces: equal to plain simulators, and to the published figures on the real trace (A31)."""

from collections import OrderedDict
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.bench import trace
from retain.bench.replay import replay_belady, replay_policy, replay_rival
from retain.bench.rivals import RIVALS
from retain.bench.traces import Request, Trace
from retain.errors import ConfigError


def trace_of(*requests: list[int], block_tokens: int = 16) -> Trace:
    made = tuple(Request(block_tokens * len(blocks) + 3, np.array(blocks, np.int64)) for blocks in requests)
    return Trace("made", block_tokens, made)


def plain_lru(given: Trace, capacity: int) -> tuple[int, int]:
    """The reference: hit tokens and evictions of an ordered dictionary."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = evictions = 0
    for request in given.requests:
        blocks = request.blocks.tolist()
        leading = next((place for place, block in enumerate(blocks) if block not in held), len(blocks))
        hits += leading
        for block in blocks:
            held[block] = None
            held.move_to_end(block)
            if len(held) > capacity:
                held.popitem(last=False)
                evictions += 1
    return hits * given.block_tokens, evictions


chains = st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), min_size=1, max_size=12)


@given(chains, st.integers(1, 10))
def test_a31_lru_equals_a_plain_simulator(requests, capacity):
    given = trace_of(*requests)
    found = replay_policy(given, capacity, "lru")
    assert (found.hit_tokens, found.evictions) == plain_lru(given, capacity)


def test_a31_a_fresh_block_is_not_the_first_to_go():
    found = replay_policy(trace_of([1], [2], [3], [3], [2]), 2, "lru")
    assert found.hit_tokens == 2 * 16


def test_a_hit_counts_only_leading_blocks():
    assert replay_policy(trace_of([1, 2, 3], [1, 9, 3]), 10, "lru").hit_tokens == 16


def test_lru_leaf_keeps_the_parent_where_lru_would_orphan_its_child():
    requests = ([1, 2], [7], [1, 2])
    assert replay_policy(trace_of(*requests), 2, "lru").hit_tokens == 0
    assert replay_policy(trace_of(*requests), 2, "lru-leaf").hit_tokens == 16


def best_block_hits(touches: list[int], capacity: int) -> int:
    """The most hits any choice of victims can have, by trying all of them."""
    states = {(frozenset[int]()): 0}
    for block in touches:
        following: dict[frozenset[int], int] = {}
        for held, before in states.items():
            hits = before + (block in held)
            full = held | {block}
            choices = [full] if len(full) <= capacity else [full - {victim} for victim in full]
            for choice in choices:
                following[choice] = max(following.get(choice, 0), hits)
        states = following
    return max(states.values())


@pytest.mark.parametrize("leaf", [False, True])
@given(touches=st.lists(st.integers(0, 4), min_size=1, max_size=12), capacity=st.integers(1, 3))
def test_belady_is_the_optimum_for_single_blocks(leaf, touches, capacity):
    found = replay_belady(trace_of(*([block] for block in touches)), capacity, leaf=leaf)
    assert found.hit_tokens == 16 * best_block_hits(touches, capacity)


@pytest.mark.parametrize("policy", RIVALS)
@settings(deadline=None)
@given(requests=chains, capacity=st.integers(1, 10))
def test_every_rival_stays_within_its_capacity_and_below_the_optimum(policy, requests, capacity):
    cache = RIVALS[policy](capacity)
    for block in (block for request in requests for block in request):
        was = {number for number in range(13) if number in cache}
        before = cache.evictions
        cache.use(block, 0)
        now = {number for number in range(13) if number in cache}
        assert block in now or policy in ("lfu", "gdsf")
        assert len(now) <= capacity
        assert len(was | {block}) - len(now) == cache.evictions - before
    touches = [[block] for request in requests[:3] for block in request[:4]]
    found = replay_rival(trace_of(*touches), capacity, policy).hit_tokens
    assert found <= replay_belady(trace_of(*touches), capacity).hit_tokens


@pytest.mark.parametrize(
    ("policy", "touches", "capacity", "kept"),
    [
        ("lfu", [1, 1, 2, 2, 3, 4], 3, {1, 2, 4}),
        ("gdsf", [1, 1, 2, 3, 4, 5], 2, {4, 5}),
        ("sieve", [1, 2, 3, 1, 4], 3, {1, 3, 4}),
        ("s3-fifo", [1, 1, 1, 2, 3, 4], 3, {1, 3, 4}),
        ("arc", [1, 1, 2, 3, 4, 5], 3, {1, 4, 5}),
    ],
)
def test_rivals_keep_what_their_papers_say(policy, touches, capacity, kept):
    cache = RIVALS[policy](capacity)
    for block in touches:
        cache.use(block, 0)
    assert {number for number in range(9) if number in cache} == kept


def test_the_default_policy_closes_a_gap_only_beside_lru_and_belady(tmp_path):
    file = tmp_path / "made.jsonl"
    line = '{{"input_length": {}, "hash_ids": {}}}'
    rows = [line.format(512 * 2, [1, n]) for n in (2, 3, 4, 2, 3, 4)]
    file.write_text("\n".join(rows))
    report = trace.run(str(file), None, (3,), (trace.DEFAULT, "lru", "belady"))
    rate = {str(row["policy"]): float(row["hit_rate"] or 0) for row in report.rows}
    assert rate["belady"] > rate["lru"]
    closed = (rate[trace.DEFAULT] - rate["lru"]) / (rate["belady"] - rate["lru"])
    assert report.ratios["trace.made.3.default_gap_closed"] == pytest.approx(closed)
    assert "trace.made.3.default_gap_closed" not in trace.run(str(file), None, (3,), ("lru",)).ratios


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake-conversation", "mooncake-synthetic"])
def test_the_default_policy_finds_at_least_what_lru_finds(data, name):
    report = trace.run(name, data, (), (trace.DEFAULT, "lru"))
    rate = {(row["policy"], row["capacity"]): float(row["hit_rate"] or 0) for row in report.rows}
    for capacity in trace.CAPACITIES[name]:
        assert rate[trace.DEFAULT, capacity] >= rate["lru", capacity]
    if name == "mooncake-conversation":
        assert rate[trace.DEFAULT, 5_000] >= 0.16


def test_a_replay_tells_how_far_it_is():
    heard: list[int] = []
    replay_policy(trace_of([1], [2]), 5, "lru", advance=heard.append)
    replay_belady(trace_of([1], [2]), 5, advance=heard.append)
    assert heard == [1, 2, 1, 2]


def test_a31_the_real_trace_gives_the_published_figures(data):
    report = trace.run("mooncake-conversation", data, (10_000,), ("lru", "belady"))
    assert report.ratios["trace.lru.evictions"] == 204_495
    assert round(report.ratios["trace.lru.hit_rate"], 4) == 0.2192
    assert round(report.ratios["trace.belady.hit_rate"], 4) == 0.3734
    assert report.checks == {"lru_10000_equals_reference": True, "belady_10000_equals_reference": True}


def test_a_wrong_figure_fails_the_bench(data, monkeypatch):
    monkeypatch.setitem(trace.REFERENCE, ("mooncake-conversation", "lru", 10_000), 0.2193)
    assert not trace.run("mooncake-conversation", data, (10_000,), ("lru",)).passed


def test_rows_ratios_and_the_chart_tell_the_same(tmp_path):
    file = tmp_path / "made.jsonl"
    line = '{{"input_length": {}, "hash_ids": {}}}'
    rows = [line.format(512 * 3, [1, 2, 3]), line.format(512 * 2 + 9, [1, 2]), line.format(512, [5])]
    file.write_text("\n".join(rows))
    report = trace.run(str(file), None, (2, 4), ("lru", "belady-leaf"))
    rate = {(row["policy"], row["capacity"]): row["hit_rate"] for row in report.rows}
    assert rate["lru", 4] == pytest.approx(1024 / (512 * 6 + 9))
    assert report.ratios["trace.lru.hit_rate"] == rate["lru", 2]
    for policy, capacity in product(("lru", "belady-leaf"), (2, 4)):
        assert report.ratios[f"trace.{policy}.{capacity}.hit_rate"] == rate[policy, capacity]
    pytest.importorskip("matplotlib")
    assert len(trace.plot(report).axes[0].get_lines()) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policies": ("fifo",)}, "no policy is called 'fifo'"),
        ({"capacities": (0,)}, "at least one block"),
        ({}, "no trace is called 'absent'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        trace.run("absent", None, **more)
