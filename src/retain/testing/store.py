"""The conformance suite of stores: subclass `StoreConformance`, say how your store is made, and run pytest.

    from retain.testing.store import StoreConformance

    class TestMyStore(StoreConformance):
        persistent = True

        def make_store(self, directory):
            return MyStore(directory / "objects")

Every test makes a store of its own; `directory` is an empty folder for it (a remote store would make a bucket
or a prefix of a random name instead). The suite needs the packages pytest and hypothesis.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from retain.errors import StoreFull, StoreUnavailable
from retain.stores.base import Buffer, DeletesMany, Store, check_name

GOOD_NAMES = (
    "a",
    "Z9",
    "a.b_c-d",
    "a..b",
    "0" * 250,
    "ab",
    "abc.tmp",
    "lock",
    "con.lock",
    "ab.0123",
    "a.b.c.d",
)
BAD_NAMES = (
    "", ".", "..", ".hidden", "-a", "_a", "a/b", "../a", "/a", "ab/../../c", "a\\b", "a b", "a\n", "a\0b",
    "é", "a²", "٣", "0" * 251,
)  # fmt: skip


class StoreConformance:
    """What every store must do. Override `make_store`; set the attributes where the defaults do not fit."""

    persistent = False
    """Whether a store made again for the same directory, after `close`, finds what was there."""

    largest = 40 << 20
    """The size in bytes of the largest object that the suite writes."""

    examples = 40
    """Runs of the comparison with a model."""

    race_seconds = 1.0
    """How long threads race for one object."""

    def make_store(self, directory: Path) -> Store:
        """A new, empty store; or, where `persistent`, one with what `directory` holds. Takes 3 * `largest`
        bytes."""
        raise NotImplementedError("a subclass of StoreConformance says how its store is made")

    def make_small_store(self, directory: Path, capacity: int) -> Store:
        """A store that has room for about `capacity` bytes (at least half and at most twice of it)."""
        pytest.skip("this store has no limit of its own")

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(tmp_path)
        yield store
        store.close()

    # what is written comes back

    def test_it_has_the_methods_of_a_store_and_a_kind(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.kind
        assert store.kind.isidentifier()

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (1 << 20) + 3])
    def test_an_object_comes_back_whole(self, store: Store, size: int) -> None:
        data = _bytes(size, seed=size)
        store.write("object", [data])
        assert store.size("object") == size
        assert read(store, "object") == data

    def test_the_largest_object_comes_back_whole(self, store: Store) -> None:
        data = _bytes(self.largest, seed=1)
        store.write("large", [data])
        assert store.size("large") == self.largest
        assert read(store, "large") == data

    def test_chunks_of_every_kind_are_joined_in_order(self, store: Store) -> None:
        numbers = memoryview(bytearray(range(64))).cast("I")
        table = memoryview(bytes(range(24))).cast("B", [2, 3, 4])
        chunks: list[Buffer] = [
            b"",
            b"one",
            bytearray(b"two"),
            memoryview(b"xthreex")[1:6],
            numbers,
            b"",
            table,
        ]
        store.write("object", chunks)
        assert read(store, "object") == b"onetwothree" + bytes(range(64)) + bytes(range(24))

    def test_thousands_of_chunks_are_joined_in_order(self, store: Store) -> None:
        chunks = [bytes([n % 251]) * (n % 7) for n in range(5000)]
        store.write("object", chunks)
        assert read(store, "object") == b"".join(chunks)

    def test_the_writer_may_change_its_buffer_after_the_call(self, store: Store) -> None:
        data = bytearray(_bytes(100_000, seed=2))
        before = bytes(data)
        store.write("object", [data])
        data[:] = b"\0" * len(data)
        assert read(store, "object") == before

    # reading

    def test_no_object_is_no_bytes(self, store: Store) -> None:
        buffer = bytearray(b"untouched")
        assert store.read_into("nothing", memoryview(buffer)) == 0
        assert buffer == b"untouched"
        assert store.size("nothing") is None
        assert store.delete("nothing") is False
        assert list(store.scan()) == []

    @pytest.mark.parametrize("size", [1, 10_000, 300_000])
    def test_reads_at_offsets_give_that_part(self, store: Store, size: int) -> None:
        data = _bytes(size, seed=3)
        store.write("object", [data])
        for offset in (0, 1, size // 2, size - 1, size, size + 1, 2**40):
            for length in (0, 1, size // 3, size, size + 100):
                buffer = bytearray(b"\xaa" * length)
                got = store.read_into("object", memoryview(buffer), offset)
                assert buffer[:got] == data[offset : offset + length]
                assert got == len(data[offset : offset + length])
                assert buffer[got:] == b"\xaa" * (length - got)

    def test_a_negative_offset_is_refused(self, store: Store) -> None:
        store.write("object", [b"12345678"])
        with pytest.raises(ValueError, match="offset"):
            store.read_into("object", memoryview(bytearray(4)), -4)

    def test_a_part_of_a_buffer_is_filled_and_the_rest_left_alone(self, store: Store) -> None:
        store.write("object", [b"12345678"])
        buffer = bytearray(b"." * 10)
        assert store.read_into("object", memoryview(buffer)[2:6]) == 4
        assert buffer == b"..1234...."

    # replacing, deleting, listing

    def test_a_write_replaces_whatever_the_sizes(self, store: Store) -> None:
        for seed, size in enumerate((10_000, 20, 0, 300_000, 299_999)):
            store.write("object", [_bytes(size, seed)])
            assert read(store, "object") == _bytes(size, seed)
            assert [(each.name, each.size) for each in store.scan()] == [("object", size)]

    def test_a_write_that_fails_leaves_the_old_object(self, store: Store) -> None:
        store.write("object", [b"old"])
        broken: list[Any] = [b"new", "a text is no buffer"]
        with pytest.raises(TypeError):
            store.write("object", broken)
        assert read(store, "object") == b"old"
        with pytest.raises(TypeError):
            store.write("other", broken)
        assert store.size("other") is None

    def test_a_deleted_object_is_gone(self, store: Store) -> None:
        store.write("object", [b"data"])
        store.write("objects", [b"other"])
        assert store.delete("object") is True
        assert store.delete("object") is False
        assert store.size("object") is None
        assert store.read_into("object", memoryview(bytearray(4))) == 0
        assert [each.name for each in store.scan()] == ["objects"]
        store.write("object", [b"again"])
        assert read(store, "object") == b"again"

    def test_many_objects_are_deleted_at_a_time(self, store: Store) -> None:
        if not isinstance(store, DeletesMany):
            pytest.skip("this store deletes one object at a time")
        names = [f"object{number}" for number in range(150)]
        for name in names:
            store.write(name, [b"data"])
        assert store.delete_many([]) == []
        assert store.delete_many(names[:140]) == [True] * 140
        assert len(store.delete_many(["nothing", names[140]])) == 2
        assert sorted(each.name for each in store.scan()) == sorted(names[141:])
        with pytest.raises(ValueError, match="name"):
            store.delete_many(["../a"])

    def test_a_scan_tells_names_sizes_and_times(self, store: Store) -> None:
        started = time.time()
        for number in range(50):
            store.write(f"{number}.object", [b"x" * number])
        found = {each.name: each for each in store.scan()}
        assert {name: each.size for name, each in found.items()} == {f"{n}.object": n for n in range(50)}
        assert all(started - 5 <= each.modified <= time.time() + 5 for each in found.values())

    def test_objects_may_come_and_go_during_a_scan(self, store: Store) -> None:
        names = {f"kept{number}" for number in range(20)}
        for name in names:
            store.write(name, [b"x"])
            store.write(f"gone-{name}", [b"x"])
        seen = set()
        for each in store.scan():
            seen.add(each.name)
            store.delete(f"gone-{each.name}")
            store.write("new", [b"y"])
        assert names <= seen

    # names

    @pytest.mark.parametrize("name", GOOD_NAMES)
    def test_a_valid_name_is_taken(self, store: Store, name: str) -> None:
        check_name(name)
        store.write(name, [name.encode()])
        assert read(store, name) == name.encode()
        assert [each.name for each in store.scan()] == [name]
        assert store.delete(name)

    def test_names_that_differ_little_are_different_objects(self, store: Store) -> None:
        names = ["a", "a.", "a-", "a_", "aa", "a.a", "a.tmp", "ab", "abc", "ab.c"]
        for name in names:
            store.write(name, [name.encode()])
        assert {name: read(store, name) for name in names} == {name: name.encode() for name in names}
        assert sorted(each.name for each in store.scan()) == sorted(names)

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_an_invalid_name_is_refused_by_every_call(self, store: Store, name: str) -> None:
        for call in _calls(store, name):
            with pytest.raises(ValueError, match="object name"):
                call()
        assert list(store.scan()) == []

    # the end

    def test_calls_after_close_say_that_the_store_is_unavailable(self, store: Store) -> None:
        store.write("object", [b"data"])
        store.close()
        store.close()
        for call in _calls(store, "object"):
            with pytest.raises(StoreUnavailable):
                call()
        with pytest.raises(StoreUnavailable):
            list(store.scan())

    def test_a_store_made_again_finds_what_was_there(self, tmp_path: Path) -> None:
        if not self.persistent:
            pytest.skip("this store keeps nothing beyond its close")
        first = self.make_store(tmp_path)
        first.write("object", [b"data"])
        first.write("deleted", [b"data"])
        first.delete("deleted")
        first.close()
        again = self.make_store(tmp_path)
        try:
            assert read(again, "object") == b"data"
            assert [(each.name, each.size) for each in again.scan()] == [("object", 4)]
        finally:
            again.close()

    # a full store

    def test_a_full_store_says_so_and_keeps_what_it_has(self, tmp_path: Path) -> None:
        store = self.make_small_store(tmp_path, 4 << 20)
        try:
            kept: dict[str, bytes] = {}
            for number in range(1000):
                data = _bytes(100_000, seed=number)
                try:
                    store.write(f"object{number}", [data[:50_000], data[50_000:]])
                except StoreFull:
                    break
                kept[f"object{number}"] = data
            assert 2 << 20 <= len(kept) * 100_000 <= 8 << 20
            with pytest.raises(StoreFull):
                store.write("object0", [_bytes(16 << 20, seed=5)])
            assert {each.name: each.size for each in store.scan()} == dict.fromkeys(kept, 100_000)
            assert all(read(store, name) == data for name, data in kept.items())
            store.delete("object0")
            store.write("smaller", [b"x" * 50_000])
            assert read(store, "smaller") == b"x" * 50_000
        finally:
            store.close()

    def test_a_store_refuses_an_object_larger_than_itself(self, tmp_path: Path) -> None:
        store = self.make_small_store(tmp_path, 1 << 20)
        try:
            with pytest.raises(StoreFull):
                store.write("object", [_bytes(8 << 20, seed=6)])
            assert store.size("object") is None
            assert list(store.scan()) == []
            store.write("object", [b"x" * 300_000])
            assert store.size("object") == 300_000
        finally:
            store.close()

    # several threads

    def test_readers_see_the_old_bytes_or_the_new_never_a_mixture(self, store: Store) -> None:
        def version(number: int) -> bytes:
            return bytes([number]) * (200_000 + 4096 * number)

        def write(turn: random.Random) -> None:
            number = turn.randrange(40)
            store.write("object", [version(number)[:1000], version(number)[1000:]])

        def replace(turn: random.Random) -> None:
            store.delete("object")
            store.write(f"other{turn.randrange(4)}", [b"\xff" * turn.randrange(1, 400_000)])

        def look(_: random.Random) -> None:
            buffer = bytearray(400_000)
            got = store.read_into("object", memoryview(buffer))
            if got:
                seen = buffer[:got]
                assert seen == version(seen[0]), f"{got} bytes of a mixture"

        _race([write, write, replace, look, look, look], self.race_seconds)

    def test_parts_read_by_one_call_are_of_one_version(self, store: Store) -> None:
        def write(turn: random.Random) -> None:
            store.write("object", [bytes([turn.randrange(256)]) * 300_000])

        def look(turn: random.Random) -> None:
            buffer = bytearray(100_000)
            got = store.read_into("object", memoryview(buffer), turn.randrange(200_000))
            assert got in (0, len(buffer))
            assert buffer.count(buffer[0]) == len(buffer)

        _race([write, write, look, look], self.race_seconds)

    def test_many_writers_lose_nothing(self, store: Store) -> None:
        def write(writer: int) -> None:
            for number in range(40):
                store.write(f"w{writer}.{number}", [bytes([writer]) * (number * 1000)])
                if number % 3 == 0:
                    store.delete(f"w{writer}.{number}")

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        expected = {f"w{w}.{n}": n * 1000 for w in range(6) for n in range(40) if n % 3}
        assert {each.name: each.size for each in store.scan()} == expected
        assert all(read(store, f"w{w}.{n}") == bytes([w]) * (n * 1000) for w in range(6) for n in (1, 2, 38))

    # any sequence of calls

    def test_any_sequence_of_calls_agrees_with_a_model(self, tmp_path: Path) -> None:
        numbers = iter(range(1_000_000))

        def directory() -> Path:
            path = tmp_path / str(next(numbers))
            path.mkdir()
            return path

        make, persistent = self.make_store, self.persistent

        class Run(Comparison):
            def __init__(self) -> None:
                super().__init__(make, directory(), persistent=persistent)

        stateful.run_state_machine_as_test(
            Run, settings=settings(max_examples=self.examples, stateful_step_count=30, deadline=None)
        )


names = st.sampled_from(["a", "ab", "abc", "abd", "b.c-d_e"])


class Comparison(stateful.RuleBasedStateMachine):
    """A store beside a dictionary: both are asked the same."""

    def __init__(self, make: Callable[[Path], Store], directory: Path, *, persistent: bool) -> None:
        super().__init__()
        self._make = make
        self._directory = directory
        self._persistent = persistent
        self._store = make(directory)
        self._model: dict[str, bytes] = {}

    @stateful.rule(
        name=names, chunks=st.lists(st.binary(max_size=64), max_size=4), times=st.sampled_from([1, 1, 999])
    )
    def write(self, name: str, chunks: list[bytes], times: int) -> None:
        self._store.write(name, chunks * times)
        self._model[name] = b"".join(chunks * times)

    @stateful.rule(name=names, offset=st.integers(0, 300), length=st.integers(0, 300))
    def read(self, name: str, offset: int, length: int) -> None:
        buffer = bytearray(length)
        got = self._store.read_into(name, memoryview(buffer), offset)
        assert bytes(buffer[:got]) == self._model.get(name, b"")[offset : offset + length]

    @stateful.rule(name=names)
    def delete(self, name: str) -> None:
        assert self._store.delete(name) is (self._model.pop(name, None) is not None)

    @stateful.precondition(lambda self: self._persistent)
    @stateful.rule()
    def reopen(self) -> None:
        self._store.close()
        self._store = self._make(self._directory)

    @stateful.invariant()
    def the_same_objects_are_there(self) -> None:
        assert {each.name: each.size for each in self._store.scan()} == {
            name: len(data) for name, data in self._model.items()
        }
        for name, data in self._model.items():
            assert self._store.size(name) == len(data)
            assert read(self._store, name) == data

    def teardown(self) -> None:
        self._store.close()


def read(store: Store, name: str) -> bytes | None:
    """The whole of object `name`, None if it is not there."""
    size = store.size(name)
    if size is None:
        return None
    buffer = bytearray(size)
    got = store.read_into(name, memoryview(buffer))
    assert got == size, f"{got} bytes of {name} were read where its size is {size}"
    return bytes(buffer)


def _bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def _calls(store: Store, name: str) -> list[Callable[[], object]]:
    return [
        lambda: store.write(name, [b"data"]),
        lambda: store.read_into(name, memoryview(bytearray(4))),
        lambda: store.size(name),
        lambda: store.delete(name),
    ]


def _race(turns: list[Callable[[random.Random], None]], seconds: float) -> None:
    """Repeat every function in a thread of its own for a while; raise what the first of them raised."""
    failures: list[BaseException] = []
    done = time.monotonic() + seconds

    def run(number: int, turn: Callable[[random.Random], None]) -> None:
        chance = random.Random(number)
        try:
            while time.monotonic() < done and not failures:
                turn(chance)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(turns)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive(), "a call hangs"
    if failures:
        raise failures[0]
