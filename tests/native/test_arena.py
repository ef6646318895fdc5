"""The arena allocator gives disjoint places up to its capacity, whatever was taken and given back before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retain._native import Arena

PAGE = 4096
MIB = 1 << 20


class ArenaMachine(RuleBasedStateMachine):
    """An arena beside a page map: who holds each page, and whether it holds memory."""

    CAPACITY, SPAN = 24, 60

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(self.CAPACITY * PAGE, self.SPAN * PAGE)
        self.taken: dict[int, int] = {}
        self.memory: set[int] = set()

    @rule(size=st.integers(1, 30 * PAGE))
    def take(self, size: int) -> None:
        pages = -(-size // PAGE)
        held = {page for start, count in self.taken.items() for page in range(start, start + count)}
        taken = self.arena.take(size)
        if taken is None:
            assert len(held) + pages > self.CAPACITY or not _fits(held, pages, self.SPAN)
            return
        offset, idle = taken
        place = set(range(offset // PAGE, offset // PAGE + pages))
        assert offset % PAGE == 0
        assert max(place) < self.SPAN
        assert not place & held
        assert len(held) + pages <= self.CAPACITY
        for start, length in idle:
            gone = set(range(start // PAGE, (start + length) // PAGE))
            assert start % PAGE == length % PAGE == 0
            assert not gone & (held | place)
            assert gone <= self.memory
            self.memory -= gone
        self.memory |= place
        self.taken[offset // PAGE] = pages

    @rule(size=st.integers(1, 8 * PAGE))
    def take_fresh(self, size: int) -> None:
        pages = -(-size // PAGE)
        held = {page for start, count in self.taken.items() for page in range(start, start + count)}
        offset = self.arena.fresh(size)
        if offset is None:
            last = max(held | self.memory, default=-1)
            assert len(self.memory) + pages > self.CAPACITY or last + 1 + pages > self.SPAN
            return
        place = set(range(offset // PAGE, offset // PAGE + pages))
        assert offset % PAGE == 0
        assert max(place) < self.SPAN
        assert not place & (held | self.memory)
        self.memory |= place
        self.taken[offset // PAGE] = pages

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        assert self.arena.give(start * PAGE) == self.taken.pop(start) * PAGE

    @rule(offset=st.integers(0, 60 * PAGE))
    def what_was_not_taken_cannot_be_given(self, offset: int) -> None:
        if offset % PAGE or offset // PAGE not in self.taken:
            with pytest.raises(IndexError):
                self.arena.give(offset)

    @invariant()
    def memory_stays_within_the_capacity(self) -> None:
        assert self.arena.used == sum(self.taken.values()) * PAGE
        assert self.arena.used + self.arena.idle == len(self.memory) * PAGE <= self.CAPACITY * PAGE


def _fits(held: set[int], pages: int, span: int) -> bool:
    return any(not held & set(range(start, start + pages)) for start in range(span - pages + 1))


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def log_uniform(chance: random.Random, low: int, high: int) -> int:
    return int(math.exp(chance.uniform(math.log(low), math.log(high))))


MIXES: dict[str, Callable[[random.Random], int]] = {
    "log-uniform": lambda chance: log_uniform(chance, 4096, 32 * MIB),
    "uniform": lambda chance: chance.randint(4096, 32 * MIB),
    "blocks and tails": lambda chance: (
        11_800_000 * (16 if chance.random() < 0.8 else chance.randint(1, 15)) // 16
    ),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_frees_leave_the_whole_capacity_usable(mix: str, seed: int) -> None:
    chance = random.Random(seed)
    capacity = 512 * MIB
    arena = Arena(capacity, 8 * capacity)
    held: list[int] = []
    asked = fresh = 0
    for step in range(8000):
        size = -(-MIXES[mix](chance) // PAGE) * PAGE
        while arena.used + size > capacity:
            arena.give(held.pop(chance.randrange(len(held))))
        before = arena.used + arena.idle
        taken = arena.take(size)
        assert taken is not None, f"no room for {size} bytes with {arena.used / capacity:.0%} in use"
        held.append(taken[0])
        if step > 2000:
            asked += size
            fresh += arena.used + arena.idle + sum(length for _, length in taken[1]) - before
    assert fresh / asked < 0.5, "most memory is taken from the system anew"


def test_objects_of_one_size_reuse_the_memory_of_the_evicted() -> None:
    arena = Arena(64 * MIB, 512 * MIB)
    held: list[int] = []
    for step in range(1000):
        taken = arena.take(4 * MIB + 1)
        if taken is None:
            arena.give(held.pop((step * 7) % len(held)))
            taken = arena.take(4 * MIB + 1)
        assert taken is not None
        assert taken[1] == []
        held.append(taken[0])
    assert max(held) < 64 * MIB


def test_a_large_object_fits_into_a_full_arena_when_as_many_bytes_go() -> None:
    arena = Arena(64 * MIB, 512 * MIB)
    held: list[int] = []
    while (taken := arena.take(64 << 10)) is not None:
        held.append(taken[0])
    for offset in held[::2]:
        arena.give(offset)
    assert arena.used == 32 * MIB
    taken = arena.take(32 * MIB)
    assert taken is not None
    assert sum(length for _, length in taken[1]) == 32 * MIB


def test_impossible_arenas_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="span"):
        Arena(2 * PAGE, PAGE)
    arena = Arena(2 * PAGE, 16 * PAGE)
    with pytest.raises(ValueError, match="0 bytes"):
        arena.take(0)
    assert arena.take(2 * PAGE + 1) is None
    assert arena.take(2**64 - 1) is None
    assert Arena(PAGE - 1, PAGE - 1).take(1) is None
    with pytest.raises(ValueError, match="0 bytes"):
        arena.fresh(0)
    assert arena.fresh(2 * PAGE + 1) is None
    assert arena.fresh(2**64 - 1) is None


def test_a_fresh_place_holds_no_memory_and_costs_none_that_lies_idle() -> None:
    arena = Arena(4 * PAGE, 16 * PAGE)
    taken = arena.take(2 * PAGE)
    assert taken == (0, [])
    arena.give(0)
    assert arena.fresh(PAGE) == 2 * PAGE
    assert (arena.used, arena.idle) == (PAGE, 2 * PAGE)
    assert arena.fresh(PAGE + 1) is None  # with the idle pages that were one more than there may be
    arena.give(2 * PAGE)
    assert (arena.used, arena.idle) == (0, 3 * PAGE)
    assert arena.take(3 * PAGE) == (0, [])  # all of it lay idle, in one piece


def test_there_is_no_fresh_place_behind_the_last_offset() -> None:
    arena = Arena(2 * PAGE, 2 * PAGE)
    assert arena.take(PAGE) == (0, [])
    assert arena.fresh(PAGE) == PAGE
    arena.give(0)
    assert arena.fresh(PAGE) is None
