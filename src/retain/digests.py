"""Digests remembered by the identity of files, so that weights need not be read again to know them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from retain.identity import digest

_FORMAT = 1
_CHUNK_BYTES = 1 << 24
_MOST_ENTRIES = 512
_SETTLED_NS = 50_000_000
"""A file changed less than this before it was read may change again within one tick of the file system's
clock."""


def cache_directory() -> Path:
    """Where Retain keeps what it can make again: $XDG_CACHE_HOME/retain, by default ~/.cache/retain."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "retain"


def identity_of(files: Sequence[Path], *facts: str) -> bytes:
    """What tells these files from any other state of them: path, size, times of change and inode; and further
    facts.

    A file that is written to, replaced or moved has another identity.
    """
    states = []
    for file in files:
        state = file.stat()
        path = os.fsencode(file.resolve())
        states.append((path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev))
    return digest("retain/files", states, facts)


def settled(files: Sequence[Path]) -> bool:
    """Whether the files' last changes lie far enough back for their identities to tell them from later
    changes."""
    newest = max(max(state.st_mtime_ns, state.st_ctime_ns) for state in (file.stat() for file in files))
    return newest < time.time_ns() - _SETTLED_NS


def content_of(path: Path, known: DigestCache) -> bytes:
    """A digest of a file's bytes, remembered by the file's identity."""
    identity = identity_of((path,), "content")
    trusted = settled((path,))
    kept = known.get(identity)
    if kept is not None and "content" in kept:
        return kept["content"]
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    content = digest("retain/file", hasher.digest())
    if trusted and identity == identity_of((path,), "content"):
        known.put(identity, {"content": content})
    return content


class DigestCache:
    """Digests by file identity, in one JSON file. A damaged file is an empty one; a lost entry is computed
    again."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_directory() / "digests.json"

    def get(self, identity: bytes) -> dict[str, bytes] | None:
        """The digests kept under a file identity."""
        entry = self._read().get(identity.hex())
        if not isinstance(entry, dict):
            return None
        try:
            return {name: _digest(value) for name, value in entry.items()}
        except (TypeError, ValueError):
            return None

    def put(self, identity: bytes, digests: dict[str, bytes]) -> None:
        """Keep digests under a file identity. A directory that cannot be written keeps nothing, and says
        nothing."""
        entries = self._read()
        entries.pop(identity.hex(), None)
        entries[identity.hex()] = {name: value.hex() for name, value in digests.items()}
        kept = dict(list(entries.items())[-_MOST_ENTRIES:])
        with contextlib.suppress(OSError), replacing(self.path) as temporary:
            temporary.write_text(json.dumps({"format": _FORMAT, "entries": kept}, indent=0))

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            return {}
        entries = document.get("entries")
        return entries if isinstance(entries, dict) else {}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file of another name that takes the place of `path` when the block ends well, and is gone when it
    does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(text: Any) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != 32:
        raise ValueError("not a digest of 32 bytes")
    return value
