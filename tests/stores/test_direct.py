"""Reads past the page cache: used where they pay, and never another object's bytes or a part of one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from retain.bench.files import forget
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
    store.reads_directly(60)
    store._direct = True  # whatever pays on this machine
    store.write("a", [data])
    forget(store.file_of("a"))
    assert store.read_into("a", aligned[: size + 100], offset) == size
    assert aligned[:size] == data[offset:]
    assert store.read_into("a", aligned[7 : size + 7], offset) == size, "memory that is not aligned"
    assert aligned[7 : size + 7] == data[offset:]
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
        assert not store.reads_directly(60)
    finally:
        store.close()
        for each in (folder / ".writing", folder):
            each.rmdir()


def test_the_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.reads_directly(60)
    assert [each.suffix for each in (tmp_path / ".writing").iterdir()] == [".lock"]
    store.close()
