"""What audits measured of each level on a model's own traffic, and which levels that has switched off.

One small file a kin beside the profiles, so that whoever encodes for a model heeds what an engine found out.
"""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from retain.codecs.ladder import shelf
from retain.fidelity import PROMISED

log = logging.getLogger("retain.codecs")

LEAST_TOKENS = 256
"""A level is judged by no fewer next tokens: the KL of a single one may be a hundred times the mean."""

TOLERANCE = 3.0
"""How far the mean may lie above what a level promises: an audit looks at the tokens right behind the coded
ones, which feel it about twice as much as later ones do (docs/quality.md)."""


@dataclass(frozen=True)
class Measured:
    """A level on a model's traffic: next tokens looked at, their mean KL in nats, whether it is switched
    off."""

    tokens: int
    kl: float
    off: bool


def record(kin: bytes, level: str, kl: float, tokens: int) -> Measured:
    """Add what an audit found: the summed KL of so many next tokens. Switches the level off where the mean is
    above its bound. Raises OSError where the cache directory cannot be written.
    """
    path = _path(kin)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = _decoded(file.read())
        before = known.get(level, Measured(0, 0.0, False))
        count = before.tokens + tokens
        mean = (before.kl * before.tokens + kl) / count
        above = count >= LEAST_TOKENS and mean > TOLERANCE * PROMISED[level]
        found = Measured(count, mean, before.off or above)
        known[level] = found
        file.truncate(0)
        file.write(msgspec.json.encode(known))
    if found.off and not before.off:
        log.error(
            "%s is switched off for the model of kin %s: over %d audited tokens its mean KL is %.2g,"
            " above the bound of %.2g; its blocks are coded as int8 now, and kept ones are not used",
            level, kin.hex()[:16], count, mean, TOLERANCE * PROMISED[level],
        )  # fmt: skip
    return found


def measured(kin: bytes) -> dict[str, Measured]:
    """What audits found of a kin, by level."""
    try:
        return _decoded(_path(kin).read_bytes())
    except FileNotFoundError:
        return {}


def is_switched_off(kin: bytes, level: str) -> bool:
    """Whether a level's loss was found to be above its bound on this model's traffic."""
    path = _path(kin)
    try:
        changed = os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return False
    held = _held.get(path)
    if held is None or held[0] != changed:
        held = _held[path] = (changed, measured(kin))
    return level in held[1] and held[1][level].off


_held: dict[Path, tuple[int, dict[str, Measured]]] = {}


def _path(kin: bytes) -> Path:
    return shelf.folder() / f"{kin.hex()}.measured.json"


def _decoded(data: bytes) -> dict[str, Measured]:
    try:
        return msgspec.json.decode(data, type=dict[str, Measured]) if data else {}
    except msgspec.MsgspecError:
        return {}
