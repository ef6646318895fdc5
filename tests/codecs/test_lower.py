"""Lower levels are cut from an object's leading bytes, and raised again with the bytes that follow."""

from __future__ import annotations

import numpy as np
import pytest

from retain.block import decode, open_object
from retain.codecs import codec
from retain.codecs.ladder import codec as ladder
from retain.codecs.ladder.levels import LEVELS
from retain.errors import InvalidObject
from retain.header import parse_frame
from retain.lower import leading_bytes, lowered, missing_range, raised

from .profiles import GEOMETRIES, block_like, profile_like, spec_of

SPEC = spec_of(GEOMETRIES["gqa"])


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = profile_like(SPEC)
    monkeypatch.setattr(ladder, "profile_for", lambda kin: made)
    monkeypatch.setattr(ladder, "profile_of", lambda digest: made)


def stored(level: str, first: int = 0) -> memoryview:
    return memoryview(b"".join(block_like(SPEC, 64, first).encode(codec(level))))


@pytest.mark.parametrize("first", [0, 64])
@pytest.mark.parametrize("level", LEVELS[:-1])
def test_the_first_bytes_of_an_object_make_an_object_of_a_lower_level(level: str, first: int) -> None:
    whole = stored("fine", first)
    frame = parse_frame(whole)
    size = leading_bytes(frame, level)
    assert size < len(whole)
    cut = memoryview(b"".join(lowered(whole[:size], level)))
    below, _ = open_object(cut)
    assert below.header.codec == level
    assert below.header.name == frame.header.name.replace(".fine", f".{level}")
    assert cut == memoryview(b"".join(lowered(memoryview(b"".join(lowered(whole, "near"))), level)))
    block = decode(cut)
    direct = decode(stored(level, first))
    for name, array in block.arrays.items():
        assert np.abs(array - direct.arrays[name]).max() <= np.abs(direct.arrays[name]).max()
    for short in (whole[: size - 1], whole[: frame.data_start], whole[:20], whole[:0]):
        with pytest.raises(InvalidObject):
            lowered(short, level)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_what_follows_raises_a_lower_level_to_the_very_object(level: str) -> None:
    whole = stored("fine")
    low = memoryview(b"".join(lowered(whole, level)))
    higher, below = parse_frame(whole), parse_frame(low)
    start, stop = missing_range(higher, below)
    assert raised(whole[: higher.data_start], low, whole[start:stop]) == whole
    with pytest.raises(InvalidObject):
        raised(whole[: higher.data_start], low, whole[start : stop - 1])
    spoilt = bytearray(whole[start:stop])
    spoilt[len(spoilt) // 2] ^= 1
    with pytest.raises(InvalidObject, match="damaged"):
        raised(whole[: higher.data_start], low, memoryview(spoilt))
    other = memoryview(b"".join(lowered(stored("fine", 64), level)))
    with pytest.raises(ValueError, match="not levels of one encoding"):
        raised(whole[: higher.data_start], other, whole[start:stop])


def test_damaged_leading_bytes_make_no_object() -> None:
    whole = stored("near")
    frame = parse_frame(whole)
    for at in range(frame.data_start, leading_bytes(frame, "tiny"), 997):
        spoilt = bytearray(whole)
        spoilt[at] ^= 4
        with pytest.raises(InvalidObject):
            lowered(memoryview(spoilt), "tiny")


def test_there_is_nothing_above_an_object_and_no_level_in_others() -> None:
    with pytest.raises(ValueError, match="no level"):
        lowered(stored("balanced"), "near")
    with pytest.raises(ValueError, match="no level"):
        lowered(stored("lossless"), "tiny")


def test_a_block_coded_without_a_profile_serves_as_every_lower_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "profile_for", lambda kin: None)
    whole = stored("near")
    cut = memoryview(b"".join(lowered(whole, "tiny")))
    assert parse_frame(cut).header.codec == "tiny"
    here, there = decode(cut), decode(whole)
    assert all(np.array_equal(here.arrays[n], there.arrays[n]) for n in here.arrays)
