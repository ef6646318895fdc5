"""The texts that profiles are learned from when none are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retain.bench import texts as judged
from retain.errors import ConfigError
from retain.profile.texts import MODULES, calibration, from_files


def encode(text: str) -> list[int]:
    """One token a word, behind one that stands before every text."""
    return [1, *(2 + hash_of(word) % 5000 for word in text.split())]


def hash_of(word: str) -> int:
    return sum(byte * 31**place for place, byte in enumerate(word.encode()))


def test_the_texts_are_the_same_at_every_call_and_begin_as_prompts_do() -> None:
    found = calibration(encode, 16, 300)
    again = calibration(encode, 16, 300)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    assert [len(each) for each in found] == [300] * 16
    assert all(each[0] == 1 and not (each[1:] == 1).any() for each in found)
    assert len({each.tobytes() for each in found}) == 16


def test_no_text_is_one_that_benches_judge_by() -> None:
    assert not set(MODULES) & set(judged.MODULES)


def test_files_are_read_in_stretches(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("word " * 700)
    assert [len(each) for each in from_files(encode, [file], 300)] == [300, 300]
    file.write_text("short")
    with pytest.raises(ConfigError, match="needs 256 tokens"):
        from_files(encode, [file], 300)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_files(encode, [tmp_path / "none"], 300)
