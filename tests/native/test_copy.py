"""The native copy and populate take contiguous buffers and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from retain import _native


@pytest.mark.parametrize("size", [0, 1, 4097, (1 << 20) + 1])
def test_a_copy_is_equal(size: int) -> None:
    source = np.random.default_rng(size).bytes(size)
    target = bytearray(size)
    _native.copy(target, source)
    assert target == source


def test_overlapping_buffers_are_copied_as_if_by_way_of_a_third() -> None:
    data = bytearray(range(100))
    _native.copy(memoryview(data)[10:], memoryview(data)[:-10])
    assert data == bytearray([*range(10), *range(90)])


def test_unequal_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot copy 3 bytes into 4"):
        _native.copy(bytearray(4), b"abc")


def test_read_only_and_scattered_memory_is_refused() -> None:
    with pytest.raises(BufferError):
        _native.copy(b"abc", b"abc")
    with pytest.raises(BufferError):
        _native.copy(memoryview(bytearray(8))[::2], b"abcd")
    with pytest.raises(BufferError):
        _native.copy(bytearray(4), memoryview(b"abcdefgh")[::2])
    with pytest.raises(TypeError):
        _native.copy(bytearray(3), "abc")  # type: ignore[arg-type]


def test_populating_leaves_the_bytes_as_they_are() -> None:
    data = bytearray(range(256)) * 100
    before = bytes(data)
    _native.populate(data)
    assert data == before
    with pytest.raises(BufferError):
        _native.populate(b"abc")
