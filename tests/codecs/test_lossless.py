"""lossless: every bit pattern comes back, objects of earlier versions are read, damage is noticed."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.block import Block, decode
from retain.codecs import codec, exponents
from retain.codecs.base import container
from retain.errors import InvalidObject
from retain.model import DTYPES

from .profiles import GEOMETRIES, block_like, spec_of

LOSSLESS = codec("lossless")


def spec(dtype: str):
    return spec_of(GEOMETRIES["gqa"], dtype)


def any_bits(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{container(dtype).itemsize}")
    return random.integers(0, 1 << 8 * unsigned.itemsize, shape, unsigned, endpoint=False).view(
        container(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=12)
@given(count=st.integers(1, 70), seed=st.integers(0, 99), like_a_model=st.booleans())
def test_every_bit_pattern_comes_back(dtype: str, count: int, seed: int, like_a_model: bool) -> None:
    block = block_like(spec(dtype), count, 0, seed)
    if not like_a_model:
        arrays = {n: any_bits(dtype, a.shape, seed) for n, a in block.arrays.items()}
        block = replace(block, arrays=arrays)
    back = decode(memoryview(b"".join(block.encode(LOSSLESS))))
    assert all(back.arrays[n].tobytes() == a.tobytes() for n, a in block.arrays.items())
    assert back.header.fidelity == "exact"


@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, 1e-45, 3.0])
def test_arrays_of_one_value_come_back(value: float) -> None:
    block = block_like(spec("float32"), 20)
    for array in block.arrays.values():
        array[:, :, 3:] = value
    back = decode(memoryview(b"".join(block.encode(LOSSLESS))))
    assert all(back.arrays[n].tobytes() == a.tobytes() for n, a in block.arrays.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_objects_of_byte_planes_are_still_read(dtype: str) -> None:
    block = block_like(spec(dtype), 24)
    width = container(dtype).itemsize
    streams = {}
    for name, array in block.arrays.items():
        numbers = array.view(f"u{width}").ravel()
        turned = ((numbers << 1) | (numbers >> (8 * width - 1))).view(np.uint8).reshape(-1, width)
        for rank in range(width):
            plane = zstandard.ZstdCompressor(level=3).compress(turned[:, rank].tobytes())
            streams[f"{name}.plane{rank}"] = np.frombuffer(plane, np.uint8)
    header = replace(block.header, codec="lossless", parameters="")
    out = {n: np.empty_like(a) for n, a in block.arrays.items()}
    LOSSLESS.decode(streams, block.tokens, header, out)
    assert all(out[n].tobytes() == a.tobytes() for n, a in block.arrays.items())
    for bad in (b"", b"garbage", zstandard.compress(b"x" * 10), zstandard.compress(b"x" * 10**6)):
        damaged = streams | {"k.plane0": np.frombuffer(bad, np.uint8)}
        with pytest.raises(InvalidObject):
            LOSSLESS.decode(damaged, block.tokens, header, out)
    del streams["k.plane0"]
    with pytest.raises(InvalidObject):
        LOSSLESS.decode(streams, block.tokens, header, out)


def coded() -> tuple[Block, dict[str, np.ndarray]]:
    block = block_like(spec("bfloat16"), 24)
    return block, exponents.encode(block.arrays, "bfloat16")


def test_channels_that_are_all_alike_leave_tables_without_any() -> None:
    one = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    array = np.ascontiguousarray(np.broadcast_to(one[None, None, :, None], (8, 4, 256, 64)))
    streams = exponents.encode({"k": array}, "float32")
    out = np.empty_like(array)
    exponents.decode(streams, "float32", {"k": out})
    assert np.array_equal(out, array)


def test_streams_of_other_sizes_are_refused() -> None:
    block, streams = coded()
    out = {n: np.empty_like(a) for n, a in block.arrays.items()}
    for name, stream in streams.items():
        others = [stream[:-1], np.concatenate([stream, stream[:3]]), stream[:0]]
        if name.endswith("head"):
            others += [np.frombuffer(zstandard.compress(b"x" * size), np.uint8) for size in (9, 10**7)]
        for bad in others:
            with pytest.raises(InvalidObject):
                exponents.decode(streams | {name: bad}, "bfloat16", out)
        with pytest.raises(InvalidObject):
            exponents.decode({n: s for n, s in streams.items() if n != name}, "bfloat16", out)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_flipped_bits_never_end_otherwise_than_in_numbers_or_a_refusal(data: st.DataObject) -> None:
    block, streams = coded()
    name = data.draw(st.sampled_from(sorted(streams)))
    plain = bytearray(streams[name].tobytes())
    head = name.endswith("head")
    if head:
        plain = bytearray(zstandard.decompress(bytes(plain)))
    for _ in range(data.draw(st.integers(1, 4))):
        plain[data.draw(st.integers(0, len(plain) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    bad = zstandard.compress(bytes(plain)) if head else bytes(plain)
    out = {n: np.empty_like(a) for n, a in block.arrays.items()}
    with contextlib.suppress(InvalidObject):
        exponents.decode(streams | {name: np.frombuffer(bad, np.uint8)}, "bfloat16", out)
