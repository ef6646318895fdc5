"""Remembered digests: never those of a file that changed, and never in the way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from retain.digests import DigestCache, cache_directory, identity_of, settled

DIGESTS = {"kin": b"k" * 32, "weights": b"w" * 32}


def test_what_was_put_is_got_by_another_process_opening_the_same_file(tmp_path: Path) -> None:
    DigestCache(tmp_path / "d.json").put(b"i" * 32, DIGESTS)
    assert DigestCache(tmp_path / "d.json").get(b"i" * 32) == DIGESTS
    assert DigestCache(tmp_path / "d.json").get(b"j" * 32) is None
    assert os.listdir(tmp_path) == ["d.json"]


@pytest.mark.parametrize("change", ["append", "overwrite", "replace", "touch", "rename"])
def test_a_file_that_changed_in_any_way_has_another_identity(tmp_path: Path, change: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 100)
    before = path.stat()
    identity = identity_of((path,), "float32")
    assert identity_of((path,), "float32") == identity
    assert identity_of((path,), "bfloat16") != identity
    if change == "append":
        path.write_bytes(b"a" * 101)
    elif change == "overwrite":
        time.sleep(0.02)
        path.write_bytes(b"b" * 100)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a careful copying tool would
    elif change == "replace":
        (tmp_path / "other").write_bytes(b"b" * 100)
        (tmp_path / "other").replace(path)
    elif change == "touch":
        os.utime(path, ns=(0, 0))
    else:
        path = path.rename(tmp_path / "moved")
    assert identity_of((path,), "float32") != identity


def test_a_file_written_a_moment_ago_is_not_yet_settled(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    assert not settled((path,))
    time.sleep(0.08)
    assert settled((path,))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 99, "entries": {}}',
        b'{"format": 1, "entries": []}',
        b'{"format": 1, "entries": {"%s": 3}}' % (b"69" * 32),
        b'{"format": 1, "entries": {"%s": {"kin": "xyz"}}}' % (b"69" * 32),
        b'{"format": 1, "entries": {"%s": {"kin": "abcd"}}}' % (b"69" * 32),
        b'{"format": 1, "entries": {"%s": {"kin": null}}}' % (b"69" * 32),
    ],
)
def test_a_damaged_file_is_an_empty_one_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(damage)
    cache = DigestCache(path)
    assert cache.get(b"i" * 32) is None
    cache.put(b"i" * 32, DIGESTS)
    assert cache.get(b"i" * 32) == DIGESTS


def test_a_place_that_cannot_be_written_keeps_nothing_and_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = DigestCache(tmp_path / "file" / "d.json")
    cache.put(b"i" * 32, DIGESTS)
    assert cache.get(b"i" * 32) is None


def test_the_file_stays_small(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "d.json")
    cache.put(b"\xff" * 32, DIGESTS)
    entries = {bytes([1, n // 256, n % 256]).ljust(32): DIGESTS for n in range(60)}
    for identity, digests in entries.items():
        cache.put(identity, digests)
    assert all(cache.get(identity) == digests for identity, digests in entries.items())
    assert (tmp_path / "d.json").stat().st_size < 100_000


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "retain"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "retain"
