"""Reads and writes past the page cache: where they pay, and never another object's bytes or a part of one."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from retain.bench.files import forget
from retain.errors import StoreFull
from retain.stores import direct
from retain.stores.disk import DiskStore

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")


@pytest.fixture
def aligned() -> Iterator[memoryview]:
    with mmap.mmap(-1, 2 << 20) as area, memoryview(area) as view:
        yield view


@pytest.mark.parametrize("size", [direct.LEAST_BYTES, direct.LEAST_BYTES + 1, 1_000_003])
@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_a_cold_object_is_read_whole_whatever_its_size(
    tmp_path: Path, aligned: memoryview, size: int, offset: int
) -> None:
    data = os.urandom(size + offset)
    store = DiskStore(tmp_path)
    store.pays_directly(60)
    store._direct = direct.Pays(reads=True)  # whatever pays on this machine
    store.write("a", [data])
    forget(store.file_of("a"))
    assert store.read_into("a", aligned[: size + 100], offset) == size
    assert aligned[:size] == data[offset:]
    assert store.read_into("a", aligned[7 : size + 7], offset) == size, "memory that is not aligned"
    assert aligned[7 : size + 7] == data[offset:]
    store.close()


@pytest.mark.parametrize("size", [direct.LEAST_BYTES - 1, direct.LEAST_BYTES, 1_000_003])
@pytest.mark.parametrize("start", [0, 7])
def test_an_object_is_written_whole_whatever_its_size_and_place(
    tmp_path: Path, aligned: memoryview, size: int, start: int
) -> None:
    store = DiskStore(tmp_path)
    store.pays_directly(60)
    store._direct = direct.Pays(writes=True)
    aligned[: size + start] = data = os.urandom(size + start)
    store.write("a", [aligned[start : size + start]])
    store.write("b", [aligned[start : size + start], b"more", aligned[:1]])
    assert store.file_of("a").read_bytes() == data[start:]
    assert store.file_of("b").read_bytes() == data[start:] + b"more" + data[:1]
    store.close()


def test_a_direct_write_leaves_the_page_cache_alone(tmp_path: Path, aligned: memoryview) -> None:
    store = DiskStore(tmp_path)
    if not store.pays_directly(60).writes:
        pytest.skip("direct writes do not pay here")
    store.write("a", [aligned[: 1 << 20]])
    with store.opened("a") as file:
        assert file is not None
        assert not direct.is_cached(file, 0)
    store.close()


def test_a_full_disk_is_told_and_not_taken_for_a_refusal(
    tmp_path: Path, aligned: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = DiskStore(tmp_path)
    store.pays_directly(60)
    store._direct = direct.Pays(writes=True)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreFull):
        store.write("a", [aligned])
    assert [each.suffix for each in (tmp_path / ".writing").iterdir()] == [".lock"]
    store.close()


def test_what_cannot_be_read_directly_is_left_to_others(tmp_path: Path, aligned: memoryview) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(10_000))
    file = os.open(path, os.O_RDONLY)
    try:
        assert direct.read(file, aligned[:100], 0) == 0
        assert direct.read(file, aligned[:8192], 1) == 0
    finally:
        os.close(file)


def test_nothing_is_read_directly_where_files_are_in_memory_anyway(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no tmpfs here")
    folder = Path("/dev/shm") / f"retain-test-{os.getpid()}"
    store = DiskStore(folder)
    try:
        assert store.pays_directly(60) == direct.Pays()
    finally:
        store.close()
        for each in (folder / ".writing", folder):
            each.rmdir()


def test_the_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.pays_directly(60)
    assert [each.suffix for each in (tmp_path / ".writing").iterdir()] == [".lock"]
    store.close()
