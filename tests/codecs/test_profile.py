"""A profile's file: it comes back as it was, and one that contradicts itself is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.codecs.ladder.profile import Part, Profile, Segment
from retain.errors import InvalidProfile

from .profiles import GEOMETRIES, profile_like, spec_of

SPEC = spec_of(GEOMETRIES["gqa"])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_file_gives_back_the_profile_with_the_same_digest(name: str) -> None:
    profile = replace(profile_like(spec_of(GEOMETRIES[name])), declared={"near": (1e-4, 3.5)})
    data = profile.to_bytes()
    found = Profile.from_bytes(data)
    assert found.digest == profile.digest
    assert found.to_bytes() == data
    assert found.declared == {"near": (1e-4, 3.5)}
    assert found.layers == profile.layers


def test_other_content_has_another_digest() -> None:
    profile = profile_like(SPEC)
    assert replace(profile, step=0.021).digest != profile.digest


@settings(deadline=None, max_examples=60)
@given(at=st.integers(0, 1 << 20), change=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_refused_or_is_another_profile(at: int, change: int, cut: bool) -> None:
    profile = profile_like(SPEC)
    data = bytearray(profile.to_bytes())
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] ^= change
    try:
        found = Profile.from_bytes(bytes(data))
    except InvalidProfile:
        return
    assert found.digest != profile.digest


def changed(part: int = 0, **fields) -> Profile:
    profile = profile_like(SPEC)
    parts = list(profile.parts)
    parts[part] = replace(parts[part], **fields)
    return replace(profile, parts=tuple(parts))


@pytest.mark.parametrize(
    "fields",
    [
        {"basis": np.zeros((4, 4), np.float16)},
        {"mean": np.zeros(7, np.float32)},
        {"segments": (Segment("k", 0, 9),)},
        {"segments": (Segment("k", 2, 3), Segment("v", 0, 2))},
        {"segments": (Segment("x", 0, 2),)},
        {"center": float("nan")},
        {"probe": np.zeros((1, 2, 3), np.float32)},
        {"predicted": np.zeros((3, 3), np.float16)},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_the_model_are_refused(fields: dict) -> None:
    with pytest.raises(InvalidProfile):
        changed(**fields)


def test_numbers_that_nothing_can_be_divided_by_are_refused() -> None:
    part: Part = profile_like(SPEC).parts[0]
    for name, value in (("weight", 0.0), ("weight", -1.0), ("weight", np.inf), ("mean", np.nan)):
        array = getattr(part, name).copy()
        array[3] = value
        with pytest.raises(InvalidProfile):
            changed(**{name: array})
    classes = part.classes.copy()
    classes[0] = 40
    with pytest.raises(InvalidProfile, match="classes"):
        changed(classes=classes)
    for step in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidProfile, match="step"):
            replace(profile_like(SPEC), step=step)


def test_layers_that_no_part_covers_are_noticed() -> None:
    profile = profile_like(SPEC)
    with pytest.raises(InvalidProfile, match="cover"):
        replace(profile, parts=profile.parts[:-1])
    with pytest.raises(InvalidProfile, match="not its own"):
        replace(profile, parts=(*profile.parts, profile.parts[0]))


def test_hostile_heads_are_refused_before_anything_is_allocated() -> None:
    def file(document: object) -> bytes:
        text = json.dumps(document).encode()
        return struct.pack("<Q", len(text)) + text

    tensor = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}
    for data in (
        b"",
        b"\xff" * 8,
        b"\xff" * 64,
        struct.pack("<Q", 1 << 40),
        file([]),
        file({"__metadata__": {}}),
        file({"__metadata__": {"format": "retain-profile/1"}, "a": tensor}),
        file({"__metadata__": {"format": "retain-profile/1"}, "a": {**tensor, "shape": [-1]}}),
    ):
        with pytest.raises(InvalidProfile):
            Profile.from_bytes(data)
