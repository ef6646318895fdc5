"""The shelf: where this machine's profiles lie, found by their digest or by the model they are of."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retain.digests import cache_directory
from retain.errors import InvalidProfile, MissingProfile

if TYPE_CHECKING:
    from retain.codecs.ladder.profile import Profile

log = logging.getLogger("retain.codecs")

HELD = 4
"""Profiles held in memory: one of a small model takes a hundred megabytes."""

_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class Shelved:
    """A profile's file: of which kin, its digest, when it was made."""

    path: Path
    kin: bytes
    digest: bytes
    made: float


_lock = threading.Lock()
_held: OrderedDict[Path, Profile] = OrderedDict()


def folder() -> Path:
    """Where profiles lie: `profiles` in Retain's cache directory."""
    return cache_directory() / "profiles"


def keep(profile: Profile) -> Path:
    """Put a profile on the shelf, whole or not at all; its file."""
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{profile.kin.hex()}.{profile.digest.hex()}.safetensors"
    with tempfile.NamedTemporaryFile(dir=place, prefix=".profile.", delete=False) as file:
        try:
            file.write(profile.to_bytes())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path


def shelved() -> list[Shelved]:
    """The profiles at hand, the newest first."""
    found = []
    try:
        for entry in os.scandir(folder()):
            match = _NAME.fullmatch(entry.name)
            if match:
                kin, digest = (bytes.fromhex(part) for part in match.groups())
                found.append(Shelved(Path(entry.path), kin, digest, entry.stat().st_mtime))
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda each: (-each.made, each.digest))


def profile_of(digest: bytes) -> Profile:
    """The profile with this digest. Raises MissingProfile where it is not here or cannot be read."""
    for each in shelved():
        if each.digest == digest:
            return _read(each)
    raise MissingProfile(
        f"the object needs the profile {digest.hex()[:16]}, which is not in {folder()}: copy it there, or "
        "the object cannot be read"
    )


def profile_for(kin: bytes) -> Profile | None:
    """The newest profile of a kin that can be read; None where there is none: `retain profile` makes one."""
    for each in shelved():
        if each.kin == kin:
            try:
                return _read(each)
            except MissingProfile as error:
                log.warning("%s", error)
    return None


def _read(each: Shelved) -> Profile:
    from retain.codecs.ladder.profile import Profile

    with _lock:
        if each.path in _held:
            _held.move_to_end(each.path)
            return _held[each.path]
    try:
        profile = Profile.from_bytes(each.path.read_bytes())
    except (OSError, InvalidProfile) as error:
        raise MissingProfile(f"the profile {each.path} cannot be read: {error}") from error
    if profile.digest != each.digest or profile.kin != each.kin:
        raise MissingProfile(f"the file {each.path} holds another profile than its name says")
    with _lock:
        _held[each.path] = profile
        while len(_held) > HELD:
            _held.popitem(last=False)
    return profile
