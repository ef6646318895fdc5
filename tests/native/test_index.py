"""The index finds, chains, counts and evicts as a plain model of it does."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import random
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from retain._native import Index

NONE = 0xFFFFFFFF


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


ROOT = key(2**63)


# against a model


@dataclass
class Known:
    key: bytes
    form: int
    space: int
    parent: bytes
    size: int
    offset: int
    tick: int
    refs: int = 0
    hits: int = 0
    pinned: bool = False


def kind_of(uses: int) -> int:
    return uses if uses < 3 else 3 if uses < 6 else 4 if uses < 16 else 5


EPOCH = 32  # ticks, in an index of fewer than 2048 records


@dataclass
class Wait:
    """From one use of a record to the next. `ended`: the tick of that, None while it lasts."""

    uses: int
    tick: int
    ended: int | None = None

    @property
    def kind(self) -> int:
        return kind_of(self.uses)

    def age(self, epoch: int) -> int:
        """In ticks, at `epoch`, by whole epochs."""
        return (epoch - self.tick // EPOCH) * EPOCH or EPOCH // 2


def classes() -> list[tuple[int, int]]:
    """The ages that are counted together: (first, width)."""
    return [(n, 1) for n in range(4)] + [
        ((4 + quarter) << octave, 1 << octave) for octave in range(20) for quarter in range(4)
    ]


CLASSES = classes()


def class_of(age: int) -> int:
    return next(n for n, (first, width) in enumerate(CLASSES) if first <= age < first + width)


class Waits:
    """The forecast, from the list of all waits there ever were."""

    def __init__(self) -> None:
        self.latest: dict[tuple[bytes, int], Wait] = {}
        self.all: list[Wait] = []

    def use(self, name: tuple[bytes, int], tick: int) -> None:
        last = self.latest.get(name)
        if last is not None:
            last.ended = tick
        self.latest[name] = Wait(0 if last is None else last.uses + 1, tick)
        self.all.append(self.latest[name])

    def value(self, wait: Wait, now: int) -> float:
        """The best chance of a use per tick waited, over all times to wait: by the epochs that ended."""
        epoch = now // EPOCH
        uses, watched = defaultdict[int, float](float), defaultdict[int, float](float)
        same = [each for each in self.all if each.kind == wait.kind]
        for each in same:
            begun, end = each.tick // EPOCH, epoch if each.ended is None else each.ended // EPOCH
            for past in range(begun, end):
                watched[class_of(each.age(past))] += EPOCH * 0.9995 ** (epoch - 1 - past)
            if each.ended is not None and end < epoch:
                uses[class_of(each.age(end))] += 0.9995 ** (epoch - 1 - end)
        best, left, gained, spent = 0.0, 1.0, 0.0, 0.0
        for number in range(class_of(wait.age(epoch)), class_of(512 * EPOCH) + 1):
            first, width = CLASSES[number]
            prior = 0.3 / (first + width / 2 + 4 * EPOCH)
            rate = (uses[number] + 100 * EPOCH * prior) / (watched[number] + 100 * EPOCH)
            remaining = left / (1 + rate * width)
            gained += left - remaining
            spent += (left + remaining) / 2 * width
            best, left = max(best, gained / spent), remaining
        return best


class Model:
    """What an index is, written down without regard for speed."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.records: dict[int, Known] = {}
        self.clock = 0
        self.waits = Waits()

    def use(self, slot: int) -> None:
        known = self.records[slot]
        self.waits.use((known.key, known.form), known.tick)

    def next_tick(self) -> int:
        self.clock += 1
        return self.clock

    def slot_of(self, wanted: bytes, form: int) -> int | None:
        return next((s for s, r in self.records.items() if (r.key, r.form) == (wanted, form)), None)

    def children(self, parent: bytes) -> list[int]:
        return [s for s, r in self.records.items() if r.parent == parent and r.key != parent]

    def victims(self) -> set[int | None]:
        """Who may go next; more than one only where rounding decides between them."""
        parents = {r.parent for r in self.records.values() if r.parent != r.key}
        free = [s for s, r in self.records.items() if not r.refs and not r.pinned]
        if self.policy != "lru":
            leaves = [s for s in free if self.records[s].key not in parents]
            if leaves or len(free) < len(self.records):
                free = leaves
            elif self.policy == "reuse-leaf":
                return {min(free, key=lambda s: self.records[s].tick, default=None)}
        oldest: dict[int, int] = {}
        for slot in sorted(free, key=lambda s: self.records[s].tick):
            oldest.setdefault(self.wait(slot).kind if self.policy == "reuse-leaf" else 0, slot)
        if len(oldest) < 2:
            return {*oldest.values()} or {None}
        values = {slot: self.waits.value(self.wait(slot), self.clock) for slot in oldest.values()}
        least = min(values.values())
        return {slot for slot, value in values.items() if value <= least * (1 + 1e-9)}

    def wait(self, slot: int) -> Wait:
        known = self.records[slot]
        return self.waits.latest[known.key, known.form]


numbers = st.integers(0, 7)
forms = st.integers(0, 2)


class IndexMachine(RuleBasedStateMachine):
    index: Index
    model: Model

    @initialize(policy=st.sampled_from(["lru", "lru-leaf", "reuse-leaf"]))
    def start(self, policy: str) -> None:
        self.index = Index(policy)
        self.model = Model(policy)

    def some_slots(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.model.records)), max_size=5))

    def one_slot(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.records)))

    @rule(
        number=numbers,
        form=forms,
        space=st.integers(0, 2),
        parent=numbers,
        size=st.sampled_from([0, 1, 2**40]),
    )
    def insert(self, number: int, form: int, space: int, parent: int, size: int) -> None:
        own, above = key(number), key(parent)
        if self.model.slot_of(own, form) is not None:
            with pytest.raises(KeyError):
                self.index.insert(own, form, space, above, size)
            return
        slot = self.index.insert(own, form, space, above, size, 7 * size)
        assert slot not in self.model.records
        self.model.records[slot] = Known(own, form, space, above, size, 7 * size, self.model.next_tick())
        self.model.use(slot)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = self.one_slot(data)
        self.index.remove(slot)
        del self.model.records[slot]

    @rule()
    def evict(self) -> None:
        slot = self.index.victim()
        assert slot in self.model.victims()
        if slot is not None:
            self.index.remove(slot)
            del self.model.records[slot]

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), as_array=st.booleans())
    def touch(self, data: st.DataObject, as_array: bool) -> None:
        slots = self.some_slots(data)
        self.index.touch(np.array(slots, np.uint32) if as_array else slots)
        for slot in slots:
            self.model.records[slot].tick = self.model.next_tick()
            self.model.records[slot].hits += 1
            self.model.use(slot)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), times=st.sampled_from([20, 70]))
    def touch_much(self, data: st.DataObject, times: int) -> None:
        """Epochs go by, and some records become well used."""
        slots = self.some_slots(data)
        for place in range(times if slots else 0):
            slot = slots[place % len(slots)]
            self.index.touch([slot])
            self.model.records[slot].tick = self.model.next_tick()
            self.model.records[slot].hits += 1
            self.model.use(slot)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), as_array=st.booleans())
    def acquire(self, data: st.DataObject, as_array: bool) -> None:
        slots = self.some_slots(data)
        self.index.acquire(np.array(slots, np.uint32) if as_array else slots)
        for slot in slots:
            self.model.records[slot].refs += 1

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), as_array=st.booleans())
    def release(self, data: st.DataObject, as_array: bool) -> None:
        slots = self.some_slots(data)
        given = np.array(slots, np.uint32) if as_array else slots
        if any(self.model.records[slot].refs < slots.count(slot) for slot in slots):
            with pytest.raises(ValueError, match="no lease"):
                self.index.release(given)
            return
        self.index.release(given)
        for slot in slots:
            self.model.records[slot].refs -= 1

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = self.one_slot(data)
        assert self.index.pin(slot) is not self.model.records[slot].pinned
        self.model.records[slot].pinned = True

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = self.one_slot(data)
        assert self.index.unpin(slot) is self.model.records[slot].pinned
        self.model.records[slot].pinned = False

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), parent=numbers, space=st.integers(0, 2), offset=st.integers(0, 2**63))
    def learn(self, data: st.DataObject, parent: int, space: int, offset: int) -> None:
        slot = self.one_slot(data)
        self.index.set_parent(slot, key(parent))
        self.index.set_space(slot, space)
        self.index.set_offset(slot, offset)
        record = self.model.records[slot]
        record.parent, record.space, record.offset = key(parent), space, offset

    @rule(slot=st.sampled_from([0, 1, 5, 100, NONE]))
    def a_free_slot_is_an_index_error_and_changes_nothing(self, slot: int) -> None:
        if slot in self.model.records:
            return
        good = [*self.model.records]
        for call in (self.index.touch, self.index.acquire, self.index.release):
            with pytest.raises(IndexError):
                call([*good, slot])
        for single in (self.index.remove, self.index.pin, self.index.unpin, self.index.record):
            with pytest.raises(IndexError):
                single(slot)
        for setter in (self.index.set_space, self.index.set_offset):
            with pytest.raises(IndexError):
                setter(slot, 1)
        with pytest.raises(IndexError):
            self.index.set_parent(slot, ROOT)

    @rule(wanted=st.lists(numbers, max_size=8), accepted=st.lists(forms, max_size=3))
    def lookup(self, wanted: list[int], accepted: list[int]) -> None:
        found = self.index.lookup(b"".join(key(n) for n in wanted), accepted)
        assert found.dtype == np.uint32
        for number, slot in zip(wanted, found.tolist(), strict=True):
            slots = [self.model.slot_of(key(number), form) for form in accepted]
            assert slot == next((s for s in slots if s is not None), NONE)

    @invariant()
    def the_same_records_are_there(self) -> None:
        if not hasattr(self, "index"):
            return
        records = self.model.records
        for slot, known in records.items():
            record = self.index.record(slot)
            seen = {name: getattr(record, name) for name in vars(known)}
            assert seen == vars(known)
        assert self.index.slots().tolist() == sorted(records)
        assert self.index.count == len(self.index) == len(records)
        assert self.index.bytes == sum(r.size for r in records.values())
        assert self.index.leased == sum(r.refs > 0 for r in records.values())
        assert self.index.pinned == sum(r.pinned for r in records.values())
        assert self.index.victim() in self.model.victims()

    @invariant()
    def the_same_things_are_found(self) -> None:
        if not hasattr(self, "index"):
            return
        records = self.model.records
        for number in range(8):
            own = key(number)
            assert sorted(self.index.same_key(own)) == sorted(s for s, r in records.items() if r.key == own)
            assert sorted(self.index.children(own, 1000)) == sorted(self.model.children(own))
            assert self.index.children(own, 2) == self.index.children(own, 1000)[:2]
            for form in range(3):
                assert self.index.find(own, form) == self.model.slot_of(own, form)
        for space in range(3):
            mine = [s for s, r in records.items() if r.space == space]
            assert self.index.slots(space=space).tolist() == sorted(mine)
            assert self.index.space_bytes(space) == (len(mine), sum(records[s].size for s in mine))
            assert self.index.slots(form=space).tolist() == sorted(
                s for s, r in records.items() if r.form == space
            )


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# what the model does not say


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'lfu'; known are reuse-leaf, lru-leaf and lru"):
        Index("lfu")


def test_keys_of_another_length_are_refused() -> None:
    index = Index("lru")
    with pytest.raises(ValueError, match="32 bytes, got 31"):
        index.insert(b"k" * 31, 0, 0, ROOT, 1)
    with pytest.raises(ValueError, match="parent must be 32 bytes"):
        index.insert(key(1), 0, 0, b"", 1)
    with pytest.raises(ValueError, match="32 bytes each, got 33"):
        index.lookup(b"k" * 33, [0])
    with pytest.raises(ValueError, match="32 bytes"):
        index.find(b"", 0)
    assert index.lookup(b"", [0]).tolist() == []


def test_slots_that_are_no_slots_are_refused() -> None:
    index = Index("lru")
    slot = index.insert(key(1), 0, 0, ROOT, 1)
    for wrong in ([-1], [2**32 + slot], [1.5], np.array([[slot]], np.uint32), np.array([2**32 + slot]), "0"):
        with pytest.raises(TypeError):
            index.touch(wrong)  # type: ignore[arg-type]
    index.touch(np.array([slot], np.int64))
    assert index.record(slot).hits == 1


def test_parents_go_after_their_children_and_with_their_own_age() -> None:
    index = Index("lru-leaf")
    old, old_child = index.insert(key(1), 0, 0, ROOT, 1), index.insert(key(2), 0, 0, key(1), 1)
    other = index.insert(key(3), 0, 0, ROOT, 1)
    index.touch([old_child])
    gone = []
    while (slot := index.victim()) is not None:
        gone.append(slot)
        index.remove(slot)
    assert gone == [other, old_child, old]


def test_a_leased_child_keeps_its_parent() -> None:
    index = Index("lru-leaf")
    parent, child = index.insert(key(1), 0, 0, ROOT, 1), index.insert(key(2), 0, 0, key(1), 1)
    index.acquire([child])
    assert index.victim() is None
    index.release([child])
    assert index.victim() == child
    index.remove(child)
    assert index.victim() == parent


def test_records_that_lie_about_their_parents_do_not_stay_for_ever() -> None:
    index = Index("lru-leaf")
    itself = index.insert(key(1), 0, 0, key(1), 1)
    ring = [index.insert(key(n), 0, 0, key(2 + (n + 1) % 3), 1) for n in range(2, 5)]
    gone = []
    while (slot := index.victim()) is not None:
        gone.append(slot)
        index.remove(slot)
    assert gone[0] == itself
    assert sorted(gone) == sorted([itself, *ring])


def test_children_come_most_recently_used_first() -> None:
    index = Index("lru-leaf")
    slots = [index.insert(key(n), 0, 0, ROOT, 1) for n in range(5)]
    assert index.children(ROOT, 10) == slots[::-1]
    index.touch([slots[1], slots[3], slots[4], slots[4]])
    assert index.children(ROOT, 3) == [slots[4], slots[3], slots[1]]


def test_a_parent_of_many_children_costs_others_nothing() -> None:
    index = Index("lru-leaf")
    slots = [index.insert(key(n), 0, 0, ROOT, 1) for n in range(100_000)]
    chance = random.Random(1)
    chance.shuffle(slots)
    started = time.process_time()
    index.touch(slots)
    for slot in slots:
        index.remove(slot)
    assert time.process_time() - started < 2.0
    assert index.count == 0
    assert index.children(ROOT, 10) == []


def test_the_lease_count_of_a_slot_cannot_fall_below_zero_by_a_repeated_slot() -> None:
    index = Index("lru")
    slot = index.insert(key(1), 0, 0, ROOT, 1)
    index.acquire([slot])
    with pytest.raises(ValueError, match="no lease"):
        index.release([slot, slot])
    assert index.record(slot).refs == 1
    assert index.leased == 1


@pytest.mark.parametrize("policy", ["lru", "lru-leaf", "reuse-leaf"])
@pytest.mark.slow
def test_a_million_records_take_under_200_bytes_each_and_are_found_at_once(policy: str) -> None:
    count, length = 1_000_000, 128
    keys = os.urandom(32 * count)
    before = _resident()
    index = Index(policy)
    parent = ROOT
    for number in range(count):
        own = keys[32 * number : 32 * number + 32]
        index.insert(own, number % 3, number % 50, ROOT if number % length == 0 else parent, 4096)
        parent = own
    grown = _resident() - before
    assert index.nbytes / count < 160
    assert grown / count < 200
    times = []
    for prompt in range(200):
        wanted = keys[32 * length * prompt * 37 :][: 32 * length]
        started = time.perf_counter()
        slots = index.lookup(wanted, [0, 1, 2])
        times.append(time.perf_counter() - started)
        assert NONE not in slots
    assert sorted(times)[len(times) // 2] < 0.0005


@pytest.mark.slow
def test_records_with_what_is_remembered_of_those_gone_take_under_200_bytes_each() -> None:
    count = 500_000
    index = Index("reuse-leaf")
    before = _resident()
    for number in range(4 * count):
        own = number.to_bytes(32, "little")
        index.insert(own, 0, 0, own, 4096)
        if index.count > count:
            victim = index.victim()
            assert victim is not None
            index.remove(victim)
    assert index.nbytes / count < 200
    assert (_resident() - before) / count < 200


def test_records_that_came_back_outlive_as_old_ones_that_never_did() -> None:
    index = Index("reuse-leaf")
    number = 1_000
    again = [index.insert(key(n), 0, 0, ROOT, 1) for n in range(50)]
    for _ in range(40):
        index.touch(again)
        for _ in range(50):
            number += 1
            index.insert(key(number), 0, 0, ROOT, 1)
            while index.count > 100:
                victim = index.victim()
                assert victim is not None
                index.remove(victim)
    for _ in range(30):
        number += 1
        index.insert(key(number), 0, 0, ROOT, 1)
        victim = index.victim()
        assert victim is not None
        assert victim not in again
        index.remove(victim)


def test_records_that_were_used_a_thousand_times_leave_within_a_turnover_once_nobody_uses_them() -> None:
    index = Index("reuse-leaf")
    hot = [index.insert(key(n), 0, 0, ROOT, 1) for n in range(50)]
    for _ in range(1_000):
        index.touch(hot)
    for number in range(1_000, 1_100):
        index.insert(key(number), 0, 0, ROOT, 1)
        while index.count > 100:
            victim = index.victim()
            assert victim is not None
            index.remove(victim)
    assert all(index.find(key(n), 0) is None for n in range(50))


def test_a_block_that_returns_after_its_eviction_is_known_to_have_been_used() -> None:
    """A second visit finds it kept longer than blocks of the same age that are new."""

    def left(policy: str) -> int:
        index = Index(policy)
        number = 10_000
        for turn in range(30):
            for n in range(40 * (turn % 2), 40 * (turn % 2) + 40):
                slot = index.find(key(n), 0)
                if slot is None:
                    index.insert(key(n), 0, 0, ROOT, 1)
                else:
                    index.touch([slot])
            for _ in range(40):
                number += 1
                index.insert(key(number), 0, 0, ROOT, 1)
            while index.count > 60:
                victim = index.victim()
                assert victim is not None
                index.remove(victim)
        return sum(index.find(key(n), 0) is not None for n in range(80))

    assert left("reuse-leaf") > left("lru-leaf")


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# A31


def requests(data: Path) -> Iterator[tuple[int, list[int]]]:
    """(input tokens, ids of its full blocks of 512 tokens) of each request of the conversation trace."""
    packed = (data / "mooncake_fast25_partial.tar.zst").read_bytes()
    stream = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(io.BytesIO(packed))
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.name.endswith("conversation_trace.jsonl"):
                lines = archive.extractfile(member)
                assert lines is not None
                for line in lines:
                    request = json.loads(line)
                    yield request["input_length"], request["hash_ids"][: request["input_length"] // 512]


def replay(trace: list[tuple[int, list[int]]], capacity: int) -> tuple[float, int]:
    """(hit rate by tokens, evictions) of a cache of `capacity` blocks under plain LRU."""
    index = Index("lru")
    ids = sorted({each for _, blocks in trace for each in blocks})
    keys = {each: key(each) for each in ids}
    hit_tokens = all_tokens = evictions = 0
    for tokens, blocks in trace:
        found = index.lookup(b"".join(keys[each] for each in blocks), [0])
        missing = np.flatnonzero(found == NONE)
        hit_tokens += 512 * int(missing[0] if missing.size else found.size)
        all_tokens += tokens
        parent = ROOT
        for each in blocks:
            slot = index.find(keys[each], 0)
            if slot is None:
                index.insert(keys[each], 0, 0, parent, 512)
                if index.count > capacity:
                    victim = index.victim()
                    assert victim is not None
                    index.remove(victim)
                    evictions += 1
            else:
                index.touch([slot])
            parent = keys[each]
    return hit_tokens / all_tokens, evictions


@pytest.mark.slow
def test_a31_lru_equals_the_reference_simulator_on_a_real_trace(data: Path) -> None:
    trace = list(requests(data))
    assert len(trace) == 12_031
    rates = {}
    for capacity in (1_000, 5_000, 10_000, 20_000, 50_000):
        rate, evictions = replay(trace, capacity)
        rates[capacity] = round(rate, 4)
        if capacity == 10_000:
            assert evictions == 204_495
    assert rates == {1_000: 0.0457, 5_000: 0.1196, 10_000: 0.2192, 20_000: 0.2993, 50_000: 0.3628}


def test_a31_a_fresh_record_is_the_last_to_go() -> None:
    index = Index("lru")
    slots = [index.insert(key(n), 0, 0, ROOT, 1) for n in range(4)]
    index.touch([slots[0]])
    fresh = index.insert(key(9), 0, 0, ROOT, 1)
    gone = []
    while (slot := index.victim()) is not None:
        gone.append(slot)
        index.remove(slot)
    assert gone == [slots[1], slots[2], slots[3], slots[0], fresh]
