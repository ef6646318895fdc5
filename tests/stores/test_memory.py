"""The memory store keeps the contract, and its arena takes objects up to its capacity."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retain.errors import StoreFull, StoreUnavailable
from retain.stores import memory
from retain.stores.base import Store
from retain.stores.memory import MemoryStore
from retain.testing.store import StoreConformance, read

MIB = 1 << 20


class TestMemoryStore(StoreConformance):
    def make_store(self, directory: Path) -> Store:
        return MemoryStore(3 * self.largest)

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        return MemoryStore(capacity)


class TestMemoryStoreThatKeepsMemoryReady(StoreConformance):
    examples = 10
    race_seconds = 0.3

    def make_store(self, directory: Path) -> Store:
        return MemoryStore(3 * self.largest, ready=2 * self.largest)

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        return MemoryStore(capacity, ready=capacity)


class TestMemoryStoreWithoutMemfd(StoreConformance):
    """Where the system has no memfd, and none of its memory can be given back."""

    largest = 4 << 20
    examples = 10
    race_seconds = 0.3

    @pytest.fixture(autouse=True)
    def old_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(mmap, "MADV_REMOVE")

    def make_store(self, directory: Path) -> Store:
        return MemoryStore(3 * self.largest)

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        return MemoryStore(capacity)


def physical(store: MemoryStore) -> int:
    """Bytes of memory that the arena holds."""
    assert store.fd is not None
    return os.fstat(store.fd).st_blocks * 512


def filled(store: MemoryStore, name: str, size: int, seed: int) -> None:
    place = store.reserve(name, size)
    place[:] = random.Random(seed).randbytes(size)
    store.commit(name)


# reservations and views


def test_a_reserved_object_is_seen_only_once_it_is_committed() -> None:
    store = MemoryStore(MIB)
    place = store.reserve("object", 5)
    place[:] = b"hello"
    assert store.size("object") is None
    assert list(store.scan()) == []
    assert store.used == 4096
    store.commit("object")
    assert read(store, "object") == b"hello"
    with pytest.raises(KeyError):
        store.commit("object")
    with pytest.raises(KeyError):
        store.abandon("object")


def test_an_abandoned_place_leaves_nothing_and_its_room_comes_back() -> None:
    store = MemoryStore(MIB)
    store.write("object", [b"old"])
    for _ in range(100):
        store.reserve("object", MIB - 4096)[:3] = b"new"
        store.abandon("object")
    assert read(store, "object") == b"old"
    assert store.used == 4096


def test_a_name_is_reserved_once_at_a_time() -> None:
    store = MemoryStore(MIB)
    store.reserve("object", 10)
    with pytest.raises(ValueError, match="reserved already"):
        store.reserve("object", 10)
    store.commit("object")
    store.reserve("object", 20)
    store.commit("object")
    assert store.size("object") == 20
    assert store.used == 4096


def test_a_reservation_refuses_bad_names_and_sizes() -> None:
    store = MemoryStore(MIB)
    with pytest.raises(ValueError, match="object name"):
        store.reserve("../object", 1)
    with pytest.raises(ValueError, match="negative"):
        store.reserve("object", -1)
    with pytest.raises(StoreFull, match="no room for 1048577 bytes"):
        store.reserve("object", MIB + 1)
    assert store.reserve("empty", 0).nbytes == 0
    store.commit("empty")
    assert read(store, "empty") == b""
    assert store.used == 0


def test_a_view_is_the_object_itself_and_read_only() -> None:
    store = MemoryStore(MIB)
    place = store.reserve("object", 5)
    place[:] = b"hello"
    store.commit("object")
    view = store.view("object")
    assert view is not None
    assert view.readonly
    assert bytes(view) == b"hello"
    place[0] = ord("j")  # which nobody may do; here it shows that the view is no copy
    assert bytes(view) == b"jello"
    assert store.view("nothing") is None


def test_places_are_told_apart_from_what_is_in_them() -> None:
    store = MemoryStore(MIB)
    store.write("one", [b"one"])
    store.reserve("two", 5000)[:3] = b"two"
    one, two = store.place("one"), store.place("two")
    assert one is not None
    assert two is not None
    assert (one[1], two[1]) == (3, 5000)
    assert two[0] % 4096 == 0
    assert store.fd is not None
    assert os.pread(store.fd, 3, one[0]) == b"one"
    assert os.pread(store.fd, 3, two[0]) == b"two"
    assert store.place("nothing") is None
    reserved = store.reserved("two")
    assert reserved is not None
    assert reserved.readonly
    assert bytes(reserved[:3]) == b"two"
    assert store.reserved("one") is None


def test_a_view_keeps_its_bytes_while_others_come_and_go() -> None:
    store = MemoryStore(8 * MIB)
    chance = random.Random(3)
    kept = {f"kept{n}": chance.randbytes(chance.randrange(1, 200_000)) for n in range(20)}
    for name, data in kept.items():
        store.write(name, [data])
    views = {name: store.view(name) for name in kept}
    others: list[str] = []
    for number in range(2000):
        data = bytes([number % 251]) * chance.randrange(1, MIB)
        while True:
            try:
                store.write(f"other{number}", [data])
                others.append(f"other{number}")
                break
            except StoreFull:
                store.delete(others.pop(chance.randrange(len(others))))
    for name, data in kept.items():
        view = views[name]
        assert view is not None
        assert bytes(view) == data


def test_views_outlive_the_store() -> None:
    store = MemoryStore(MIB)
    store.write("object", [b"data"])
    view = store.view("object")
    store.close()
    assert view is not None
    assert bytes(view) == b"data"


def test_an_object_that_is_replaced_while_it_is_read_keeps_its_place_until_then() -> None:
    store = MemoryStore(64 * MIB)
    store.write("object", [b"\1" * (16 * MIB)])
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number = number % 200 + 1
            store.write("object", [bytes([number]) * (16 * MIB)])

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        buffer = bytearray(16 * MIB)
        for _ in range(30):
            assert store.read_into("object", memoryview(buffer)) == len(buffer)
            assert buffer.count(buffer[0]) == len(buffer)
    finally:
        stop.set()
        thread.join(30)
    assert store.used == 16 * MIB


# capacity


def test_objects_fill_the_capacity_whatever_was_there_before() -> None:
    store = MemoryStore(32 * MIB)
    chance = random.Random(7)
    sizes: dict[str, int] = {}
    for number in range(3000):
        size = 4096 * max(1, int(2 ** chance.uniform(0, 11)))  # 4 KiB to 8 MiB
        while store.used + size > 32 * MIB:
            name = chance.choice(sorted(sizes))
            store.delete(name)
            del sizes[name]
        place = store.reserve(f"object{number}", size)
        place[:8] = place[-8:] = number.to_bytes(8, "little")
        store.commit(f"object{number}")
        sizes[f"object{number}"] = size
        assert store.used == sum(sizes.values())
    for name, size in sizes.items():
        view = store.view(name)
        assert view is not None
        assert view.nbytes == size
        assert view[:8] == view[-8:] == int(name.removeprefix("object")).to_bytes(8, "little")


def test_the_arena_never_holds_more_memory_than_its_capacity() -> None:
    store = MemoryStore(16 * MIB)
    for turn, size in enumerate((64 << 10, 5 * MIB, 300_000, 15 * MIB, 4096, MIB)):
        room = (16 * MIB - store.used) // (-(-size // 4096) * 4096)
        for number in range(room):
            filled(store, f"{turn}.{number}", size, number)
            assert physical(store) <= 16 * MIB
        with pytest.raises(StoreFull):
            store.reserve("more", size)
        for each in list(store.scan()):
            if turn > 0 or not each.name.endswith("50"):  # a few of the first stay, spread over everything
                store.delete(each.name)
    assert physical(store) <= 16 * MIB


def wait_until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_memory_is_ready_before_it_is_written_and_as_long_as_the_arena_grows() -> None:
    store = MemoryStore(64 * MIB, ready=16 * MIB)
    wait_until(lambda: physical(store) == 16 * MIB)
    assert store.used == 0
    for number in range(7):
        filled(store, f"object{number}", MIB, number)
    assert physical(store) == 16 * MIB  # more than half of it is left
    filled(store, "object7", 2 * MIB, 7)
    wait_until(lambda: physical(store) == 26 * MIB)
    for number in range(8, 63):
        filled(store, f"object{number}", MIB, number)
    wait_until(lambda: store._filler is None)
    assert store.used == physical(store) == 64 * MIB
    assert all(read(store, f"object{n}") == random.Random(n).randbytes(MIB) for n in range(7))
    store.close()


def test_who_needs_the_whole_arena_gets_it_while_memory_is_made_ready() -> None:
    for _ in range(20):
        store = MemoryStore(8 * MIB, ready=8 * MIB)
        filled(store, "object", 8 * MIB, 0)
        assert store.used == 8 * MIB
        wait_until(lambda store=store: store._filler is None)  # type: ignore[misc]
        assert physical(store) == 8 * MIB
        store.close()


def test_a_store_is_closed_while_memory_is_made_ready() -> None:
    for _ in range(20):
        MemoryStore(256 * MIB, ready=128 * MIB).close()
    wait_until(lambda: all(each.name != "retain-memory-ready" for each in threading.enumerate()))


@pytest.mark.parametrize("capacity", [0, 1, 4095])
def test_a_store_of_less_than_a_page_takes_empty_objects_only(capacity: int) -> None:
    store = MemoryStore(capacity)
    store.write("empty", [])
    with pytest.raises(StoreFull):
        store.write("object", [b"x"])
    assert [each.name for each in store.scan()] == ["empty"]
    store.close()


def test_a_capacity_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        MemoryStore(-1)
    with pytest.raises(StoreUnavailable, match="no arena"):
        MemoryStore(1 << 62)


def test_a23_an_object_larger_than_any_default_is_kept_or_refused_in_words() -> None:
    size = 300 * MIB
    store = MemoryStore(size)
    place = store.reserve("object", size)
    place[0], place[-1] = 1, 2
    store.commit("object")
    view = store.view("object")
    assert view is not None
    assert (view.nbytes, view[0], view[-1]) == (size, 1, 2)
    with pytest.raises(StoreFull):
        store.reserve("other", 1)


# processes


def test_another_process_can_map_the_arena() -> None:
    store = MemoryStore(MIB)
    store.write("object", [b"shared"])
    assert store.fd is not None
    fd = os.dup(store.fd)
    pid = os.fork()
    if pid == 0:
        try:
            with mmap.mmap(fd, MIB, prot=mmap.PROT_READ) as seen:
                os._exit(0 if seen[:6] == b"shared" else 1)
        finally:
            os._exit(2)
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_process_is_told_to_open_a_store_of_its_own() -> None:
    store = MemoryStore(MIB)
    store.write("object", [b"data"])
    pid = os.fork()
    if pid == 0:
        try:
            store.write("other", [b"x" * 100])
        except StoreUnavailable:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [each.name for each in store.scan()] == ["object"]


def test_the_span_is_what_the_arena_maps() -> None:
    store = MemoryStore(MIB)
    assert store.fd is not None
    assert os.fstat(store.fd).st_size == memory.SPAN * MIB
    assert physical(store) == 0
