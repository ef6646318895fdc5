"""The ladder: every level of every geometry and dtype comes back within its bound, or is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.block import Block, cut, decode
from retain.codecs import codec
from retain.codecs.ladder import codec as ladder
from retain.codecs.ladder import coder, shelf
from retain.codecs.ladder.levels import LEVELS, multiple
from retain.codecs.ladder.measured import record
from retain.codecs.ladder.profile import Profile
from retain.codecs.ladder.quantise import Unencodable
from retain.codecs.ladder.rope import Rotation
from retain.codecs.ladder.transform import to_floats
from retain.errors import InvalidObject, MissingProfile, UnsupportedModel
from retain.model import DTYPES, LayerSpec, RopeSpec, Slice

from .profiles import GEOMETRIES, block_like, profile_like, spec_of, weighted_error

SMALL = spec_of(GEOMETRIES["gqa"])


@pytest.fixture(autouse=True)
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Profile]:
    """A shelf in memory, which is what a folder of files comes to."""
    here: list[Profile] = []

    def by_digest(digest: bytes) -> Profile:
        for each in here:
            if each.digest == digest:
                return each
        raise MissingProfile(f"the object needs the profile {digest.hex()[:16]}")

    monkeypatch.setattr(ladder, "profile_for", lambda kin: next((p for p in here if p.kin == kin), None))
    monkeypatch.setattr(ladder, "profile_of", by_digest)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return here


def stored(block: Block, level: str) -> memoryview:
    return memoryview(b"".join(block.encode(codec(level))))


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "apart"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a33_every_geometry_and_dtype_comes_back_within_half_a_step(
    name: str, dtype: str, joint: bool, profiles: list[Profile]
) -> None:
    spec = spec_of(GEOMETRIES[name], dtype)
    profile = profile_like(spec, joint)
    profiles.append(profile)
    for first, count in ((0, 40), (256, 64)):
        block = block_like(spec, count, first)
        for level in LEVELS:
            back = decode(stored(block, level))
            assert back.header.fidelity == "lossy"
            # The dtype's own rounding comes on top, in components as large as the weights make it.
            slack = {"float32": 0.05, "float16": 1.5, "bfloat16": 12}[dtype]
            # Step classes go down to -6: steps up to 8 times as large.
            assert weighted_error(profile, block, back) <= multiple(level) * 8 * 0.5 + slack
            sinks = max(0, profile.sinks - first)
            for array, numbers in block.arrays.items():
                assert np.array_equal(back.arrays[array][:, :, :sinks], numbers[:, :, :sinks])


@pytest.mark.parametrize("level", [*LEVELS, "int8"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a34_contexts_of_a_few_tokens_come_back_finite(
    level: str, count: int, profiles: list[Profile]
) -> None:
    profiles.append(profile_like(SMALL))
    for first in (0, 2, 16):
        block = block_like(SMALL, count, first)
        back = decode(stored(block, level))
        assert all(np.isfinite(array).all() for array in back.arrays.values())
        assert np.array_equal(back.tokens, block.tokens)


def test_each_level_is_the_start_of_every_higher_one(profiles: list[Profile]) -> None:
    profile = profile_like(SMALL)
    block = block_like(SMALL, 64)
    arguments = {"dtype": "float32", "first": 0}
    finest = coder.encode(profile, block.arrays, block.tokens, "fine", **arguments)
    sizes = []
    for level in LEVELS:
        streams = coder.encode(profile, block.arrays, block.tokens, level, **arguments)
        assert list(streams) == list(finest)[: len(streams)]
        out = {level: {n: np.empty_like(a) for n, a in block.arrays.items()} for level in ("own", "cut")}
        coder.decode(profile, streams, block.tokens, level, out["own"], **arguments)
        coder.decode(profile, finest, block.tokens, level, out["cut"], **arguments)
        sizes.append(sum(stream.size for stream in streams.values()))
        errors = [max(np.abs(o[n] - a).max() for n, a in block.arrays.items()) for o in out.values()]
        assert errors[1] <= errors[0] * 1.5
    assert sizes == sorted(sizes)


def test_a_finer_level_is_nearer(profiles: list[Profile]) -> None:
    profiles.append(profile_like(SMALL))
    block = block_like(SMALL, 64, 64)
    errors = []
    for level in LEVELS:
        back = decode(stored(block, level))
        errors.append(np.mean([(back.arrays[n] - a).std() for n, a in block.arrays.items()]))
    assert all(coarse > 2 * fine for coarse, fine in pairwise(errors))


def test_decoding_at_another_position_is_rotating_there(profiles: list[Profile]) -> None:
    profile = profile_like(SMALL)
    rotation = Rotation(SMALL.layers)
    for first, position in ((0, 100), (64, 7), (64, 64)):
        block = block_like(SMALL, 48, first)
        streams = coder.encode(profile, block.arrays, block.tokens, "fine", dtype="float32", first=first)
        here, there = ({n: np.empty_like(a) for n, a in block.arrays.items()} for _ in range(2))
        coder.decode(profile, streams, block.tokens, "fine", here, dtype="float32", first=first)
        coder.decode(
            profile, streams, block.tokens, "fine", there, dtype="float32", first=first, position=position
        )
        moved = rotation.apply(rotation.remove(here["k"], first), position)
        assert np.allclose(there["k"], moved, atol=2e-5)
        assert np.array_equal(there["v"], here["v"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("with_profile", [True, False])
def test_numbers_that_are_not_finite_or_too_large_come_back_bit_for_bit(
    bad: float, with_profile: bool, profiles: list[Profile]
) -> None:
    if with_profile:
        profiles.append(profile_like(SMALL))
    block = block_like(SMALL, 32, 32)
    block.arrays["v"][1, 0, 5, 3] = bad
    back = decode(stored(block, "balanced"))
    if with_profile or not np.isfinite(bad):
        assert back.arrays["v"].tobytes() == block.arrays["v"].tobytes()
        assert back.header.fidelity == "exact"


def test_without_a_profile_a_level_holds_int8(profiles: list[Profile]) -> None:
    block = block_like(SMALL, 64, 64)
    data = stored(block, "near")
    assert b'"parameters":"int8"' in bytes(data)
    back = decode(data)
    for name, array in block.arrays.items():
        unit = np.abs(array).max(axis=3, keepdims=True) / 127
        assert (np.abs(back.arrays[name] - array) <= 0.505 * unit).all()


def test_a_part_of_a_block_is_coded_without_the_profile(profiles: list[Profile]) -> None:
    profiles.append(profile_like(SMALL))
    part = cut(block_like(SMALL, 64), Slice(0, 3, 0, 1, 2))
    back = decode(stored(part, "balanced"))
    assert back.header.slice == part.header.slice
    assert b'"parameters":"int8"' in bytes(stored(part, "balanced"))


def test_an_object_whose_profile_is_missing_says_so(profiles: list[Profile]) -> None:
    profiles.append(profile_like(SMALL))
    data = stored(block_like(SMALL, 64), "near")
    digest = profiles.pop().digest
    with pytest.raises(MissingProfile, match=digest.hex()[:16]):
        decode(data)


def test_another_profile_than_the_header_names_is_never_used(profiles: list[Profile]) -> None:
    own, other = profile_like(SMALL), profile_like(SMALL, step=0.03)
    profiles.append(own)
    data = stored(block_like(SMALL, 64), "near")
    profiles[:] = [other]
    with pytest.raises(MissingProfile):
        decode(data)
    stranger = replace(other, layers=(*SMALL.layers[:2], replace(SMALL.layers[2], rope=RopeSpec(1e4, 16))))
    stranger.__dict__["digest"] = own.digest
    profiles[:] = [stranger]
    with pytest.raises(InvalidObject, match="other layers"):
        decode(data)


def test_a_level_that_was_switched_off_holds_int8(profiles: list[Profile]) -> None:
    profiles.append(profile_like(SMALL))
    record(SMALL.kin, "tiny", 256 * 0.1, 256)
    assert b'"parameters":"int8"' in bytes(stored(block_like(SMALL, 64), "tiny"))
    assert b'"parameters":"profile=' in bytes(stored(block_like(SMALL, 64), "balanced"))


@pytest.mark.parametrize("kind", ["latent", "state"])
def test_layers_whose_keys_cannot_be_freed_of_positions_are_refused_at_the_start(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        Rotation((LayerSpec(kind, 1, 16, 0),))
    with pytest.raises(UnsupportedModel, match="new-rule"):
        Rotation((LayerSpec("full", 1, 16, 16, None, RopeSpec(1e4, 16, "new-rule")),))


def test_a_model_that_no_profile_fits_is_still_kept_as_int8(profiles: list[Profile]) -> None:
    spec = spec_of((LayerSpec("latent", 1, 24, 8), LayerSpec("state", 1, 8, 0)), name="latent")
    block = block_like(spec, 32)
    back = decode(stored(block, "balanced"))
    assert np.abs(back.arrays["k.0"] - block.arrays["k.0"]).max() < 0.1


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_streams_damaged_in_any_way_are_refused_or_decode_to_the_right_shapes(data: st.DataObject) -> None:
    profile = profile_like(SMALL)
    block = block_like(SMALL, 48, 16)
    streams = coder.encode(profile, block.arrays, block.tokens, "near", dtype="float32", first=16)
    name = data.draw(st.sampled_from(sorted(streams)))
    stream = streams[name].copy()
    match data.draw(st.sampled_from(["cut", "flip", "swap", "grow", "noise"])):
        case "cut":
            stream = stream[: data.draw(st.integers(0, stream.size - 1))]
        case "flip":
            stream[data.draw(st.integers(0, stream.size - 1))] ^= data.draw(st.integers(1, 255))
        case "swap":
            stream = streams[data.draw(st.sampled_from(sorted(streams)))]
        case "grow":
            stream = np.concatenate([stream, stream[: data.draw(st.integers(1, 99))]])
        case "noise":
            stream = np.frombuffer(data.draw(st.binary(max_size=2000)), np.uint8)
    out = {n: np.full_like(a, np.nan) for n, a in block.arrays.items()}
    try:
        coder.decode(profile, streams | {name: stream}, block.tokens, "near", out, dtype="float32", first=16)
    except InvalidObject:
        return
    assert all(np.isfinite(array).all() for array in out.values())


def test_a_stream_cut_at_any_byte_is_refused() -> None:
    profile = profile_like(SMALL)
    block = block_like(SMALL, 20, 16)
    streams = coder.encode(profile, block.arrays, block.tokens, "balanced", dtype="float32", first=16)
    out = {n: np.empty_like(a) for n, a in block.arrays.items()}
    for name in ("tiny.0", "balanced.1"):
        for size in range(streams[name].size):
            damaged = streams | {name: streams[name][:size]}
            with pytest.raises(InvalidObject):
                coder.decode(profile, damaged, block.tokens, "balanced", out, dtype="float32", first=16)


def test_what_the_probe_does_not_say_can_be_told() -> None:
    profile = profile_like(SMALL)
    block = block_like(SMALL, 64, 64)
    sizes = []
    for importance in (-20.0, 0.0, 20.0):
        given = {index: np.full(64, importance, np.float32) for index in range(len(profile.parts))}
        streams = coder.encode(
            profile, block.arrays, block.tokens, "near", dtype="float32", first=64, importance=given
        )
        sizes.append(sum(stream.size for stream in streams.values()))
    assert sizes[0] < sizes[1] < sizes[2]


def test_too_large_numbers_are_unencodable_rather_than_wrong() -> None:
    profile = profile_like(SMALL)
    block = block_like(SMALL, 16, 16)
    block.arrays["k"][0, 0, 3] = 1e6
    with pytest.raises(Unencodable):
        coder.encode(profile, block.arrays, block.tokens, "tiny", dtype="float32", first=16)


def test_the_shelf_gives_back_what_was_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "folder", lambda: tmp_path)
    profile = profile_like(SMALL)
    shelf.keep(profile)
    found = shelf.profile_of(profile.digest)
    block = block_like(SMALL, 32, 32)
    out = {n: np.empty_like(a) for n, a in block.arrays.items()}
    streams = coder.encode(profile, block.arrays, block.tokens, "fine", dtype="float32", first=32)
    coder.decode(found, streams, block.tokens, "fine", out, dtype="float32", first=32)
    assert np.abs(to_floats(out["v"], "float32") - block.arrays["v"]).max() < 0.5
