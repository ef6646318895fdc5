"""Learning a profile: levels in their order, at what they promise, for every geometry and way to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retain.codecs.ladder import shelf
from retain.codecs.ladder.coder import decode, encode
from retain.codecs.ladder.levels import LEVELS
from retain.codecs.ladder.profile import Profile
from retain.errors import ConfigError, MissingProfile
from retain.fidelity import PROMISED
from retain.profile.gather import Sample, arrays_of, plan
from retain.profile.learn import group_for
from retain.profile.make import make
from retain.profile.measure import measure
from tests.profile.conftest import WIDTH, learned, text, tiny

pytestmark = pytest.mark.engine

NAMES = ("llama-gqa", "llama-mqa", "llama-head-80", "phi3-partial-rotary", "gemma3-window-32")


@pytest.mark.parametrize("name", NAMES)
def test_levels_keep_their_promises_on_a_text_that_was_not_learned_from(name: str) -> None:
    _, study = tiny(name)
    profile = learned(name)
    kv = study.context(text(99, 640))
    judge = study.reference(kv, text(98, 64))
    found = measure(
        profile, [(Sample(arrays_of(study.spec.layers, kv), text(99, 640), 0), judge)], lambda t, n: None
    )
    kls, bits = zip(*(found[level] for level in LEVELS), strict=True)
    assert list(kls) == sorted(kls, reverse=True)
    assert list(bits) == sorted(bits)
    for level in LEVELS:
        assert found[level][0] < 3 * PROMISED[level]
        assert profile.declared[level][0] < PROMISED[level]
    assert bits[LEVELS.index("balanced")] < 6


@pytest.mark.parametrize("name", ["llama-gqa", "phi3-partial-rotary"])
def test_blocks_anywhere_in_a_sequence_come_back_to_within_the_level(name: str) -> None:
    _, study = tiny(name)
    profile = learned(name)
    kv = study.context(text(50, 640))
    arrays = arrays_of(study.spec.layers, kv)
    for first, count in ((0, 3), (0, 256), (256, 100), (500, 1)):
        held = {each: array[:, :, first : first + count] for each, array in arrays.items()}
        tokens = text(50, 640)[first : first + count]
        errors = []
        for level in LEVELS:
            out = {each: np.empty_like(array) for each, array in held.items()}
            streams = encode(profile, held, tokens, level, dtype="float32", first=first)
            decode(profile, streams, tokens, level, out, dtype="float32", first=first)
            errors.append(max(float(np.abs(out[each] - held[each]).max()) for each in held))
            sinks = max(0, profile.sinks - first)
            assert all(np.array_equal(out[each][:, :, :sinks], held[each][:, :, :sinks]) for each in held)
        assert errors == sorted(errors, reverse=True)


def test_a_profile_learned_twice_is_the_same_and_comes_back_from_its_file(cache_folder: Path) -> None:
    profile = learned("llama-gqa")
    again = make(tiny("llama-gqa")[1], [text(seed) for seed in range(10)], WIDTH)
    assert again.digest == profile.digest
    path = shelf.keep(profile)
    assert Profile.from_bytes(path.read_bytes()).digest == profile.digest
    assert shelf.profile_for(profile.kin) is not None
    assert shelf.profile_of(profile.digest).declared == profile.declared
    assert shelf.profile_for(b"?" * 32) is None
    with pytest.raises(MissingProfile, match="not in"):
        shelf.profile_of(b"?" * 32)


def test_a_damaged_profile_is_missing_and_an_older_one_serves(
    cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = learned("llama-gqa")
    path = shelf.keep(profile)
    path.write_bytes(path.read_bytes()[:-1])
    assert shelf.profile_for(profile.kin) is None
    assert "cannot be read" in caplog.text
    path.write_bytes(learned("llama-mqa").to_bytes())
    with pytest.raises(MissingProfile, match="another profile"):
        shelf.profile_of(profile.digest)


def test_without_gradients_sensitivities_are_found_by_trying() -> None:
    felt, tried = learned("llama-gqa"), learned("llama-gqa", noise=True)
    assert all(part.probe is None for part in tried.parts)
    for level in LEVELS:
        assert tried.declared[level][0] < PROMISED[level]
        assert tried.declared[level][1] < 1.5 * felt.declared[level][1]


def test_tokens_that_tell_their_keys_are_predicted_from() -> None:
    profile = learned("llama-gqa")
    assert profile.parts[0].predicted is not None
    assert profile.parts[0].predicted.shape[0] == profile.token_ids.size > 20


def test_too_few_texts_are_refused() -> None:
    _, study = tiny("llama-gqa")
    with pytest.raises(ConfigError, match="at least 10 texts"):
        make(study, [text(1)] * 9, WIDTH)
    with pytest.raises(ConfigError, match="more than 640 tokens"):
        make(study, [text(1, 640)] * 10, WIDTH)


def test_parts_are_as_wide_as_allowed_and_cover_every_layer() -> None:
    spec = tiny("llama-gqa")[1].spec
    assert group_for(spec, 10_000) == 3
    assert group_for(spec, 128) == 2
    assert group_for(spec, 1) == 1
    parts = plan(spec.layers, 2)
    assert [(s.array, s.start, s.stop) for each in parts for s in each.segments] == [
        ("k", 0, 2), ("v", 0, 2), ("k", 2, 3), ("v", 2, 3),
    ]  # fmt: skip
    assert [each.width for each in parts] == [128, 64]
