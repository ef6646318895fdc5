"""Tier addresses, read strictly: `memory:4GiB`, `disk:PATH?capacity=50GiB&codec=lossless`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path

from retain.errors import ConfigError

MAX_BYTES = (1 << 63) - 1
"""The largest size that a file or an arena can have, and so the largest capacity."""

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,9})?) ?([A-Za-z]{0,4})")
_OPTIONS: dict[str, tuple[str, ...]] = {"memory": (), "disk": ("capacity", "codec")}


@dataclass(frozen=True)
class TierAddress:
    """One tier as asked for: its kind, a disk tier's folder, its capacity in bytes, the codec of its objects.

    `capacity` None means that only the medium bounds the tier; 0 is legal and keeps nothing.
    """

    kind: str
    path: Path | None = None
    capacity: int | None = None
    codec: str = "raw"

    def __str__(self) -> str:
        """The address again, as `parse_tier` reads it."""
        if self.kind == "memory":
            return f"memory:{format_size(self.capacity or 0)}"
        options = []
        if self.capacity is not None:
            options.append(f"capacity={format_size(self.capacity)}")
        if self.codec != "raw":
            options.append(f"codec={self.codec}")
        return f"{self.kind}:{self.path}" + (f"?{'&'.join(options)}" if options else "")


def parse_tier(text: str) -> TierAddress:
    """Read a tier's address. Raises ConfigError with the offending part of it.

    A disk path ends at the first `?`; a leading `~` is the home folder.
    """
    kind, colon, rest = text.partition(":")
    if kind not in _OPTIONS:
        raise ConfigError(
            f"the tier {text!r} is of no known kind; write memory:SIZE or disk:PATH?capacity=SIZE"
            + suggestion(kind, _OPTIONS)
        )
    place, _, query = rest.partition("?")
    if not colon or not place:
        wanted = {"memory": "a size, as in memory:4GiB", "disk": "a folder, as in disk:PATH?capacity=50GiB"}
        raise ConfigError(f"the tier {text!r} lacks {wanted[kind]}")
    options = _read_options(text, kind, query)
    if kind == "memory":
        return TierAddress("memory", capacity=_capacity(text, place))
    capacity = options.get("capacity")
    codec = options.get("codec", "raw")
    _check_codec(text, codec)
    limit = None if capacity is None else _capacity(text, capacity)
    return TierAddress("disk", Path(place).expanduser(), limit, codec)


def _check_codec(text: str, codec: str) -> None:
    if codec == "raw":
        return
    # Only where it is needed: codecs bring numpy, which would double the time of `retain --help`.
    from retain.codecs import CODECS

    if codec not in CODECS:
        raise ConfigError(
            f"the tier {text!r} names the unknown codec {codec!r}; known are {', '.join(CODECS)}"
            + suggestion(codec, CODECS)
        )


def _read_options(text: str, kind: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, equals, value = pair.partition("=")
        if name not in _OPTIONS[kind]:
            known = ", ".join(_OPTIONS[kind]) or "none"
            raise ConfigError(
                f"the tier {text!r} has the unknown option {name!r}; a {kind} tier knows {known}"
                + suggestion(name, _OPTIONS[kind])
            )
        if name in options:
            raise ConfigError(f"the tier {text!r} gives the option {name!r} twice")
        if not equals or not value:
            raise ConfigError(f"the tier {text!r} gives no value for the option {name!r}")
        options[name] = value
    return options


def _capacity(text: str, size: str) -> int:
    try:
        return parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"the tier {text!r} has a capacity that cannot be used: {error}") from error


def parse_size(text: str) -> int:
    """Bytes from `4GiB` (powers of 1024), `5GB` (powers of 1000) or a plain number. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, as in 500MB or 4GiB")
    number, unit = match.groups()
    if unit not in UNITS:
        close = [each for each in UNITS if each != "KB" and each.lower().startswith(unit.lower())]
        hint = f"; did you mean {' or '.join(number + each for each in close)}?" if close else ""
        known = ", ".join(filter(None, UNITS))
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}; known are {known}{hint}")
    size = Fraction(number) * UNITS[unit]
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    if size > MAX_BYTES:
        raise ConfigError(f"{text!r} is more than any store can hold, which is {MAX_BYTES} bytes")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact text of a size that `parse_size` reads back: 4GiB, 500MB, 1B."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if unit and unit != "KB" and size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest known word, or nothing."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
